"""Recorded traces from outside: read, checked line by line, and made into a run that the page can show.

A file holds one trace or up to four, one after the other, each from its header to its last line (a missing last line
means that it was cut off). Nothing in it is trusted: sizes are bounded, types are strict, and numbers have to agree
with one another. Knows no gradio and no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdemo.core.errors import UserError
from specdemo.generate import ending
from specdemo.ui.frames import Run
from specdemo.ui.labels import LANES, PLAIN

LARGEST = 32_000_000  # characters of a file
MOST_STEPS = 20_000  # of all its traces
MOST_NODES, MOST_TOKENS = 1024, 4096  # of a step

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Chance = Annotated[float, Field(ge=0, le=1.0001)]  # sums of float32 may end up a little above 1
Text = Annotated[str, Field(max_length=10_000)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Cloud(_Line):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    remote: Annotated[str, Field(max_length=400)] = ""
    mode: Annotated[str, Field(max_length=40)] = "speculative"
    rtt_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class _Recipe(_Line):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    method: Annotated[str, Field(max_length=40)]
    gamma: Annotated[int, Field(ge=0, le=1024)]
    temperature: Annotated[float, Field(ge=0, le=1000)]
    policy: Annotated[str, Field(max_length=40)] = "fixed"
    rule: Annotated[str, Field(max_length=40)] = "rejection"
    num_beams: Annotated[int, Field(ge=1, le=1024)] = 1
    cloud: _Cloud | None = None


class _Parity(_Line):
    cost: dict[Annotated[str, Field(pattern="^[0-9]{1,4}$")], Annotated[float, Field(gt=0, le=1e6)]] = {}


class _Environment(_Line):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    target_bytes: Annotated[float, Field(ge=0)] | None = None
    drafter_bytes: Annotated[float, Field(ge=0)] | None = None
    parity: _Parity = _Parity()


class _Header(_Line):
    specdemo: Literal[1]
    recipe: _Recipe
    exact: bool = True
    bit_equal: bool = False
    prompt: Annotated[str, Field(max_length=1_000_000)] = ""
    prompt_tokens: Annotated[list[Id], Field(max_length=1_000_000)]
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    environment: _Environment = _Environment()


class _Law(_Line):
    entropy: Number
    top: Annotated[list[tuple[Id, Chance]], Field(max_length=64)]


class _Memory(_Line):
    rss_bytes: Annotated[float, Field(ge=0)] | None = None
    device_bytes: Annotated[float, Field(ge=0)] | None = None
    kv_bytes: Annotated[float, Field(ge=0)] | None = None


class _Step(_Line):
    i: Annotated[int, Field(ge=0, le=MOST_STEPS)]
    tokens: Annotated[list[Id], Field(max_length=MOST_TOKENS)]
    text: Annotated[str, Field(max_length=100_000)]
    pieces: Annotated[list[Text], Field(max_length=MOST_TOKENS)]
    draft: Annotated[list[Id], Field(max_length=MOST_NODES)]
    draft_text: list[Text]
    parents: list[int]
    accepted: list[int]
    token: Id | None
    kind: Literal["correction", "bonus", "plain"]
    p: list[Chance | None]  # of tokens that no target judged there is none
    q: list[Chance] | None
    top: list[Id | None] = []
    choices: list[Annotated[list[Id], Field(min_length=1, max_length=MOST_NODES)]]
    draw: list[Chance | None]
    beta: list[Chance | None]
    gamma: Annotated[int, Field(ge=0, le=1024)]
    draft_s: Seconds
    verify_s: Seconds
    host_s: Seconds
    t: Seconds
    policy: Annotated[dict[Annotated[str, Field(max_length=40)], Number], Field(max_length=16)] = {}
    remote: Annotated[dict[Annotated[str, Field(max_length=40)], Number], Field(max_length=32)] | None = None
    pending: Annotated[list[Id], Field(max_length=MOST_TOKENS)] | None = None
    pending_text: Text | None = None
    laws: list[_Law] | None = None
    drafted: list[_Law] | None = None
    texts: dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Text] | None = None
    memory: _Memory = _Memory()

    @model_validator(mode="after")
    def _agrees(self) -> _Step:
        """One entry per node where there is one per node, parents before children, an accepted path from the root."""
        n = len(self.draft)
        per_node = [self.draft_text, self.parents, self.p, self.draw, self.beta]
        per_node += [some for some in (self.q, self.drafted) if some]
        if any(len(some) != n for some in per_node):
            raise ValueError("lists of a draft differ in length")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent does not stand before its child")
        last = -1
        for node in self.accepted:
            if not 0 <= node < n or self.parents[node] != last or not self._decided(node):
                raise ValueError("the accepted nodes are no path of tested nodes")
            last = node
        if len(self.pieces) != len(self.tokens) or "".join(self.pieces) != self.text:
            raise ValueError("the pieces do not spell the text")
        own = 0 if self.pending is not None else len(self.tokens) - (self.token is not None)
        if own != len(self.accepted):
            raise ValueError("tokens and accepted nodes do not add up")
        if self.token is not None and self.token != (self.tokens or [None])[-1]:
            raise ValueError("token is not the last of tokens")
        if self.laws is not None and len(self.laws) != n + 1:
            raise ValueError("there must be a law per row")
        asked = self.remote is None or self.choices
        if self.pending is None and asked and len(self.choices) != n + 1:
            raise ValueError("there must be choices for every row")
        return self

    def _decided(self, node: int) -> bool:
        """Whether a rule tested it, or nobody asked the target about it."""
        return self.beta[node] is not None or (self.remote is not None and self.p[node] is None)


class _End(_Line):
    end: Literal["stop", "length", "cancelled", "error"]
    error: Annotated[str, Field(max_length=10_000)] | None = None


def read_traces(text: Any) -> Run:
    """The run that a file of traces tells of. Raises `UserError` with line and cause if it does not tell of one."""
    if not isinstance(text, str):
        raise UserError("a trace is a text of JSON lines")
    if len(text) > LARGEST:
        raise UserError(f"the file has {len(text):,} characters: {LARGEST:,} are the most that can be shown")
    traces: list[list[dict[str, Any]]] = []
    steps = 0
    for number, line, kind in _lines(text):
        if kind is _Header:
            traces.append([_checked(kind, line, number)])
            continue
        if not traces:
            raise UserError(f"line {number} is no header: a trace begins with a line that says specdemo")
        trace = traces[-1]
        if "end" in trace[-1]:
            raise UserError(f"line {number} stands after the last line of its trace")
        found = _checked(kind, line, number)
        if kind is _Step:
            steps += 1
            if steps > MOST_STEPS:
                raise UserError(f"the file has more than {MOST_STEPS:,} steps: that is more than can be shown")
            if found["i"] != len(trace) - 1 or found["t"] < trace[-1].get("t", 0):
                raise UserError(f"line {number} is not what follows the line before it: steps are missing or mixed up")
        trace.append(found)
    if not traces:
        raise UserError("the file is empty: a trace has a header, a line per step, and an end")
    if len(traces) > len(LANES):
        raise UserError(f"the file has {len(traces)} traces: {len(LANES)} are the most that can be shown side by side")
    return _run(traces)


def _lines(text: str) -> Iterator[tuple[int, str, type[_Line]]]:
    """Number, text and kind of every line that is not empty."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"line {number} is no JSON: the file is no trace, or was cut off within a line") from None
        if not isinstance(value, dict):
            raise UserError(f"line {number} is no JSON object, as every line of a trace is")
        yield number, line, _Header if "specdemo" in value else _End if "end" in value else _Step


def _checked(kind: type[_Line], line: str, number: int) -> dict[str, Any]:
    try:
        # what a step does not say stays unsaid: some keys mean something by being there
        return kind.model_validate_json(line).model_dump(exclude_unset=kind is _Step)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(f"line {number} is not as a trace has it ({where[:80]}: {said[:200]})") from None


def _run(traces: list[list[dict[str, Any]]]) -> Run:
    """The traces in lanes: the first plain one in the plain lane, the others in the order of the file."""
    methods = [trace[0]["recipe"]["method"] for trace in traces]
    plain = methods.index("ar") if "ar" in methods else None
    places = iter(name for name in LANES if name != PLAIN)
    names = [PLAIN if i == plain else next(places, LANES[-1]) for i in range(len(traces))]
    run = Run(tuple(name for name in LANES if name in names))
    for name, trace in zip(names, traces, strict=True):
        for line in trace:
            if "end" in line:
                line = ending(line["end"], run.lanes[name].metrics, line["error"])
            run.absorb(name, line)
    cut = not all(lane.ended for lane in run.lanes.values())
    run.finish()
    tokens = " and ".join(str(lane.metrics.tokens) for lane in run.lanes.values())
    run.phase = ("done", f"a recorded trace, {tokens} tokens" + (", which was cut off" if cut else ""))
    return run
