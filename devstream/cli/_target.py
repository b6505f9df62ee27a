"""``MODULE:FUNCTION`` on a command line, and what the function is to be called with."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any  # Any: whatever a user's module holds

from devstream.cli._usage import UsageError
from devstream.exceptions import DevstreamError

INPUTS = "example_inputs"
CONVENTION = (
    f"The arguments come from the function {INPUTS}() of the same module, or the one that --inputs names: it "
    "takes nothing and returns a tuple of arguments, or one tensor. Without it FUNCTION is called without any."
)


@dataclass(frozen=True, slots=True)
class Target:
    """A function with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def add_arguments(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """Let *parser* take a target, and ``--json`` unless *json* says that the command has one of its own."""
    parser.add_argument(
        "target", metavar="MODULE:FUNCTION", help="for instance train:step, train.py:step or pkg.model:net.forward"
    )
    parser.add_argument("--inputs", metavar="NAME", help=f"what makes the arguments (default: {INPUTS})")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def find(options: argparse.Namespace) -> Target:
    """Import the module and return the function with its arguments.

    Raises:
        UsageError: there is no such module or function, or its code raised.
    """
    place, colon, name = options.target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{options.target}: give MODULE:FUNCTION, for instance train:step")
    module = _module(place)
    function = _attribute(module, name, place)
    if not callable(function):
        raise UsageError(f"{options.target} is a {type(function).__name__}, which can't be called")
    wanted = options.inputs or INPUTS
    if options.inputs is None and not hasattr(module, INPUTS):
        if _needs_arguments(function):
            raise UsageError(f"{options.target} takes arguments: write {INPUTS}() in {place}, which returns them")
        return Target(function, ())
    with told(f"{wanted}() of {place}"):
        made = _attribute(module, wanted, place)()
    return Target(function, tuple(made) if isinstance(made, tuple | list) else (made,))


@contextmanager
def quiet(options: argparse.Namespace) -> Iterator[None]:
    """Keep what the user's code prints out of standard output where that takes JSON."""
    with contextlib.redirect_stdout(sys.stderr) if options.json and sys.stderr else contextlib.nullcontext():
        yield


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        # `python -m devstream` finds the modules of the current folder, and the script `devstream` must too.
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.insert(0, str(Path.cwd()))
        with told(f"import {place}"):
            return importlib.import_module(place)
    path = Path(place).absolute()
    if not path.is_file():
        raise UsageError(f"{place}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as `python FILE` does, for the modules beside it
    sys.modules.setdefault(path.stem, module)
    with told(f"import {place}"):
        spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name}")
        found = getattr(found, part)
    return found


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # no signature to be had
        return False
    return False


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line."""
    try:
        yield
    except (UsageError, DevstreamError):  # these are told in a line anyway
        raise
    except (Exception, SystemExit) as error:  # it may raise anything
        first = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{what}: {type(error).__name__}: {first}") from error


__all__ = ["CONVENTION", "INPUTS", "Target", "add_arguments", "find", "quiet", "told"]
