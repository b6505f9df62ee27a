"""``python -m devstream``: the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from devstream.cli import _check, _demo, _diagnose, _explain, _info, _measure, _racecheck
from devstream.cli._output import complain
from devstream.cli._usage import Parser, UsageError
from devstream.exceptions import DevstreamError

#: What a shell reports for a program that Ctrl-C ended.
_INTERRUPTED = 130
#: What a shell reports for a program whose reader went away.
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in *argv* (default: the process's arguments) and return its exit code."""
    parser = Parser(prog="devstream", description="Streams and events, the same on every device.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in (_info, _check, _explain, _demo, _measure, _diagnose, _racecheck):
        command.add_parser(commands)
    _take_closed_descriptors()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse leaves for --help and for errors
        return stop.code if isinstance(stop.code, int) else 2
    who = f"devstream {options.command}"
    if sys.stdout is None:
        complain(f"{who}: standard output is closed, so the result has nowhere to go")
        return 2
    try:
        code: int = options.run(options)
        sys.stdout.flush()  # here, where what goes wrong can be told in a line
    except (DevstreamError, UsageError) as error:
        complain(f"{who}: {error}")
        return 2
    except BrokenPipeError:  # whoever read the output, `head` for instance, has seen enough
        _drop_output()
        return _BROKEN_PIPE
    except OSError as error:  # a disk that is full, a file that went away meanwhile
        complain(f"{who}: {error}")
        _drop_output()
        return 2
    except KeyboardInterrupt:
        complain(f"{who}: interrupted; nothing was written")
        return _INTERRUPTED
    return code


def _take_closed_descriptors() -> None:
    """Open the null device where the shell closed a standard stream: else the next file would get its number.

    Whatever a library of C prints would go into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _drop_output() -> None:
    """Forget what can't be written: Python would try once more at exit, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
