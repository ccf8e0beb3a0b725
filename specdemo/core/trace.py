"""Trace format: events to JSON lines and back.

A trace is a header, a line per step, and an end; without an end it was truncated. `read` accepts hostile files: sizes
are bounded, types strict, and numbers must agree. Keys may be added, never renamed; some predate the vocabulary: `laws`
(target top tokens), `drafted` (draft top tokens), `remote` (notes of the verifier), `texts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.link_stats import LinkStats, source_of
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, Step, TopTokens, Verdict

MAX_STEPS = 20_000
MAX_CHARACTERS = 32_000_000
_STEP_NUMBERS = ("gamma", "draft_s", "verify_s", "host_s", "t")  # fields of `Step`, named like their keys


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of a run; a truncated trace has no `end`."""

    header: Header
    steps: tuple[StepEvent, ...] = ()
    end: End | None = None


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Maximum size of a file of traces."""

    characters: int = MAX_CHARACTERS
    steps: int = MAX_STEPS
    traces: int = 4


# --- events to JSON ------------------------------------------------------------------------------------------------


def write(event: Event) -> str:
    return json.dumps(to_json(event)) + "\n"


def to_json(event: Event) -> dict[str, Any]:
    match event:
        case Loading():
            return {"phase": "loading", "text": event.text, "done": event.done, "total": event.total}
        case Header():
            return {
                "specdemo": 1,
                "recipe": dict(event.recipe),
                "exact": event.exact,
                "bit_equal": event.bit_equal,
                "prompt": event.prompt,
                "prompt_tokens": list(event.prompt_tokens),
                "encoder": event.encoder,
                "vocab_size": event.vocab_size,
                "environment": dict(event.environment),
            }
        case StepEvent():
            return _step_to_json(event)
        case End():
            end = {"end": event.reason, "error": event.error, "metrics": event.metrics.as_dict() | _peaks(event.peak)}
            return end | {"context_full": True} if event.context_full else end


def _step_to_json(event: StepEvent) -> dict[str, Any]:
    step, draft, verdict = event.step, event.step.draft, event.step.verdict
    searched = {"pending": list(verdict.pending), "pending_text": event.pending_text} if step.searched else {}
    texts = {str(token): text for token, text in event.token_texts.items()}
    return {
        "i": step.i,
        "tokens": list(step.tokens),
        "draft": list(draft.tokens),
        "parents": list(draft.parents),
        "accepted": list(verdict.accepted),
        "token": verdict.token,
        "kind": step.kind.value,
        "p": list(verdict.p),
        "q": None if draft.token_probs is None else list(draft.token_probs),
        "top": [verdict.choices[parent + 1][0] if verdict.choices else None for parent in draft.parents],
        "choices": [list(row) for row in verdict.choices],
        "draw": list(verdict.draw),
        "beta": list(verdict.beta),
        "bound": list(verdict.bound),
        **{name: getattr(step, name) for name in _STEP_NUMBERS},
        "policy": dict(step.policy),
        **({"remote": verdict.remote} if verdict.link is not None else {}),
        **searched,
        **({"laws": _tops_to_json(verdict.target_top)} if verdict.target_top else {}),
        **({"drafted": _tops_to_json(verdict.draft_top)} if verdict.draft_top else {}),
        **({"token_top": _tops_to_json([verdict.token_top])[0]} if verdict.token_top else {}),
        **({"rank": list(verdict.rank)} if verdict.rank else {}),
        **({"texts": texts} if texts else {}),
        "text": event.text,
        "pieces": list(event.pieces),
        "draft_text": list(event.draft_texts),
        "memory": {
            "rss_bytes": event.memory.process,
            "device_bytes": event.memory.device,
            "kv_bytes": event.memory.kv,
        },
    }


def _tops_to_json(tops: Iterable[TopTokens]) -> list[dict[str, Any]]:
    return [{"entropy": one.entropy, "top": [list(pair) for pair in one.top]} for one in tops]


def _peaks(peak: MemoryUse | None) -> dict[str, Any]:
    if peak is None:
        return {}
    return {"peak_rss_bytes": peak.process, "peak_device_bytes": peak.device, "kv_bytes": peak.kv}


# --- JSON to events ------------------------------------------------------------------------------------------------


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of lines written by this program, without validation."""
    metrics = Metrics()
    for line in lines:
        event = from_json(json.loads(line), metrics)
        metrics = getattr(event, "metrics", metrics)
        yield event


def from_json(value: Mapping[str, Any], metrics: Metrics) -> Event:
    """Return the event of a valid line. `metrics`: up to the preceding step."""
    if "phase" in value:
        return Loading(value["text"], value.get("done", 0), value.get("total", 0))
    if "specdemo" in value:
        return Header(
            recipe=value["recipe"],
            prompt=value.get("prompt", ""),
            prompt_tokens=tuple(value["prompt_tokens"]),
            vocab_size=value.get("vocab_size", 1),
            exact=value.get("exact", True),
            bit_equal=value.get("bit_equal", False),
            encoder=value.get("encoder", False),
            environment=value.get("environment", {}),
        )
    if "end" in value:
        figures = value.get("metrics", {})
        peaks = [figures.get(name) for name in ("peak_rss_bytes", "peak_device_bytes", "kv_bytes")]
        known = any(peak is not None for peak in peaks)
        peak = MemoryUse(*peaks) if known else None
        return End(value["end"], value.get("error"), metrics, peak, value.get("context_full", False))
    step, memory = step_from_json(value), value.get("memory", {})
    return StepEvent(
        step,
        pieces=tuple(value["pieces"]),
        draft_texts=tuple(value["draft_text"]),
        token_texts={int(token): text for token, text in (value.get("texts") or {}).items()},
        pending_text=value.get("pending_text") or "",
        memory=MemoryUse(memory.get("rss_bytes"), memory.get("device_bytes"), memory.get("kv_bytes")),
        metrics=metrics.plus(step),
    )


def step_from_json(value: Mapping[str, Any]) -> Step:
    q, pending, remote = value["q"], value.get("pending"), value.get("remote") or {}
    source, request_sent = source_of(remote, bool(value["choices"]))
    return Step(
        i=value["i"],
        tokens=tuple(value["tokens"]),
        draft=Draft(tuple(value["draft"]), tuple(value["parents"]), None if q is None else tuple(q)),
        verdict=Verdict(
            accepted=tuple(value["accepted"]),
            token=value["token"],
            p=tuple(value["p"]),
            draw=tuple(value["draw"]),
            beta=tuple(value["beta"]),
            choices=tuple(map(tuple, value["choices"])),
            committed=() if pending is None else tuple(value["tokens"]),
            pending=tuple(pending or ()),
            target_top=_tops_from_json(value.get("laws")),
            bound=_bounds(value),
            rank=tuple(value.get("rank") or ()),
            draft_top=_tops_from_json(value.get("drafted")),
            token_top=next(iter(_tops_from_json([value["token_top"]])), None) if value.get("token_top") else None,
            source=source,
            request_sent=request_sent,
            link=LinkStats.of(remote) if remote else None,
        ),
        **{name: value[name] for name in _STEP_NUMBERS},
        policy=dict(value.get("policy", {})),
    )


def _bounds(value: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the bounds of the acceptance tests; older traces lack them, and chains with draws determine them."""
    if "bound" in value:
        return tuple(value["bound"])
    n = len(value["draft"])
    if value["parents"] != list(range(-1, n - 1)):
        return (None,) * n
    q = value["q"] or [1.0] * n
    return tuple(
        None if draw is None or p is None else min(1.0, p / max(q, 1e-30))
        for p, q, draw in zip(value["p"], q, value["draw"], strict=True)
    )


def _tops_from_json(values: Iterable[Mapping[str, Any]] | None) -> tuple[TopTokens, ...]:
    return tuple(TopTokens(one["entropy"], tuple((token, p) for token, p in one["top"])) for one in values or ())


# --- files from outside --------------------------------------------------------------------------------------------

MAX_LINE, MAX_VALUES, MAX_DEPTH = 4_000_000, 500_000, 16  # characters, values and nesting of a line
MAX_EXTRA = 20_000  # characters of unknown fields of recipe and environment
MAX_NODES, MAX_TOKENS = 1024, 4096  # per step
MAX_RECORDED = 4096  # tokens of a distribution

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
_Probability = Annotated[float, Field(ge=0, le=1.0001)]  # float32 sums may slightly exceed 1
Text = Annotated[str, Field(max_length=10_000)]
Name = Annotated[str, Field(max_length=40)]


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
    cloud: _Cloud | None = None


class _Parity(_Line):
    cost: dict[Annotated[str, Field(pattern="^[0-9]{1,4}$")], Annotated[float, Field(gt=0, le=1e6)]] = {}


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
    prompt_tokens: Annotated[list[Id], Field(max_length=1_000_000)]
    encoder: bool = False
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    environment: _Environment = _Environment()


class _TopTokens(_Line):
    entropy: Number
    top: Annotated[list[tuple[Id, _Probability]], Field(max_length=MAX_RECORDED)]


class _Memory(_Line):
    rss_bytes: Bytes | None = None
    device_bytes: Bytes | None = None
    kv_bytes: Bytes | None = None


class _Step(_Line):
    i: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    tokens: Annotated[list[Id], Field(max_length=MAX_TOKENS)]
    text: Annotated[str, Field(max_length=100_000)]
    pieces: Annotated[list[Text], Field(max_length=MAX_TOKENS)]
    draft: Annotated[list[Id], Field(max_length=MAX_NODES)]
    draft_text: list[Text]
    parents: list[int]
    accepted: list[int]
    token: Id | None
    kind: Literal["correction", "bonus", "plain"]
    p: list[_Probability | None]  # None: not computed by the target
    q: list[_Probability] | None
    top: list[Id | None] = []
    choices: list[Annotated[list[Id], Field(min_length=1, max_length=MAX_NODES)]]
    draw: list[_Probability | None]
    beta: list[_Probability | None]
    bound: list[_Probability | None] = []
    rank: Annotated[list[Id], Field(max_length=MAX_NODES)] = []
    gamma: Annotated[int, Field(ge=0, le=1024)]
    draft_s: Seconds
    verify_s: Seconds
    host_s: Seconds
    t: Seconds
    policy: Annotated[dict[Name, Number], Field(max_length=16)] = {}
    remote: Annotated[dict[Name, Number], Field(max_length=32)] | None = None
    pending: Annotated[list[Id], Field(max_length=MAX_TOKENS)] | None = None
    pending_text: Text | None = None
    laws: list[_TopTokens] | None = None
    drafted: list[_TopTokens] | None = None
    token_top: _TopTokens | None = None
    texts: dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Text] | None = None
    memory: _Memory = _Memory()

    @model_validator(mode="after")
    def _agrees(self) -> _Step:
        """Require an entry per node, parents before children, and an accepted path from the root."""
        n = len(self.draft)
        per_node = [self.draft_text, self.parents, self.p, self.draw, self.beta]
        per_node += [values for values in (self.q, self.drafted, self.bound, self.rank) if values]
        if any(len(values) != n for values in per_node):
            raise ValueError("the lists of a draft differ in length")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent must precede its child")
        last = -1
        for node in self.accepted:
            if not 0 <= node < n or self.parents[node] != last or not self._decided(node):
                raise ValueError("the accepted nodes are not a path of tested nodes")
            last = node
        if len(self.pieces) != len(self.tokens) or "".join(self.pieces) != self.text:
            raise ValueError("the pieces do not add up to the text")
        if self.pending is not None and (n or self.token is not None):
            raise ValueError("a search step has no draft and no token")
        added = 0 if self.pending is not None else len(self.tokens) - (self.token is not None)
        if added != len(self.accepted):
            raise ValueError("tokens and accepted nodes do not add up")
        if self.token is not None and self.token != (self.tokens or [None])[-1]:
            raise ValueError("token is not the last of tokens")
        if self.laws is not None and len(self.laws) != n + 1:
            raise ValueError("`laws` must have an entry per row")
        queried = self.remote is None or self.choices
        if self.pending is None and queried and len(self.choices) != n + 1:
            raise ValueError("choices must have an entry per row")
        return self

    def _decided(self, node: int) -> bool:
        """Tested by a rule, or committed without querying the target."""
        return self.beta[node] is not None or (self.remote is not None and self.p[node] is None)


class _Peaks(_Line):
    peak_rss_bytes: Bytes | None = None
    peak_device_bytes: Bytes | None = None
    kv_bytes: Bytes | None = None


class _End(_Line):
    end: Literal["stop", "length", "cancelled", "error"]
    error: Annotated[str, Field(max_length=10_000)] | None = None
    metrics: _Peaks = _Peaks()  # the other figures are recomputed from the steps
    context_full: bool = False


def read(text: Any, limits: ReadLimits = ReadLimits()) -> list[Trace]:
    """Return the traces of a file, with recomputed metrics. Raises `UserError` with line and cause."""
    if not isinstance(text, str):
        raise UserError("a trace must be text, with a JSON object per line")
    if len(text) > limits.characters:
        raise UserError(f"the file has {len(text):,} characters: at most {limits.characters:,} are read")
    traces: list[tuple[Header, list[StepEvent], list[End]]] = []
    steps, metrics = 0, Metrics()
    for number, line, kind in _lines(text):
        if not traces and kind is not _Header:
            raise UserError(f"line {number} is not a header: a trace starts with a line that contains specdemo")
        if kind is not _Header and traces[-1][2]:
            raise UserError(f"line {number} follows the last line of its trace")
        if kind is _Step and (steps := steps + 1) > limits.steps:
            raise UserError(f"the file has more than {limits.steps:,} steps: record a shorter run")
        event = _checked(kind, line, number, Metrics() if kind is _Header else metrics)
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
    if len(traces) > limits.traces:
        raise UserError(f"the file has {len(traces)} traces: at most {limits.traces} can be shown together")
    return [Trace(header, tuple(steps), ends[0] if ends else None) for header, steps, ends in traces]


def _lines(text: str) -> Iterator[tuple[int, str, type[_Line]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        _check_size(line, number)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"line {number} is not JSON: the file is not a trace, or was truncated") from None
        if not isinstance(value, dict):
            raise UserError(f"line {number} is not a JSON object: every line of a trace is an object")
        yield number, line, _Header if "specdemo" in value else _End if "end" in value else _Step


def _check_size(line: str, number: int) -> None:
    """Bound a line before it is parsed."""
    if len(line) > MAX_LINE:
        raise UserError(f"line {number} has {len(line):,} characters: at most {MAX_LINE:,} are read")
    structure = "".join(line.replace("\\\\", "").replace('\\"', "").split('"')[::2])  # without texts
    if sum(map(structure.count, "[{,")) > MAX_VALUES:
        raise UserError(f"line {number} has more than {MAX_VALUES:,} values: record a shorter run")
    brackets = re.sub(r"[^\[\]{}]+", "", structure)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace("[]", "").replace("{}", "")
    if brackets:
        raise UserError(
            f"line {number} is not JSON: the file is not a trace, or was truncated, or nests more than {MAX_DEPTH} deep"
        )


def _checked(kind: type[_Line], line: str, number: int, metrics: Metrics) -> Event:
    try:
        # absent keys of a step stay absent: the presence of some has a meaning
        value = kind.model_validate_json(line).model_dump(exclude_unset=kind is _Step)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        cause = first["msg"].removeprefix("Value error, ")
        raise UserError(f"line {number} is not a valid trace line ({where[:80]}: {cause[:200]})") from None
    return from_json(value, metrics)


def _check_order(number: int, before: list[StepEvent], event: StepEvent) -> None:
    if event.step.i != len(before) or (before and event.step.t < before[-1].step.t):
        raise UserError(f"line {number} does not follow the previous line: steps are missing or out of order")
