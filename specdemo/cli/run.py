"""The `run` command: show a run as trace, coloured text or steps in words."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext

from specdemo.cli.arguments import given
from specdemo.cli.output import OutputFile, output_file
from specdemo.core import trace
from specdemo.core.errors import UserError, check_name
from specdemo.core.events import INTERRUPTED, End, Event, Header, Loading, StepEvent
from specdemo.core.explain import STYLES, Decision, decision_of, explain, explain_engine, figure
from specdemo.core.formats import number, percent
from specdemo.core.metrics import Metrics
from specdemo.generate import generate
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.recipe import PRESETS, Recipe, refuse_ineffective, runs_chat_pair
from specdemo.signals import handle_signals

RESET = "\x1b[0m"


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0, 1 for a failed run, 130 if interrupted. Raises `UserError` for invalid input."""
    recipe = recipe_of_flags(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    opened = nullcontext() if options.trace is None else output_file(options.trace, "the trace")
    with opened as file, handle_signals(signal.default_int_handler, signal.SIGTERM):
        return _show(generate(recipe, prompt), options, file)


def recipe_of_flags(options: argparse.Namespace) -> Recipe:
    values = given(options)
    if options.preset is not None:
        check_name("preset", options.preset, PRESETS)
        values = {**PRESETS[options.preset].values, **values}
    pair = PAIRS[CHAT_PAIR]
    if runs_chat_pair(values) and pair.missing:
        print(f"specdemo: the Python pair runs, the chat model is not installed: {pair.missing}", file=sys.stderr)
    elif runs_chat_pair(values):
        values = {"pair": CHAT_PAIR, **pair.settings, **values}
    recipe = Recipe(**values)
    refuse_ineffective(recipe, given(options))
    if recipe.ngram_keep:
        raise UserError("ngram_keep has no effect in the terminal, which has no earlier runs: use the page")
    return recipe


def _show(events: Iterator[Event], options: argparse.Namespace, file: OutputFile | None) -> int:
    view = Json() if options.json else Steps() if options.steps else Coloured()
    loading, metrics = LoadingLine(), None

    def put(event: Event) -> None:
        record(event)
        view.show(event)

    def record(event: Event) -> None:
        if file:
            file.write(trace.write(event))

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
            put(End("cancelled", INTERRUPTED, metrics))
        return 130
    except Exception as error:
        if metrics is not None:
            record(End("error", str(error) or type(error).__name__, metrics))
        raise
    if isinstance(event, End) and event.reason == "error":
        print(f"specdemo: the run failed: {event.error}", file=sys.stderr)
        return 1
    return 0


class Json:
    def show(self, event: Event) -> None:
        print(trace.write(event), end="", flush=True)


class Coloured:
    def show(self, event: Event) -> None:
        match event:
            case Header():
                self._exact, self._engine = event.exact, explain_engine(event.environment)
                print(event.prompt, end="\n" if event.encoder else "", flush=True)
            case StepEvent():
                print("".join(_spans(event)), end="", flush=True)
            case End():
                print(f"\n\n{summary(event.metrics)}  {'exact' if self._exact else 'LOSSY'}  end: {_ending(event)}")
                print(self._engine)


class Steps:
    def show(self, event: Event) -> None:
        match event:
            case Header():
                self._recipe = event.recipe
                self._position = 0 if event.encoder else len(event.prompt_tokens)
            case StepEvent():
                print("\n".join(self._lines(event)), flush=True)
                self._position += len(event.step.tokens)
            case End():
                print(f"\n{summary(event.metrics)}  end: {_ending(event)}")

    def _lines(self, event: StepEvent) -> Iterator[str]:
        step, verdict = event.step, event.step.verdict
        yield (
            f"--- step {step.i}  position {self._position}  gamma {step.gamma}  "
            f"drafted {len(step.draft)}  accepted {len(verdict.accepted)} ---"
        )
        for node, text in enumerate(event.draft_texts):
            yield f"  {text!r:>16}  {_test(decision_of(step, node, self._recipe))}  {explain(step, node, self._recipe)}"
        if step.searched:
            yield f"  committed {event.text!r}  best beam continues {event.pending_text!r}"
        if verdict.token is not None:
            yield f"  {event.pieces[-1]!r:>16}  {step.kind}: {explain(step, None, self._recipe)}"


class LoadingLine:
    """Loading progress: a line overwritten in a terminal, or a line per item."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, event: Loading | None = None) -> None:
        live = sys.stderr.isatty()
        text = event.text if event else ""
        if live and (text or self._shown):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text and text.partition(",")[0] != self._shown.partition(",")[0]:
            print(f"{text} ...", file=sys.stderr)
        self._shown = text


def _spans(event: StepEvent) -> Iterator[str]:
    if event.step.lost:
        yield "[connection to the cloud lost: the drafter continues alone]"
    for shown in event.shown():
        style = STYLES[shown.outcome].ansi
        text = shown.text if shown.outcome.committed else shown.text.replace("\n", "\u23ce")
        yield f"{style}{text}{RESET}" if style else text


def _test(decision: Decision) -> str:
    q = 1.0 if decision.q is None else decision.q
    last = f"rank={decision.rank}" if decision.rank else f"bound={figure(decision.bound)}"
    return f"q={figure(q)}  p={figure(decision.p)}  {last:<11}"


def _ending(end: End) -> str:
    return f"{end.reason} (context full)" if end.context_full else end.reason


def summary(metrics: Metrics) -> str:
    """Figures in a line; a dash where a denominator is 0."""
    return (
        f"{metrics.tokens} tokens  {number(metrics.tokens_per_second, 1, '-')} tokens/s  "
        f"accepted {metrics.accepted}/{metrics.drafted} drafted ({percent(metrics.acceptance_rate, '-', '')})  "
        f"alpha {number(metrics.mean_beta, 2, '-')}  {number(metrics.tokens_per_target_pass, 2, '-')} tokens/pass  "
        f"first token {number(metrics.ttft_s, 3, '-')} s"
    )
