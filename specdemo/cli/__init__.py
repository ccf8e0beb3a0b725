"""Command line: `python -m specdemo run PROMPT` and the other commands of `arguments.py`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from typing import Any

from specdemo.cli.arguments import parser
from specdemo.core.errors import FULL_DISK, UserError, write_error


@contextmanager
def _compiling_engine() -> Iterator[None]:
    """Compile the native engine during the imports of a run, which take seconds; end a compilation that it left."""
    from specdemo.native.build import compiler_processes, native_library
    from specdemo.worker import run_in_thread

    compiled = run_in_thread(native_library)
    try:
        yield
    finally:
        if not compiled.done():
            compiler_processes.stop()
            wait([compiled])
            compiler_processes.resume()


def _execute(options: argparse.Namespace) -> int:
    from specdemo.signals import exit_at_once, handle_signals, interrupt

    received: list[int] = []

    def end(number: int, frame: Any) -> None:
        received.append(number)
        interrupt(number, frame)

    with _compiling_engine() if options.command == "run" else nullcontext():
        with handle_signals(exit_at_once, signal.SIGINT, signal.SIGTERM):  # libraries cannot be imported by halves
            command: Callable[[argparse.Namespace], int]
            if options.command == "run":
                from specdemo.cli.run import run

                command = run
            else:
                from specdemo.cli.commands import COMMANDS

                command = COMMANDS[options.command]
        try:
            with handle_signals(end, signal.SIGINT, signal.SIGTERM):
                return command(options)
        except Exception:  # libraries convert the interrupt
            if not received:
                raise
            return 130


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 for a failed run, 2 for invalid input, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters of the text
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    try:
        return _execute(options)
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(f"specdemo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"specdemo: {write_error('the output', error)}", file=sys.stderr)
        return 2
