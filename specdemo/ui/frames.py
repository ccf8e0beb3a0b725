"""From the events of a run to what the page draws: small JSON frames, and the trace to take home.

A run has one to four lanes (speculative, plain, others beside them). Its records only ever grow, so a frame carries
those from index `at` on, and a client that missed some asks for them by index; everything else in a frame is the small
present state.
Knows nothing of gradio, threads or devices. One writer per run (whoever drains its stream); anyone may read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.generate import ending
from specdemo.ui.labels import PLAIN, SPEC, Lane, guarantee, mode, tiles, title, unseen
from specdemo.ui.summary import sameness, verdict

ENDS = {"stop": ("done", "the text ended"), "length": ("done", "limit reached"), "cancelled": ("stopped", "")}

NOT_KEPT = ("rejected", "ignored")
LOST = "The cloud is lost: from here the drafter goes on alone."

Cell = list  # [kind, text, token id, p, q, draw]: positional, for there are thousands of them


def cells(step: Mapping[str, Any]) -> list[Cell]:
    """What one step shows, in reading order: the accepted path, the drafts that came to nothing, the last token.

    A draft node is accepted, rejected (tested and not accepted) or ignored (never tested). q of a point mass is None.
    """
    accepted = step["accepted"]
    q = step["q"] or [None] * len(step["draft"])

    def node(i: int, kind: str, text: str) -> Cell:
        return [kind, text, step["draft"][i], _short(step["p"][i]), _short(q[i]), _short(step["draw"][i])]

    shown = [node(i, "accepted", piece) for i, piece in zip(accepted, step["pieces"], strict=False)]
    if "pending" in step:  # a search settles tokens by the dozen, none of them drafted
        return [
            ["plain", piece, token, None, None, None]
            for piece, token in zip(step["pieces"], step["tokens"], strict=True)
        ]
    for i, text in enumerate(step["draft_text"]):
        if i not in accepted:
            shown.append(node(i, "ignored" if step["beta"][i] is None else "rejected", text))
    if step["token"] is not None:
        shown.append([step["kind"], step["pieces"][-1], step["token"], None, None, None])
    return shown


def _beside(step: Mapping[str, Any]) -> dict[str, Any]:
    """What a round has besides its cells: who committed it if no target did, and what became of those before it."""
    notes, more = step.get("remote", {}), {}
    if "pending_text" in step:
        more["ahead"] = step["pending_text"]
    if why := unseen(step):
        more["by"] = why
    if "confirmed" in notes:
        more["fate"] = [int(notes["confirmed"]), int(notes.get("overruled", 0))]
    return more


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


@dataclass
class Run:
    """One press of the button, and all that the page may want to know about it."""

    plan: tuple[str, ...] = (SPEC,)
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    records: list[dict[str, Any]] = field(default_factory=list)
    phase: tuple[str, str] = ("queued", "")
    over: bool = False
    stop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.lanes = {name: Lane() for name in self.plan}

    def absorb(self, name: str, event: dict[str, Any]) -> None:
        """Take in one event of one lane: a phase, or a line of the trace."""
        lane = self.lanes[name]
        if "phase" in event:
            self.phase = (event["phase"], event["text"])
            return
        lane.lines.append(event)
        if event.get("remote", {}).get("lost"):
            self.records.append({"l": name, "note": LOST})
        if "specdemo" in event:
            lane.exact, lane.recipe = event["exact"], event["recipe"]
            lane.bit_equal = event.get("bit_equal", False)
            sizes = [event["environment"].get(name) for name in ("target_bytes", "drafter_bytes")]
            lane.weights = sum(filter(None, sizes)) or None
            self.phase = ("prefill", f"{len(event['prompt_tokens'])} prompt tokens")
            badge, why = guarantee(lane)
            apart = "\n\n" if event.get("encoder") else ""  # what an encoder read is no beginning of the text
            head = {"prompt": event["prompt"] + apart, "exact": lane.exact, "badge": badge, "why": why}
            self.records.append({"l": name, "head": {**head, "title": title(lane.recipe)}})
        elif "end" in event:
            lane.ended = True
            if mode(lane.recipe) and event["end"] == "error":
                self.records.append({"l": name, "note": event["error"]})
            if event["end"] not in ENDS:
                self.phase = ("failed", event["error"] or "the model gave no reason")
            elif all(one.ended for one in self.lanes.values()) or event.get("error"):
                first = self.lanes[self.plan[0]].lines[-1]
                self.phase = self._ending(event["end"] if event.get("error") else first["end"], event.get("error"))
        else:
            lane.metrics.add_record(event)
            lane.memory = event.get("memory") or lane.memory
            doing = "plain" if name == PLAIN else title(lane.recipe)
            if len(self.lanes) > 1:
                doing += f", lane {sum(one.ended for one in self.lanes.values()) + 1} of {len(self.lanes)}"
            self.phase = ("decoding", doing)
            record = {"l": name, "i": event["i"], "t": round(event["t"], 4), "c": cells(event)}
            self.records.append(record | _beside(event))

    def finish(self, error: str | None = None) -> None:
        """Nothing follows. A lane that was cut off gets its last line here, so that no trace ends without one."""
        if self.over:
            return
        self.over = True
        if error:
            self.phase = ("failed", error)
        elif self.phase[0] not in ("failed", "stopped") and not all(lane.ended for lane in self.lanes.values()):
            self.phase = self._ending("cancelled")
        for lane in self.lanes.values():
            if lane.lines and not lane.ended:
                lane.lines.append(ending("error" if error else "cancelled", lane.metrics, error))
                lane.ended = True

    def _ending(self, end: str, error: str | None = None) -> tuple[str, str]:
        phase, why = ENDS[end]
        name = next((name for name in self.plan if self.lanes[name].lines), self.plan[0])  # stopped before its turn
        count = f"{self.lanes[name].metrics.tokens} tokens"
        if name != self.plan[0]:
            count += f" of {'plain decoding' if name == PLAIN else title(self.lanes[name].recipe)}"
        return phase, ", ".join(filter(None, (count, error or why)))

    def frame(self, at: int) -> str:
        """The state now and the records from `at` on, as one JSON string (strings survive gradio's wire best)."""
        text = json.dumps(
            {
                "run": self.id,
                "plan": self.plan,
                "at": at,
                "r": self.records[at:],
                "phase": self.phase,
                "tiles": tiles(self.lanes),
                "rates": {name: lane.rate for name, lane in self.lanes.items()},
                "verdict": verdict(self.lanes) if self.over else "",
                "same": sameness(self.lanes) if self.over else None,
                "over": self.over,
            },
            separators=(",", ":"),
        )
        return text.replace("<", "\\u003c")  # so that nothing on the way takes a model's text for markup

    def trace(self, name: str) -> str | None:
        """A lane's trace as JSON Lines; None if it never began."""
        lane = self.lanes.get(name)
        return "".join(json.dumps(line) + "\n" for line in lane.lines) if lane and lane.lines else None
