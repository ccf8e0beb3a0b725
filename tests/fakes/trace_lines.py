"""Events as lines of a trace and back, for tests that compare values of JSON."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specdemo.core import trace
from specdemo.core.events import Event, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.generate import generate
from specdemo.recipe import Recipe

GOLDEN = Path(__file__).parents[1] / "contracts" / "traces"


def trace_lines(*arguments: Any) -> Iterator[dict[str, Any]]:
    """`generate`, with its events as JSON values."""
    return map(trace.to_json, generate(*arguments))


def run_of(recipe: Recipe, prompt: str, models: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens and the metrics of a run without an error."""
    *lines, end = trace_lines(recipe, prompt, models)
    assert end["error"] is None
    return [token for line in lines for token in line.get("tokens", ())], end["metrics"]


def events_of(lines: Iterable[dict[str, Any]]) -> Iterator[Event]:
    metrics = Metrics()
    for line in lines:
        event = trace.from_json(line, metrics)
        metrics = getattr(event, "metrics", metrics)
        yield event


def step_events(events: Iterable[Event]) -> list[StepEvent]:
    return [event for event in events if isinstance(event, StepEvent)]


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [token for event in step_events(events) for token in event.step.tokens]


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in step_events(events))


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    """Return the lines of trace files."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


def golden(*names: str) -> list[dict[str, Any]]:
    """Return the lines of golden traces."""
    return read_lines(*(GOLDEN / f"{name}.jsonl" for name in names))


def jsonl(*lines: Any) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)
