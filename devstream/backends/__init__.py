"""One file a vendor, each the only place that may name that vendor's modules. Nothing is imported from here.

A backend is a class that derives from `devstream.abc.Backend`; the registry finds it by name or by device type.
"""
