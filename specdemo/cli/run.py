"""The `run` command: show a run, and write its trace."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from specdemo.cli.arguments import given
from specdemo.cli.rendering import Coloured, Json, LoadingLine, Steps
from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.generate import generate
from specdemo.recipe import Recipe
from specdemo.worker import handle_signals


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0, 1 for a failed run, 130 if interrupted. Raises `UserError` for invalid input."""
    recipe = Recipe(**given(options))
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _open(options.trace) as file, handle_signals(signal.default_int_handler, signal.SIGTERM):
        return _show(generate(recipe, prompt), options, file)


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the trace to {path}: {error.strerror}") from error


def _show(events: Iterator[Event], options: argparse.Namespace, file: TextIO | None) -> int:
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
