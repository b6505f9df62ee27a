"""``python -m devstream``: the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from devstream.cli import _demo, _info, _racecheck
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
    for command in (_info, _demo, _racecheck):
        command.add_parser(commands)
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse leaves for --help and for errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        code: int = options.run(options)
    except (DevstreamError, UsageError) as error:
        sys.stderr.write(f"devstream {options.command}: {error}\n")
        return 2
    except BrokenPipeError:  # whoever read the output, `head` for instance, has seen enough
        # Python would complain once more at exit, when it writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:  # a disk that is full, a file that went away meanwhile
        sys.stderr.write(f"devstream {options.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"devstream {options.command}: interrupted; nothing was written\n")
        return _INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
