"""The terminal: ``python -m specdemo run PROMPT``, ``bench``, ``prove``, ``preflight`` and what else measures."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from specdemo.cli.arguments import given, parser
from specdemo.cli.commands import COMMANDS
from specdemo.cli.rendering import Coloured, Json, Loading, Rounds
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.generate import Record, ending, generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.signals import handle_signals


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a run that failed, 2 for bad input, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        if options.command in COMMANDS:
            return COMMANDS[options.command](options)
        recipe = Recipe(**given(options))
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with _open(options.trace) as trace, handle_signals(signal.default_int_handler, signal.SIGTERM):
            return _run(generate(recipe, prompt, ModelPool()), options, trace)
    except UserError as refusal:
        print(f"specdemo: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever was reading has had enough
        sys.stderr.close()
        return 0


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the trace to {path}: {error.strerror}") from error


def _run(records: Iterator[Record], options: argparse.Namespace, trace: TextIO | None) -> int:
    view = Json() if options.json else Rounds() if options.steps else Coloured()
    metrics, loading = Metrics(), Loading()
    began = False

    def put(record: Record) -> None:
        if trace:
            trace.write(json.dumps(record) + "\n")
        view.show(record)

    try:
        for record in records:
            if "phase" in record:
                loading(record)
                continue
            loading()
            began = True
            if "i" in record:
                metrics.add_record(record)
            put(record)
    except KeyboardInterrupt:
        if began:
            put(ending("cancelled", metrics))
        return 130
    if record["end"] == "error":
        print(f"specdemo: the run failed: {record['error']}", file=sys.stderr)
        return 1
    return 0
