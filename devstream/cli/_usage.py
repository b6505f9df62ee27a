"""What a user asked for can't be done: one line and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UsageError(Exception):
    """Its text says what was asked for and what is possible."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line; ``--help`` tells the rest."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
