"""Runs of the page, and their projection to the JSON frames that the browser draws.

Records are only appended; a frame contains the records from index `at` on and the current state.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.events import INTERRUPTED, End, Event, Header, Loading, ShownToken, StepEvent
from specdemo.core.explain import FATES, REASON_INDEX, Decision, Reason, decision_of, failover_note, figure, reason_of
from specdemo.core.link_stats import LinkStats
from specdemo.core.trace import MAX_CHARACTERS, ReadLimits, read
from specdemo.drafters import METHODS
from specdemo.ui import labels
from specdemo.ui.headline import headline
from specdemo.ui.lane import LANES, PLAIN, SPEC, Lane, linked, mode, model_name, speed
from specdemo.ui.pass_costs import pass_costs
from specdemo.ui.run_table import RUN_TABLE_HEAD, run_table
from specdemo.ui.settings import recorded_settings

ENDS = {"stop": ("done", "the text ended"), "length": ("done", "token limit reached"), "cancelled": ("stopped", "")}
CONTEXT_FULL = "context full"
_NO_SUMMARY: Mapping[str, Any] = {
    **dict.fromkeys(("verdict", "lengths"), ""),
    **dict.fromkeys(("same", "headline", "passes")),
    "table": [],
    "texts": {},
}
LOST = "Connection to the cloud lost: the drafter continues alone."

Cell = list[Any]  # [kind, text, token id, p, q, draw, bound, rank, best]: positional, since a page has thousands


def cells(event: StepEvent, recipe: Mapping[str, Any]) -> list[Cell]:
    """Return the tokens of a step in reading order. The figures of a draft token are those of its `Decision`."""
    return [_cell(event, shown, recipe) for shown in event.shown()]


def _cell(event: StepEvent, shown: ShownToken, recipe: Mapping[str, Any]) -> Cell:
    d = Decision() if shown.node is None else decision_of(event.step, shown.node, recipe)
    figures = (_short(d.p), _short(d.q), _short(d.draw), _short(d.bound), d.rank, _short(d.best))
    return [shown.outcome, shown.text, shown.token, *figures]


def _short(x: float | None) -> float | None:
    return None if x is None else float(figure(x))


def _record_of_step(name: str, event: StepEvent, recipe: Any) -> dict[str, Any]:
    """Cells `c`, indices `w` of their explanations, reason `by` of a missing verification, later `fate`."""
    step, link = event.step, event.step.verdict.link or LinkStats()
    reasons = [REASON_INDEX[reason_of(step, shown.node, recipe)] for shown in event.shown()]
    record = {"l": name, "i": step.i, "t": round(step.t, 4), "c": cells(event, recipe), "w": reasons}
    if step.searched:
        record["ahead"] = event.pending_text
    if step.unverified:
        record["by"] = step.verdict.source
    if step.draft.undisclosed:
        record["undisclosed"] = step.draft.undisclosed
    if link.rows:
        record["trips"] = 1 + int(link.rows)
    if link.confirmed is not None:
        record["fate"] = [int(link.confirmed), int(link.overruled or 0)]
    return record


@dataclass
class Run:
    """State of a run: up to four lanes, and the records sent to the browser as JSON text."""

    plan: tuple[str, ...] = (SPEC,)
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    records: list[str] = field(default_factory=list)
    phase: tuple[str, str] = ("queued", "")
    over: bool = False
    size: int = 0  # characters of traces and records
    pairs: int = 1  # number of repetitions; the page shows the first
    history: Sequence[dict[str, str]] = ()  # messages of earlier turns
    recorded: Mapping[str, Any] | None = None  # settings of an opened trace
    seen: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        first = Lane()
        self.lanes = {name: Lane(first=first) if i else first for i, name in enumerate(self.plan)}
        self.speeds: dict[str, list[float]] = {name: [] for name in self.plan}
        self._stop_job: Callable[[], None] | None = None
        self._stopping, self._lock = False, threading.Lock()
        self._summary = _NO_SUMMARY

    def begin(self, stop_job: Callable[[], None]) -> None:
        with self._lock:
            self._stop_job = stop_job
        if self._stopping:
            stop_job()

    def stop(self) -> None:
        with self._lock:
            self._stopping, stop_job = True, self._stop_job
        if stop_job is not None:
            stop_job()

    def absorb(self, name: str, event: Event) -> None:
        lane = self.lanes[name]
        if lane.ended:
            return self._repeat(name, event)
        self.size += lane.add(event)
        match event:
            case Loading() if lane.begun:
                self.phase = ("prefill", f"{event.text} {event.done:,} of {event.total:,}")
            case Loading():
                self.phase = ("loading", event.text)
            case Header():
                self._begin(name, lane, event)
            case StepEvent():
                if note := LOST if event.step.lost else failover_note(event.step):
                    self._record({"l": name, "note": note})
                description = "plain" if name == PLAIN else lane.title
                if len(self.lanes) > 1:
                    position = sum(other.ended for other in self.lanes.values()) + 1
                    description += f", run {position} of {len(self.lanes)}"
                self.phase = ("decoding", description)
                self._record(_record_of_step(name, event, lane.recipe))
            case End():
                self._end(name, lane, event)

    def _repeat(self, name: str, event: Event) -> None:
        match event:
            case StepEvent():
                self.phase = ("decoding", f"pair {len(self.speeds[name]) + 1} of {self.pairs}")
            case End(reason="error"):
                self.phase = ("failed", event.error or "the model gave no reason")
            case End():
                self.speeds[name].append(speed(event.metrics, linked(self.lanes)) or 0.0)
                if self._complete:
                    self.phase = ("done", f"{self.pairs} pairs")

    def _begin(self, name: str, lane: Lane, header: Header) -> None:
        self.phase = ("prefill", f"{len(header.prompt_tokens)} prompt tokens")
        badge, why = labels.guarantee(lane)
        if name == PLAIN and badge == "exact":
            badge = ""  # true of every baseline
        separator = "\n\n" if header.encoder else ""
        chat = bool(lane.recipe.get("chat"))
        exact = lane.exact or lane.external  # the badge is not a warning
        head = {"prompt": header.prompt + separator, "chat": chat, "exact": exact, "badge": badge, "why": why}
        method = METHODS.get(lane.recipe["method"])
        head["about"] = method.title if method else ""
        words = {"reasons": [reason.value for reason in Reason], "fates": FATES}
        model = f"{model_name(lane.recipe)}, temperature {lane.recipe['temperature']:g}"
        self._record({"l": name, "head": {**head, "title": lane.title, "model": model, **words}})

    def _end(self, name: str, lane: Lane, end: End) -> None:
        self.speeds[name].append(speed(lane.metrics, linked(self.lanes)) or 0.0)
        if mode(lane.recipe) and end.reason == "error":
            self._record({"l": name, "note": end.error})
        if end.reason not in ENDS:
            self.phase = ("failed", end.error or "the model gave no reason")
        elif self._complete or end.error:
            first = self.lanes[self.plan[0]].end
            if first is None or end.error:
                first = end
            if first.reason in ENDS:
                self.phase = self._ending(first)

    @property
    def _complete(self) -> bool:
        return all(len(speeds) == self.pairs for speeds in self.speeds.values())

    @property
    def _turn(self) -> int:
        """Number of the turn in a conversation on the page, 0 outside one."""
        return (
            len(self.history) // 2 + 1 if self.recorded is None and self.lanes[self.plan[0]].recipe.get("chat") else 0
        )

    def note(self, text: str) -> None:
        """Add a sentence to the first lane."""
        self._record({"l": self.plan[0], "note": text})

    def _record(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, separators=(",", ":"))
        self.size += len(text)
        self.records.append(text)

    def finish(self, error: str | None = None) -> None:
        """End the run; computes its summary, which takes up to some tenths of a second."""
        if self.over:
            return
        self._stop_job = None
        if error:
            self.phase = ("failed", error)
        elif self.phase[0] not in ("failed", "stopped") and not self._complete:
            self.phase = self._ending(End("cancelled"))
        for lane in self.lanes.values():
            if lane.begun and not lane.ended:
                self.size += lane.add(End("error" if error else "cancelled", error or INTERRUPTED, lane.metrics))
        try:
            self._summary = self._summarise()
        finally:
            self.over = True

    def _ending(self, end: End) -> tuple[str, str]:
        phase, why = ENDS[end.reason]
        why = CONTEXT_FULL if end.context_full else why
        name = next((name for name in self.plan if self.lanes[name].begun), self.plan[0])
        count = f"{self.lanes[name].metrics.tokens} tokens"
        if name != self.plan[0]:
            count += f" of {'the AR baseline' if name == PLAIN else self.lanes[name].title}"
        return phase, ", ".join(filter(None, (count, end.error or why)))

    def frame(self, start: int) -> str:
        """Return the state and the records from `start` on as a JSON string, which gradio transfers fastest."""
        state = {
            "run": self.id,
            "plan": self.plan,
            "at": start,
            "phase": self.phase,
            "tiles": labels.tiles(self.lanes) | labels.repeated_tile(self.speeds),
            "rates": {name: lane.rate for name, lane in self.lanes.items()},
            **self._summary,
            "turn": self._turn,
            "over": self.over,
            "recorded": self.recorded,
        }
        text = json.dumps(state, separators=(",", ":"))[:-1] + f',"r":[{",".join(self.records[start:])}]}}'
        return text.replace("<", "\\u003c")  # model text must never be parsed as markup

    def _summarise(self) -> dict[str, Any]:
        return {
            "verdict": self._verdict(),
            "lengths": labels.unequal_lanes(self.lanes),
            "same": labels.sameness(self.lanes),
            "headline": headline(self.lanes, self.speeds),
            "passes": pass_costs(self.lanes),
            "table": [RUN_TABLE_HEAD, *run_table(self.lanes, self.speeds)],
            "texts": labels.compare_texts(self.lanes),
        }

    def _verdict(self) -> str:
        result = labels.describe_repeats(self.speeds) or labels.verdict(self.lanes)
        texts = (result, labels.describe_waiting(self.lanes), labels.describe_engines(self.lanes))
        return " ".join(filter(None, texts))

    def trace(self, name: str) -> str | None:
        lane = self.lanes.get(name)
        return lane.text if lane and lane.lines else None


def read_traces(text: Any, max_characters: int = MAX_CHARACTERS) -> Run:
    """Return a finished run with the traces of a file, the first AR trace in the AR lane. Raises `UserError`."""
    traces = read(text, ReadLimits(max_characters, traces=len(LANES)))
    methods = [trace.header.recipe["method"] for trace in traces]
    baseline = methods.index("ar") if "ar" in methods else None
    others = iter(name for name in LANES if name != PLAIN)
    names = [PLAIN if i == baseline else next(others, LANES[-1]) for i in range(len(traces))]
    run = Run(tuple(name for name in LANES if name in names))
    for name, trace in zip(names, traces, strict=True):
        for event in (trace.header, *trace.steps, trace.end):
            if event is not None:
                run.absorb(name, event)
    run.finish()
    run.recorded = recorded_settings(traces[names.index(run.plan[0])].header, compare=len(run.plan) > 1)
    truncated = ", truncated" if any(trace.end is None for trace in traces) else ""
    tokens = " and ".join(str(lane.metrics.tokens) for lane in run.lanes.values())
    run.phase = ("done", f"recorded trace, {tokens} tokens{truncated}")
    return run
