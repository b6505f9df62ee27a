"""Work that runs beside other work: copies for now."""

from devstream.overlap._copy import copy

__all__ = ["copy"]
