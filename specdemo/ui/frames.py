"""Runs of the page, and their projection to the JSON frames that the browser draws.

Records are only appended; a frame contains the records from index `at` on and the current state. Records of headers and
steps contain their trace line, from which the browser draws and exports everything.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specdemo.core.events import INTERRUPTED, End, Event, Header, Loading, StepEvent
from specdemo.core.explain import (
    FATES,
    REASON_INDEX,
    STYLES,
    Decision,
    Reason,
    decision_of,
    failover_note,
    reason_of,
    takes_most_probable,
)
from specdemo.core.rules import DecidedBy, rule_traits
from specdemo.core.step import Step
from specdemo.core.trace import MAX_CHARACTERS, Trace, read
from specdemo.drafters import METHODS
from specdemo.ui.lane import BASELINE, LANES, SHORT_PAIRS, SPEC, Lane, clock, is_short, linked, mode, model_name, speed
from specdemo.ui.run_figures import DISTURBED, disturbed_lanes, estimate_lengths, lane_ledger, rates, tiles
from specdemo.ui.settings import recorded_settings
from specdemo.ui.summary import summarise
from specdemo.ui.text_comparison import guarantee

ENDS = {"stop": ("done", "the text ended"), "length": ("done", "token limit reached"), "cancelled": ("stopped", "")}
CONTEXT_FULL = "context full"
SUMMARISING = ("decoding", "summary")  # after the last event: the page accepts no run yet
_NO_SUMMARY: Mapping[str, Any] = {
    **dict.fromkeys(("verdict", "lengths"), ""),
    **dict.fromkeys(("headline", "passes")),
    "table": [],
    "disturbed": [],
    "texts": {},
    "names": {},
    "figures": {},
}
_RESIDUALS = (Reason.RESIDUAL, Reason.SIBLINGS_RESIDUAL, Reason.BLOCK_RESIDUAL)
_RESIDUAL = "Drawn from what the large model wants more often than the helper."
_PLAIN_SENTENCES = {
    Reason.PLAIN.value: "Written by the large model: there was no guess.",
    Reason.SIBLINGS_RESIDUAL.value: "Drawn from what the large model wants more often than the rejected guesses.",
    **dict.fromkeys((Reason.RESIDUAL.value, Reason.LENIENT_RESIDUAL.value, Reason.BLOCK_RESIDUAL.value), _RESIDUAL),
}
_PLAIN_WORDS = {
    "target pass": "pass",
    "target": "large model",
    "draft token": "guess",
    "guesss": "guesses",
    "drafter": "helper",
    "the draft": "the guesses",
    "Drafted": "Guessed",
    "committed": "used",
    "Not tested": "Thrown away",
    "the siblings' residual": "the rest that earlier guesses left",
}
_FIGURES = tuple(field.name for field in fields(Decision))
LOST = "Connection to the cloud lost: the drafter continues alone."


@dataclass
class Run:
    """State of a run with up to four lanes."""

    plan: tuple[str, ...] = (SPEC,)
    id: str = ""  # unguessable
    records: list[str] = field(default_factory=list)  # JSON texts
    phase: tuple[str, str] = ("queued", "")
    over: bool = False
    size: int = 0  # characters of traces and records
    visitor: str = ""
    network: str = ""  # of the visitor
    pairs: int = 1  # number of repetitions; the page shows the first
    repeats_short: bool = False  # a short first pair is repeated
    history: Sequence[dict[str, str]] = ()  # messages of earlier turns
    recorded: Mapping[str, Any] | None = None  # settings of an opened trace
    last_seen: float = field(default_factory=time.monotonic)
    followers: set[asyncio.Event] = field(default_factory=set)  # set by changes
    # Stops the job; frames continue to the end, so no tokens are lost.
    stop: Callable[[], None] = field(default=lambda: None)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.id = self.id or secrets.token_urlsafe(12)
        first = Lane()
        self.lanes = {name: Lane(first=first) if i else first for i, name in enumerate(self.plan)}
        self.speeds: dict[str, list[float]] = {name: [] for name in self.plan}
        self._summary = _NO_SUMMARY

    def notify(self) -> None:
        for changed in self.followers:
            changed.set()

    def add_event(self, name: str, event: Event) -> None:
        """Add an event of a lane. Repetitions after its end change only speeds and phase."""
        lane = self.lanes[name]
        repeated = lane.ended
        line = "" if repeated else lane.add(event)
        self.size += len(line)
        match event:
            case End():
                self._end(name, event, repeated)
            case StepEvent() if repeated:
                self.phase = ("decoding", f"pair {len(self.speeds[name]) + 1} of {self.pairs}")
            case _ if repeated:
                pass
            case Loading() if lane.begun:
                self.phase = ("prefill", f"{event.text} {event.done:,} of {event.total:,}")
            case Loading():
                self.phase = ("loading", event.text)
            case Header():
                self.phase = ("prefill", f"{len(event.prompt_tokens)} prompt tokens")
                self._record({"l": name, "head": lane_view(name, lane)}, "header", line)
            case StepEvent():
                if note := LOST if event.step.lost else failover_note(event.step):
                    self._record({"l": name, "note": note})
                description = "plain" if name == BASELINE else lane.title
                if len(self.lanes) > 1:
                    position = sum(other.ended for other in self.lanes.values()) + 1
                    description += f", run {position} of {len(self.lanes)}"
                self.phase = ("decoding", description)
                at = round(clock(event.metrics, linked(self.lanes)), 6)
                self._record({"l": name, "at": at, **step_view(event.step, lane.recipe)}, "step", line)

    def _end(self, name: str, end: End, repeated: bool) -> None:
        failed = end.reason not in ENDS
        if not (repeated and failed):
            self.speeds[name] += end.pair_speeds or [speed(end.metrics, linked(self.lanes)) or 0.0]
            self.pairs = max(self.pairs, len(end.pair_speeds))  # of an opened trace
        ends = [lane.end for lane in self.lanes.values() if lane.end]
        if self.repeats_short and not repeated and len(ends) == len(self.lanes):
            self.pairs = SHORT_PAIRS if is_short([ended.metrics for ended in ends]) else 1
        if failed:
            self.phase = ("failed", end.error or "the model gave no reason")
            if mode(self.lanes[name].recipe):
                self._record({"l": name, "note": end.error})
        elif self._complete or end.error:
            shown = self.lanes[self.plan[0]].end
            if shown is None or end.error:
                shown = end
            if shown.reason in ENDS:
                self.phase = self._ending(shown)

    @property
    def _complete(self) -> bool:
        return all(len(speeds) == self.pairs for speeds in self.speeds.values())

    def note(self, text: str) -> None:
        self._record({"l": self.plan[0], "note": text})

    def _record(self, values: dict[str, Any], key: str = "", line: str = "") -> None:
        """Append a record, with the trace line at `key`."""
        text = json.dumps(values, separators=(",", ":"))
        record = f'{text[:-1]},"{key}":{line}}}' if key else text
        self.size += len(record)
        self.records.append(record)

    def finish(self, error: str | None = None) -> None:
        """End the run; computes its summary, in up to some tenths of a second."""
        if self.over:
            return
        self.stop = lambda: None  # the job retains all events
        if error:
            self.phase = ("failed", error)
        elif self.phase[0] not in ("failed", "stopped") and not self._complete:
            self.phase = self._ending(End("cancelled"))
        for lane in self.lanes.values():
            if lane.begun and not lane.ended:
                end = End("error" if error else "cancelled", error or INTERRUPTED, lane.metrics)
                self.size += len(lane.add(end))
        for name, lane in self.lanes.items():
            lane.record_speeds(self.speeds[name])
        try:
            self._summary = {**summarise(self.lanes, self.speeds), "figures": self._figures()}
        finally:
            self.over = True

    def _ending(self, end: End) -> tuple[str, str]:
        phase, why = ENDS[end.reason]
        why = CONTEXT_FULL if end.context_full else why
        name = next((name for name in self.plan if self.lanes[name].begun), self.plan[0])
        count = f"{self.lanes[name].metrics.tokens} tokens"
        if name != self.plan[0]:
            count += f" of {'the AR baseline' if name == BASELINE else self.lanes[name].title}"
        pairs = f"first of {self.pairs} pairs" if self.pairs > 1 and self._complete else ""
        return phase, ", ".join(filter(None, (count, end.error or why, pairs)))

    def frame(self, start: int) -> str:
        """Return the state, and the records from `start` on, as JSON text."""
        over = self.over  # read once, and first: `finish` runs in another thread
        ended = self.phase[0] in ("done", "stopped", "failed")
        in_chat = self.recorded is None and self.lanes[self.plan[0]].recipe.get("chat")
        state = {
            "run": self.id,
            "plan": self.plan,
            "at": start,
            "phase": self.phase if over or not ended else SUMMARISING,
            "tiles": tiles(self.lanes, self.speeds),
            "rates": rates(self.lanes),
            **self._summary,
            "turn": len(self.history) // 2 + 1 if in_chat else 0,  # of a conversation on the page
            "over": over,
            "recorded": self.recorded,
        }
        text = f'{json.dumps(state, separators=(",", ":"))[:-1]},"r":[{",".join(self.records[start:])}]}}'
        return text.replace("<", "\\u003c")  # model text must never be parsed as markup

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        disturbed = disturbed_lanes(self.lanes)
        for name, lane in self.lanes.items():
            if not lane.begun:
                continue
            estimate = estimate_lengths(lane, self.lanes.get(BASELINE))
            if name in disturbed:
                estimate = f"No estimate: {DISTURBED}."
            ledger = lane_ledger(lane, None if disturbed else self.lanes.get(BASELINE))
            figures[name] = {
                "metrics": lane.metrics.as_dict(),
                "what_if": None if isinstance(estimate, str) else estimate.as_dict(),
                "why_not": estimate if isinstance(estimate, str) else "",
                "ledger": ledger.as_dict() if ledger else None,
            }
        return figures

    def trace(self, name: str) -> str | None:
        lane = self.lanes.get(name)
        return "".join(lane.lines) if lane and lane.lines else None


def read_traces(text: Any, max_characters: int = MAX_CHARACTERS) -> Run:
    """Return a finished run with the traces of a file. Raises `UserError`."""
    traces = read(text, most_characters=max_characters, most_traces=len(LANES))
    run = run_of_traces(traces)
    run.finish()
    header = run.lanes[run.plan[0]].header
    assert header is not None
    run.recorded = recorded_settings(header, compare=len(run.plan) > 1)
    truncated = ", truncated" if any(trace.end is None for trace in traces) else ""
    tokens = " and ".join(str(lane.metrics.tokens) for lane in run.lanes.values())
    run.phase = ("done", f"recorded trace, {tokens} tokens{truncated}")
    return run


def run_of_traces(traces: Sequence[Trace]) -> Run:
    """Return a run with these traces, the first AR trace in the AR lane, without the summary of `Run.finish`."""
    methods = [trace.header.recipe["method"] for trace in traces]
    baseline = methods.index("ar") if "ar" in methods else None
    others = iter(name for name in LANES if name != BASELINE)
    names = [BASELINE if i == baseline else next(others, LANES[-1]) for i in range(len(traces))]
    run = Run(tuple(name for name in LANES if name in names))
    for name, trace in sorted(zip(names, traces, strict=True), key=lambda named: run.plan.index(named[0])):
        for event in (trace.header, *trace.steps, trace.end):
            if event is not None:
                run.add_event(name, event)
    return run


def lane_view(name: str, lane: Lane) -> dict[str, Any]:
    """Return texts and facts for drawing a lane and its steps.

    `adjusts`: corrections are sampled from a residual; `scales`: the bound is a multiple of q; `residuals`: reasons of
    tokens from a residual; `formulas`: of such reasons.
    """
    recipe = lane.recipe
    rule, method = rule_traits(recipe), METHODS.get(recipe["method"])
    badge, why = guarantee(lane)
    if name == BASELINE and badge == "exact":
        badge = ""  # true of every baseline
    return {
        "title": lane.title,
        "about": method.title if method else "",
        "model": model_name(recipe),
        "chat": bool(recipe.get("chat")),
        "exact": lane.exact or lane.external,  # the badge is not a warning
        "badge": badge,
        "why": why,
        "test": decided_by(recipe),
        "adjusts": rule.adjusts and not recipe.get("skip_sample_adjustment"),
        "scales": rule.threshold is not None and rule.needs_q,
        "drafts": method is None or method.drafts,
        "reasons": [in_plain_words(reason.value) for reason in Reason],
        "formulas": {REASON_INDEX[reason]: reason.value for reason in (*_RESIDUALS, Reason.LENIENT_RESIDUAL)},
        "fates": FATES,
        "residuals": [REASON_INDEX[reason] for reason in _RESIDUALS],
        "styles": {outcome: asdict(style) for outcome, style in STYLES.items()},
    }


def in_plain_words(text: str) -> str:
    """Return an explanation of the terminal in words of the page."""
    text = _PLAIN_SENTENCES.get(text, text)
    for term, word in _PLAIN_WORDS.items():
        text = text.replace(term, word)
    return text


def decided_by(recipe: Mapping[str, Any]) -> str:
    """Return what decides about a draft token: draw, block, bound (of p), rank, sample; else `none`."""
    rule = rule_traits(recipe)
    if rule.lenient:  # the player has no bounds with a threshold
        return "none"
    if takes_most_probable(recipe):
        return "rank"
    if rule.decided_by in (DecidedBy.SAMPLE, DecidedBy.SHARED_DRAW):
        return "sample"
    if rule.chains_only:
        return "block"
    return "draw" if rule.threshold is None else "bound"


def step_view(step: Step, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return outcome, reason and deciding figures of each draft token, and the reason `why` of the target's token.

    `by`: source of a draft that the target did not verify.
    """
    nodes = []
    for node in range(len(step.draft)):
        decision = decision_of(step, node, recipe)
        figures = {name: getattr(decision, name) for name in _FIGURES}
        if not takes_most_probable(recipe):
            figures["beta"] = step.verdict.beta[node]
        known = {name: value for name, value in figures.items() if value is not None}
        nodes.append({"state": step.outcome(node), "why": REASON_INDEX[reason_of(step, node, recipe)], **known})
    view = {"nodes": nodes, "why": REASON_INDEX[reason_of(step, None, recipe)]}
    return view | {"by": step.verdict.source} if step.unverified else view
