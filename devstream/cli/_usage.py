"""What a user asked for can't be done: one line and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn


class UsageError(Exception):
    """Its text says what was asked for and what is possible."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line; ``--help`` tells the rest."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def writable(option: str, given: str) -> Path:
    """Return the file that *option* names, or raise `UsageError` where it could not be written."""
    path = Path(given).absolute()
    if path.is_dir():
        raise UsageError(f"{option} {given}: is a folder; give a file's name")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{option} {given}: is a link or a device, which would be replaced; give a file's name")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {given}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {given}: the folder {path.parent} isn't writable")
    return path
