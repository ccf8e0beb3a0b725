"""The `run` command: show a run as trace, coloured text or steps in words; files and progress of all commands."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from specdemo.cli.arguments import checked_recipe, given, with_pair_settings
from specdemo.core import trace
from specdemo.core.errors import UserError, check_name, write_error
from specdemo.core.events import INTERRUPTED, End, Event, Header, Loading, StepEvent
from specdemo.core.explain import (
    STYLES,
    Decision,
    decision_of,
    exact_label,
    explain,
    explain_engine,
    failover_note,
    figure,
)
from specdemo.core.formats import number, percent
from specdemo.core.ledger import Ledger, one_row_seconds
from specdemo.core.metrics import Metrics
from specdemo.core.rules import rule_traits
from specdemo.core.step import Outcome, Step
from specdemo.generate import generate
from specdemo.recipe import PRESETS, Recipe

RESET = "\x1b[0m"
PROGRESS_S = 30.0  # seconds between lines of progress in files and pipes
_MOST_READ = 20_000_000  # characters of a file


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0, 1 for a failed run, 130 if interrupted. Raises `UserError` for invalid input."""
    recipe = recipe_of_flags(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    opened = nullcontext() if options.trace is None else closing(OutputFile(options.trace, "the trace"))
    with opened as file:
        return _show(generate(recipe, prompt), options, file)


def recipe_of_flags(options: argparse.Namespace) -> Recipe:
    flags = given(options)
    values = flags
    if options.preset is not None:
        check_name("preset", options.preset, PRESETS)
        values = PRESETS[options.preset].apply(flags)
    return checked_recipe(with_pair_settings(values), flags)


def _show(events: Iterator[Event], options: argparse.Namespace, file: OutputFile | None) -> int:
    view = Steps() if options.steps else TextView(has_colour(options.color), options.raw)
    ledger = (sys.stderr if options.json else sys.stdout) if options.ledger else None
    output = _Output(_print_line if options.json else view.show, file, ledger)
    try:
        for event in events:
            output.add(event)
    except KeyboardInterrupt:
        if output.metrics is not None:
            output.put(End("cancelled", INTERRUPTED, output.metrics))
        return 130
    except Exception as error:
        if output.metrics is not None:
            output.record(End("error", str(error) or type(error).__name__, output.metrics))
        raise
    if isinstance(event, End) and event.reason == "error":
        print(f"specdemo: the run failed: {event.error}", file=sys.stderr)
        return 1
    return 0


class _Output:
    """Terminal and trace file of a run; `ledger` gets the wall time by cause."""

    def __init__(self, show: Callable[[Event], None], file: OutputFile | None, ledger: TextIO | None) -> None:
        self._show, self._file = show, file
        self._ledger = ledger
        self._loading = StatusLine()
        self._steps: list[Step] = []
        self._environment: Mapping[str, Any] = {}
        self.metrics: Metrics | None = None  # set by the header

    def add(self, event: Event) -> None:
        match event:
            case Loading():
                if self.metrics is None:  # later, the line of the prompt would be overwritten
                    show_loading(self._loading, event)
                return
            case Header():
                self.metrics, self._environment = Metrics(), event.environment
            case StepEvent():
                self.metrics = event.metrics
                if self._ledger:
                    self._steps.append(event.step)
        self._loading.clear()
        self.put(event)

    def put(self, event: Event) -> None:
        self.record(event)
        self._show(event)
        if self._ledger and isinstance(event, End):
            print("\n".join(_ledger_lines(self._steps, self._environment)), file=self._ledger)

    def record(self, event: Event) -> None:
        if self._file:
            self._file.write(trace.write(event))


def _ledger_lines(steps: Sequence[Step], environment: Mapping[str, Any]) -> Iterator[str]:
    ledger = Ledger.of(steps, one_row_seconds(steps, environment))
    if ledger is None:
        yield "no ledger: the durations of the steps are unknown"
        return
    yield f"wall time {1000 * ledger.wall_s:.1f} ms"
    for entry in ledger.entries:
        name, seconds, share, units = entry.cells(ledger.wall_s)
        yield f"  {name:<32}{seconds:>12}{share:>7}  {units}"
    if ledger.loss:
        yield f"largest extra cost: {ledger.loss}"


def _print_line(event: Event) -> None:
    print(trace.write(event), end="", flush=True)


class TextView:
    """View that prints the text: coloured by outcome, with rejected tokens, or committed tokens only.

    The prompt of a chat is the template around the user's message; `raw` shows it.
    """

    def __init__(self, coloured: bool, raw: bool) -> None:
        self._coloured = coloured
        self._raw = raw

    def show(self, event: Event) -> None:
        match event:
            case Header():
                self._header = event
                if self._raw or not event.recipe["chat"]:
                    print(event.prompt, end="\n" if event.encoder else "", flush=True)
            case StepEvent():
                print(coloured_text(event, self._coloured), end="", flush=True)
            case End():
                print(f"\n\n{_last_lines(self._header, event)}")


def has_colour(choice: str) -> bool:
    """Return True for `always`, and for `auto` on a terminal unless NO_COLOR is set (https://no-color.org)."""
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


class Steps:
    """View that explains every step."""

    def show(self, event: Event) -> None:
        match event:
            case Header():
                self._header, self._recipe = event, event.recipe
                self._position = 0 if event.encoder else len(event.prompt_tokens)
            case StepEvent():
                print("\n".join(self._lines(event)), flush=True)
                self._position += len(event.step.tokens)
            case End():
                print(f"\n{_last_lines(self._header, event)}")

    def _lines(self, event: StepEvent) -> Iterator[str]:
        step, verdict = event.step, event.step.verdict
        yield (
            f"--- step {step.i}  position {self._position}  gamma {step.gamma}  "
            f"drafted {step.draft.size}  accepted {len(verdict.accepted)} ---"
        )
        for node, text in enumerate(event.draft_texts):
            test = _test(decision_of(step, node, self._recipe))
            yield f"  {text!r:>16}  {test}{explain(step, node, self._recipe)}"
        if step.draft.undisclosed:
            yield f"  {f'+{step.draft.undisclosed}':>16}  not reported by the engine"
        if step.searched:
            yield f"  committed {event.text!r}  best beam continues {event.pending_text!r}"
        if verdict.token is not None:
            yield f"  {event.pieces[-1]!r:>16}  {step.kind}: {explain(step, None, self._recipe)}"


def show_loading(line: StatusLine, event: Loading) -> None:
    (line.warn if event.warning else line.show)(event.text)


def coloured_text(event: StepEvent, coloured: bool) -> str:
    """Return the committed text; with `coloured`, by outcome and with rejected tokens."""
    lost = "[connection to the cloud lost: the drafter continues alone]" if event.step.lost else ""
    note = failover_note(event.step)
    return lost + (f"[{note}]" if note else "") + ("".join(_spans(event)) if coloured else event.text)


def _spans(event: StepEvent) -> Iterator[str]:
    undisclosed = event.step.draft.undisclosed
    for shown in event.shown():
        if undisclosed and shown.outcome is Outcome.CORRECTION:
            yield f"{STYLES[Outcome.IGNORED].ansi}+{undisclosed}{RESET}"
        style = STYLES[shown.outcome].ansi
        text = shown.text if shown.outcome.committed else shown.text.replace("\n", "\u23ce")
        yield f"{style}{text}{RESET}" if style else text


def _test(decision: Decision) -> str:
    if decision.p is None:
        return ""
    q = 1.0 if decision.q is None else decision.q
    last = f"rank={decision.rank}" if decision.rank else f"bound={figure(decision.bound)}"
    return f"q={figure(q)}  p={figure(decision.p)}  {last:<11}  "


def _last_lines(header: Header, end: End) -> str:
    claimed = header.exact or header.recipe.get("external")
    guarantee = exact_label(header.recipe, end.metrics.remote) if claimed else "LOSSY"
    guarantee = "incomplete" if end.reason == "error" else guarantee
    metrics = end.metrics
    alpha = None if rule_traits(header.recipe).chains_only else metrics.alpha
    ending = f"{end.reason} (context full)" if end.context_full else end.reason
    return (
        f"{metrics.tokens} tokens  {number(metrics.tokens_per_second, 1, '-')} tokens/s  "
        f"accepted {metrics.accepted}/{metrics.drafted} drafted ({percent(metrics.acceptance_rate, '-', '')})  "
        f"alpha {number(alpha, 2, '-')}  mean overlap {number(metrics.mean_beta, 2, '-')}  "
        f"{number(metrics.tokens_per_target_pass, 2, '-')} tokens/pass  "
        f"first token {number(metrics.ttft_s, 3, '-')} s  {guarantee}  end: {ending}\n"
        f"{explain_engine(header.environment)}"
    )


def read_limited(path: Path, content: str, remedy: str) -> str:
    """Return the text of a file of `content`. Raises `UserError`, with the remedy for large files."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_READ + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file of {content}") from error
    if len(text) > _MOST_READ:
        raise UserError(f"{path} has more than {_MOST_READ:,} characters: {remedy}")
    return text


class OutputFile:
    """Temporary file that replaces `path` at the end, unless that is a device or pipe. A killed process leaves it."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._target = path.resolve(), f"{kind} to {path}"
        self._is_device = path.exists() and not path.is_file()
        self._part = self._path.with_name(f"{path.name}.{os.getpid()}.part")
        self._complete = False
        self._file: TextIO = self._checked(
            lambda: open(self._path if self._is_device else self._part, "w", buffering=1, encoding="utf-8")
        )

    def write(self, text: str) -> None:
        self._complete = False
        self._checked(lambda: self._file.write(text))
        self._complete = True

    def close(self) -> None:
        try:
            self._checked(self._file.close)
            if self._complete and not self._is_device:
                self._checked(lambda: os.replace(self._part, self._path))
        finally:
            if not self._is_device:
                with suppress(OSError):
                    self._part.unlink(missing_ok=True)

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            raise write_error(self._target, error) from error


class StatusLine:
    """Progress on standard error: a line overwritten on a terminal, otherwise lines at an interval, if given."""

    def __init__(self, interval_s: float | None = None) -> None:
        self._interval_s = interval_s
        self._shown = ""
        self._due = 0.0

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            shown = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be overwritten
            if shown != self._shown:
                print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
            self._shown = shown
        elif self._interval_s is not None and time.monotonic() >= self._due:
            print(text, file=sys.stderr, flush=True)
            self._due = time.monotonic() + self._interval_s

    def warn(self, text: str) -> None:
        self.clear()
        print(text, file=sys.stderr)

    def clear(self) -> None:
        if self._shown:
            self.show("")
