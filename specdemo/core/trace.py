"""Trace format: conversion of events to JSON lines and back.

A trace is a header, a line per step, and an end; without an end it was truncated. `read` accepts hostile files: sizes
are bounded, types strict, and numbers must agree. `step_record` describes the lines of steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdemo.core import step_record
from specdemo.core.errors import ListOf, UserError, most_keys, plain_text
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step_record import MAX_STEPS, Bytes, Id, Name, StepRecord

MAX_CHARACTERS = 32_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of a run; a truncated trace has no `end`."""

    header: Header
    steps: tuple[StepEvent, ...] = ()
    end: End | None = None


_HEADER = tuple(field.name for field in fields(Header))


def write(event: Event) -> str:
    return json.dumps(to_json(event)) + "\n"


def to_json(event: Event) -> Mapping[str, Any]:
    match event:
        case Loading():
            return {"phase": "loading", "text": event.text, "done": event.done, "total": event.total}
        case Header():
            values = {name: getattr(event, name) for name in _HEADER}
            return {"specdemo": 1, **values, "prompt_tokens": list(event.prompt_tokens)}
        case StepEvent():
            return step_record.of(event)
        case End():
            end = {"end": event.reason, "error": event.error, "metrics": event.metrics.as_dict() | _peaks(event.peak)}
            optional = {"context_full": event.context_full, "pair_speeds": list(event.pair_speeds)}
            return end | {name: value for name, value in optional.items() if value}


def _peaks(peak: MemoryUse | None) -> dict[str, Any]:
    if peak is None:
        return {}
    known = {"peak_rss_bytes": peak.process, "peak_device_bytes": peak.device, "kv_bytes": peak.kv}
    more = {"store_bytes": peak.store, "peak_reserved_bytes": peak.reserved}
    return known | {name: size for name, size in more.items() if size is not None}


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of lines written by this program, without validation."""
    metrics = Metrics()
    for line in lines:
        event = from_json(json.loads(line), metrics)
        metrics = getattr(event, "metrics", metrics)
        yield event


def from_json(value: Mapping[str, Any], metrics: Metrics) -> Event:
    """Return the event of a valid line; `metrics`: before it."""
    if "phase" in value:
        return Loading(value["text"], value.get("done", 0), value.get("total", 0))
    if "specdemo" in value:
        stored = {"prompt": "", **{name: value[name] for name in _HEADER if name in value}}
        return Header(**stored | {"prompt_tokens": tuple(value["prompt_tokens"])})
    if "end" in value:
        figures = value.get("metrics", {})
        peaks = [figures.get(name) for name in _Peaks.model_fields]
        known = any(peak is not None for peak in peaks)
        peak = MemoryUse(*peaks) if known else None
        speeds = tuple(value.get("pair_speeds", ()))
        return End(value["end"], value.get("error"), metrics, peak, value.get("context_full", False), speeds)
    return step_record.to(cast(StepRecord, value), metrics)


# --- untrusted files ----------------------------------------------------------------------------------------------

MAX_LINE = 4_000_000  # characters of a line
MAX_VALUES, MAX_DEPTH = 500_000, 16  # values and nesting of a line
MAX_EXTRA = 20_000  # characters of unknown fields of recipe and environment


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Open(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _bounded(self) -> _Open:
        try:
            size = len(json.dumps(self.model_extra, allow_nan=False))
        except ValueError:
            raise ValueError("a number is not a finite number") from None
        if size > MAX_EXTRA:
            raise ValueError(f"the unknown fields have more than {MAX_EXTRA:,} characters")
        return self


class _Cloud(_Open):
    remote: Annotated[str, Field(max_length=400)] = ""
    mode: Name = "speculative"
    rtt_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class _Recipe(_Open):
    method: Name
    gamma: Annotated[int, Field(ge=0, le=1024)]
    temperature: Annotated[float, Field(ge=0, le=1000)]
    policy: Name = "fixed"
    rule: Name = "rejection"
    num_beams: Annotated[int, Field(ge=1, le=1024)] = 1
    external: Annotated[str, Field(max_length=400)] | None = None
    cloud: _Cloud | None = None


_Width = Annotated[str, Field(pattern="^[0-9]{1,4}$")]


class _Parity(_Line):
    cost: Annotated[dict[_Width, Annotated[float, Field(gt=0, le=1e6)]], most_keys(1024)] = {}


class _Environment(_Open):
    target_bytes: Bytes | None = None
    drafter_bytes: Bytes | None = None
    parity: _Parity = _Parity()


class _Header(_Line):
    specdemo: Literal[1]
    recipe: _Recipe
    exact: bool = True
    bit_equal: bool = False
    prompt: Annotated[str, Field(max_length=1_000_000)] = ""
    prompt_tokens: Annotated[ListOf[Id], Field(max_length=1_000_000)]
    encoder: bool = False
    cached_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    environment: _Environment = _Environment()


class _Peaks(_Line):  # order of `MemoryUse`
    peak_rss_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    kv_bytes: Bytes | None = None
    store_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None


class _End(_Line):
    end: Literal["stop", "length", "cancelled", "error"]
    error: Annotated[str, Field(max_length=10_000)] | None = None
    metrics: _Peaks = _Peaks()  # the other figures are recomputed from the steps
    context_full: bool = False
    pair_speeds: Annotated[ListOf[Annotated[float, Field(ge=0, le=1e9)]], Field(max_length=64)] = []


def read(
    text: Any, *, most_characters: int = MAX_CHARACTERS, most_steps: int = MAX_STEPS, most_traces: int = 4
) -> list[Trace]:
    """Return the traces of a file, with recomputed metrics. Raises `UserError` with line and cause."""
    traces: list[tuple[Header, list[StepEvent], list[End]]] = []
    steps, metrics = 0, Metrics()
    for number, line, kind in _lines(text, most_characters):
        if not traces and kind is not Header:
            raise UserError(f"line {number} is not a header: a trace starts with a line that contains specdemo")
        if kind is not Header and traces[-1][2]:
            raise UserError(f"line {number} follows the last line of its trace")
        if kind is StepEvent and (steps := steps + 1) > most_steps:
            raise UserError(f"the file has more than {most_steps:,} steps: record a shorter run")
        event = _checked(kind, line, number, Metrics() if kind is Header else metrics)
        match event:
            case Header():
                traces.append((event, [], []))
                metrics = Metrics()
            case StepEvent():
                _check_order(number, traces[-1][1], event)
                traces[-1][1].append(event)
                metrics = event.metrics
            case End():
                traces[-1][2].append(event)
    if not traces:
        raise UserError("the file is empty: a trace has a header, a line per step, and an end")
    if len(traces) > most_traces:
        raise UserError(f"the file has {len(traces)} traces: at most {most_traces} can be shown together")
    return [Trace(header, tuple(steps), ends[0] if ends else None) for header, steps, ends in traces]


_CHECKS: Mapping[type[Event], Callable[[str], Mapping[str, Any]]] = {
    Header: lambda line: _Header.model_validate_json(line).model_dump(),
    StepEvent: step_record.CHECKED.validate_json,
    End: lambda line: _End.model_validate_json(line).model_dump(),
}


def _lines(text: Any, most_characters: int) -> Iterator[tuple[int, str, type[Event]]]:
    if not isinstance(text, str):
        raise UserError("a trace must be text, with a JSON object per line")
    if len(text) > most_characters:
        raise UserError(f"the file has {len(text):,} characters: at most {most_characters:,} are read")
    for number, line in enumerate(_split(text), 1):
        if not line.strip():
            continue
        _check_size(line, number)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"line {number} is not JSON: the file is not a trace, or was truncated") from None
        if not isinstance(value, dict):
            raise UserError(f"line {number} is not a JSON object: every line of a trace is an object")
        yield number, line, Header if "specdemo" in value else End if "end" in value else StepEvent


def _split(text: str) -> Iterator[str]:
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _check_size(line: str, number: int) -> None:
    if len(line) > MAX_LINE:
        raise UserError(f"line {number} has {len(line):,} characters: at most {MAX_LINE:,} are read")
    structure = "".join(line.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    if sum(map(structure.count, "[{,")) > MAX_VALUES:
        raise UserError(f"line {number} has more than {MAX_VALUES:,} values: record a shorter run")
    brackets = re.sub(r"[^\[\]{}]+", "", structure)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace("[]", "").replace("{}", "")
    if brackets:
        raise UserError(
            f"line {number} is not JSON: the file is not a trace, or was truncated, or nests more than {MAX_DEPTH} deep"
        )


def _checked(kind: type[Event], line: str, number: int, metrics: Metrics) -> Event:
    try:
        value = _CHECKS[kind](line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        cause = first["msg"].removeprefix("Value error, ")
        shown = f"{plain_text(where, 80)}: {plain_text(cause, 200)}"
        raise UserError(f"line {number} is not a valid trace line ({shown})") from None
    return from_json(value, metrics)


def _check_order(number: int, before: list[StepEvent], event: StepEvent) -> None:
    if event.step.i != len(before) or (before and event.step.t < before[-1].step.t):
        raise UserError(f"line {number} does not follow the previous line: steps are missing or out of order")
