"""The commands of ``python -m devstream``, a module each, with ``add_parser`` as the way in."""
