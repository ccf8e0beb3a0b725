"""Command line: ``python -m specdemo run PROMPT``, ``bench``, ``prove``, ``preflight``, ``serve``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from specdemo.cli.arguments import given, parser
from specdemo.cli.commands import COMMANDS
from specdemo.cli.rendering import Coloured, Json, LoadingLine, Steps
from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.generate import generate
from specdemo.recipe import Recipe
from specdemo.worker import handle_signals


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 for a failed run, 2 for invalid input, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        if options.command in COMMANDS:
            return COMMANDS[options.command](options)
        recipe = Recipe(**given(options))
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with _open(options.trace) as file, handle_signals(signal.default_int_handler, signal.SIGTERM):
            return _run(generate(recipe, prompt), options, file)
    except UserError as error:
        print(f"specdemo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe
        sys.stderr.close()
        return 0


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the trace to {path}: {error.strerror}") from error


def _run(events: Iterator[Event], options: argparse.Namespace, file: TextIO | None) -> int:
    view = Json() if options.json else Steps() if options.steps else Coloured()
    loading, metrics = LoadingLine(), None

    def put(event: Event) -> None:
        if file:
            file.write(trace.write(event))
        view.show(event)

    try:
        for event in events:
            if isinstance(event, Loading):
                loading.show(event)
                continue
            loading.show()
            if isinstance(event, (Header, StepEvent)):
                metrics = event.metrics if isinstance(event, StepEvent) else Metrics()
            put(event)
    except KeyboardInterrupt:
        if metrics is not None:
            put(End("cancelled", None, metrics))
        return 130
    if isinstance(event, End) and event.reason == "error":
        print(f"specdemo: the run failed: {event.error}", file=sys.stderr)
        return 1
    return 0
