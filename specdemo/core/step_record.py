"""Record of a step in a trace, with its limits: a dictionary, since the absence of some keys has a meaning.

Keys may be added, never renamed; some predate the vocabulary: `laws` (target top tokens), `drafted` (draft top tokens),
`remote` (source and link measures), `texts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from specdemo.core.errors import ListOf, most_keys
from specdemo.core.events import MemoryUse, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, LinkStats, Origin, Source, Step, TopTokens, Verdict

MAX_STEPS = 20_000
MAX_NODES, MAX_TOKENS = 1024, 4096  # limits of a step
MAX_RECORDED = 4096  # largest number of tokens of a distribution

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]
_Probability = Annotated[float, Field(ge=0, le=1.0001)]  # float32 sums may slightly exceed 1
Text = Annotated[str, Field(max_length=10_000)]
Name = Annotated[str, Field(max_length=40)]
_Key = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
Kind: TypeAlias = Literal["correction", "bonus", "plain", "unverified", "unknown"]


def _check_first(texts: Any) -> Any:
    """Stop at the first invalid entry."""
    for key, text in texts.items() if isinstance(texts, dict) else ():
        if not (isinstance(text, str) and len(key) <= 10 and key.isascii() and key.isdigit()):
            raise ValueError("an entry is not a text by token id")
    return texts


_STRICT = with_config(ConfigDict(strict=True, extra="ignore", allow_inf_nan=False))


@_STRICT
class TopRecord(TypedDict):
    """Record of `TopTokens`."""

    entropy: Number
    top: Annotated[ListOf[tuple[Id, _Probability]], Field(max_length=MAX_RECORDED)]


@_STRICT
class MemoryRecord(TypedDict, total=False):
    """Record of `MemoryUse`."""

    rss_bytes: Bytes | None
    device_bytes: Bytes | None
    kv_bytes: Bytes | None


@_STRICT
class OriginRecord(TypedDict, total=False):
    """Record of `Origin`."""

    source: Name
    position: Id
    matched: Id
    order: Id
    count: Id
    confidence: _Probability


@_STRICT
class StepRecord(TypedDict):
    """Record of a step; `of` and `to` convert it."""

    i: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    tokens: Annotated[ListOf[Id], Field(max_length=MAX_TOKENS)]
    draft: Annotated[ListOf[Id], Field(max_length=MAX_NODES)]
    parents: ListOf[int]
    accepted: ListOf[int]
    token: Id | None
    kind: Kind
    p: ListOf[_Probability | None]  # None if the target did not compute it
    q: ListOf[_Probability] | None
    top: NotRequired[ListOf[Id | None]]
    choices: ListOf[Annotated[ListOf[Id], Field(min_length=1, max_length=MAX_NODES)]]
    draw: ListOf[_Probability | None]
    beta: ListOf[_Probability | None]
    bound: NotRequired[ListOf[_Probability | None]]
    gamma: Annotated[int, Field(ge=0, le=1024)]
    draft_s: Seconds | None  # None if another engine does not report it
    verify_s: Seconds | None
    host_s: Seconds | None
    t: Seconds
    policy: NotRequired[Annotated[dict[Name, Number], most_keys(16)]]
    remote: NotRequired[Annotated[dict[Name, Number], most_keys(32)] | None]
    replica: NotRequired[Text]
    pending: NotRequired[Annotated[ListOf[Id], Field(max_length=MAX_TOKENS)] | None]
    pending_text: NotRequired[Text | None]
    laws: NotRequired[ListOf[TopRecord] | None]
    drafted: NotRequired[ListOf[TopRecord] | None]
    token_top: NotRequired[TopRecord | None]
    rank: NotRequired[Annotated[ListOf[Id], Field(max_length=MAX_NODES)]]
    origin: NotRequired[ListOf[OriginRecord]]
    undisclosed: NotRequired[Annotated[int, Field(ge=0, le=MAX_NODES)] | None]
    texts: NotRequired[Annotated[dict[_Key, Text], BeforeValidator(_check_first)] | None]
    text: Annotated[str, Field(max_length=100_000)]
    pieces: Annotated[ListOf[Text], Field(max_length=MAX_TOKENS)]
    draft_text: ListOf[Text]
    memory: NotRequired[MemoryRecord]


def of(event: StepEvent) -> StepRecord:
    """Return the record of an event, without validation."""
    step = event.step
    draft, verdict = step.draft, step.verdict
    memory = event.memory
    record: StepRecord = {
        "i": step.i,
        "tokens": list(step.tokens),
        "draft": list(draft.tokens),
        "parents": list(draft.parents),
        "accepted": list(verdict.accepted),
        "token": verdict.token,
        "kind": cast(Kind, step.kind.value),
        "p": list(verdict.p),
        "q": None if draft.token_probs is None else list(draft.token_probs),
        "top": [verdict.choices[parent + 1][0] if verdict.choices else None for parent in draft.parents],
        "choices": [list(row) for row in verdict.choices],
        "draw": list(verdict.draw),
        "beta": list(verdict.beta),
        "bound": list(verdict.bound),
        "gamma": step.gamma,
        "draft_s": step.draft_s,
        "verify_s": step.verify_s,
        "host_s": step.host_s,
        "t": step.t,
        "policy": dict(step.policy),
        "text": event.text,
        "pieces": list(event.pieces),
        "draft_text": list(event.draft_texts),
        "memory": {"rss_bytes": memory.process, "device_bytes": memory.device, "kv_bytes": memory.kv},
    }
    if verdict.link is not None:
        record["remote"], record["replica"] = verdict.remote, verdict.replica
    if step.searched:
        record["pending"], record["pending_text"] = list(verdict.pending), event.pending_text
    if verdict.target_top:
        record["laws"] = [_record_of_top(top) for top in verdict.target_top]
    if verdict.draft_top:
        record["drafted"] = [_record_of_top(top) for top in verdict.draft_top]
    if verdict.token_top:
        record["token_top"] = _record_of_top(verdict.token_top)
    if verdict.rank:
        record["rank"] = list(verdict.rank)
    if draft.origin:
        record["origin"] = [cast(OriginRecord, origin.as_dict()) for origin in draft.origin]
    if draft.undisclosed is not None:
        record["undisclosed"] = draft.undisclosed
    if event.token_texts:
        record["texts"] = {str(token): text for token, text in event.token_texts.items()}
    return record


def to(record: StepRecord, metrics: Metrics) -> StepEvent:
    """Return the event of a valid record; `metrics`: before it."""
    step, memory = step_of(record), record.get("memory") or MemoryRecord()
    return StepEvent(
        step,
        pieces=tuple(record["pieces"]),
        draft_texts=tuple(record["draft_text"]),
        token_texts={int(token): text for token, text in (record.get("texts") or {}).items()},
        pending_text=record.get("pending_text") or "",
        memory=MemoryUse(memory.get("rss_bytes"), memory.get("device_bytes"), memory.get("kv_bytes")),
        metrics=metrics.plus(step),
    )


def step_of(record: StepRecord) -> Step:
    q, pending = record["q"], record.get("pending")
    remote = record.get("remote") or {}
    source, request_sent = _source_of(remote, bool(record["choices"]))
    if record["kind"] == "unknown":  # another engine ran it: this program sent no request
        source, request_sent = Source.UNREPORTED, True
    token_top = record.get("token_top")
    return Step(
        i=record["i"],
        tokens=tuple(record["tokens"]),
        draft=Draft(
            tuple(record["draft"]),
            tuple(record["parents"]),
            None if q is None else tuple(q),
            origin=tuple(Origin(**origin) for origin in record.get("origin", ())),
            undisclosed=record.get("undisclosed"),
        ),
        verdict=Verdict(
            accepted=tuple(record["accepted"]),
            token=record["token"],
            p=tuple(record["p"]),
            draw=tuple(record["draw"]),
            beta=tuple(record["beta"]),
            choices=tuple(map(tuple, record["choices"])),
            committed=() if pending is None else tuple(record["tokens"]),
            pending=tuple(pending or ()),
            bound=_bounds(record),
            rank=tuple(record.get("rank") or ()),
            target_top=_tops(record.get("laws")),
            draft_top=_tops(record.get("drafted")),
            token_top=_tops([token_top])[0] if token_top else None,
            source=source,
            request_sent=request_sent,
            link=None if record.get("remote") is None else LinkStats.of(remote),
            replica=record.get("replica", ""),
        ),
        gamma=record["gamma"],
        draft_s=record["draft_s"],
        verify_s=record["verify_s"],
        host_s=record["host_s"],
        t=record["t"],
        policy=dict(record.get("policy", {})),
    )


def _source_of(remote: Mapping[str, float], has_choices: bool) -> tuple[Source, bool]:
    """Return source and `request_sent`; late responses lack choices."""
    if remote.get("provisional"):
        return Source.PROVISIONAL, not remote.get("pending")
    if remote.get("edge"):
        return Source.ALONE, False
    if remote.get("escalated") == 0:
        return Source.GATE, False
    late = "confirmed" in remote and not has_choices
    return (Source.LATE, False) if late else (Source.TARGET, True)


def _record_of_top(top: TopTokens) -> TopRecord:
    return {"entropy": top.entropy, "top": list(top.top)}


def _tops(records: Iterable[TopRecord] | None) -> tuple[TopTokens, ...]:
    return tuple(TopTokens(top["entropy"], tuple((token, p) for token, p in top["top"])) for top in records or ())


def _bounds(record: StepRecord) -> tuple[float | None, ...]:
    """Return the bounds; older traces lack them, and chains with draws determine them."""
    if "bound" in record:
        return tuple(record["bound"])
    n = len(record["draft"])
    if record["parents"] != list(range(-1, n - 1)):
        return (None,) * n
    return tuple(
        None if draw is None or p is None else min(1.0, p / max(q, 1e-30))
        for p, q, draw in zip(record["p"], record["q"] or [1.0] * n, record["draw"], strict=True)
    )


# --- untrusted files ----------------------------------------------------------------------------------------------


def _check_draft(record: StepRecord) -> None:
    parents = record["parents"]
    per_node: list[Sequence[Any]] = [record["draft_text"], parents, record["p"], record["draw"], record["beta"]]
    optional = (record["q"], record.get("drafted"), record.get("bound"), record.get("rank"), record.get("origin"))
    per_node += [values for values in optional if values]
    if any(len(values) != len(record["draft"]) for values in per_node):
        raise ValueError("the lists of a draft differ in length")
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError("a parent must precede its child")


def _agreeing(record: StepRecord) -> StepRecord:
    parents = record["parents"]
    tokens, token = record["tokens"], record["token"]
    n, choices = len(record["draft"]), record["choices"]
    _check_draft(record)
    reported = record.get("undisclosed") is not None
    _check_reported(record, reported)
    last, over_link = -1, reported or record.get("remote") is not None
    pending = record.get("pending")
    for node in record["accepted"]:
        if not 0 <= node < n or parents[node] != last or not _decided(record, node, over_link):
            raise ValueError("the accepted nodes are not a path of tested nodes")
        last = node
    if len(record["pieces"]) != len(tokens) or "".join(record["pieces"]) != record["text"]:
        raise ValueError("the pieces do not add up to the text")
    if pending is not None and (n or token is not None):
        raise ValueError("a search step has no draft and no token")
    if (0 if pending is not None else len(tokens) - (token is not None)) != len(record["accepted"]):
        raise ValueError("tokens and accepted nodes do not add up")
    if token is not None and token not in tokens[-1:]:
        raise ValueError("token is not the last of tokens")
    laws = record.get("laws")
    if laws is not None and len(laws) != n + 1:
        raise ValueError("`laws` must have an entry per row")
    if pending is None and (choices or not over_link) and len(choices) != n + 1:
        raise ValueError("choices must have an entry per row")
    return record


def _check_reported(record: StepRecord, reported: bool) -> None:
    """Check a step of another engine, whose draft lists the accepted tokens only."""
    if reported and len(record["accepted"]) != len(record["draft"]):
        raise ValueError("a draft with undisclosed tokens lists the accepted ones only")
    durations = (record["draft_s"], record["verify_s"], record["host_s"])
    if not reported and (record["kind"] == "unknown" or None in durations):
        raise ValueError("kind and durations may be unknown in steps with `undisclosed` only")
    if None in durations and any(seconds is not None for seconds in durations):
        raise ValueError("the durations of a step are known or unknown together")


def _decided(record: StepRecord, node: int, over_link: bool) -> bool:
    return record["beta"][node] is not None or (over_link and record["p"][node] is None)


CHECKED: TypeAdapter[StepRecord] = TypeAdapter(Annotated[StepRecord, AfterValidator(_agreeing)])
