"""Command line: ``python -m specdemo run PROMPT``, ``bench``, ``prove``, ``preflight``, ``serve``."""

from __future__ import annotations

import sys

from specdemo.cli.arguments import parser
from specdemo.core.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 for a failed run, 2 for invalid input, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:  # importing the commands takes seconds
        if options.command == "run":
            from specdemo.cli.run import run

            return run(options)
        from specdemo.cli.commands import COMMANDS

        return COMMANDS[options.command](options)
    except UserError as error:
        print(f"specdemo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe
        sys.stderr.close()
        return 0
