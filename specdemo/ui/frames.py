"""From the events of a run to what the page draws: small JSON frames, and the trace to take home.

A run has one lane or two (speculative, plain). Its records only ever grow, so a frame carries those from index `at`
on, and a client that missed some asks for them by index; everything else in a frame is the small present state.
Knows nothing of gradio, threads or devices. One writer per run (whoever drains its stream); anyone may read.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.metrics import Metrics
from specdemo.generate import ending

SPEC, PLAIN = "spec", "ar"
NOTHING = "–"
ENDS = {"stop": ("done", "the text ended"), "length": ("done", "limit reached"), "cancelled": ("stopped", "")}

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
    for i, text in enumerate(step["draft_text"]):
        if i not in accepted:
            shown.append(node(i, "ignored" if step["beta"][i] is None else "rejected", text))
    if step["token"] is not None:
        shown.append([step["kind"], step["pieces"][-1], step["token"], None, None, None])
    return shown


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


@dataclass
class Lane:
    """One decoding of the prompt: the lines of its trace, and what they add up to."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    memory: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    weights: float | None = None  # bytes of all models of this lane
    exact: bool = True
    bit_equal: bool = False  # whether rows have the same bits in any pass
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        """Everything committed so far."""
        return [token for line in self.lines if "i" in line for token in line["tokens"]]

    @property
    def rate(self) -> str:
        """Its speed, for its heading."""
        speed = self.metrics.as_dict()["tokens_per_second"]
        return "" if speed is None else f"{speed:.1f} tok/s"


def guarantee(lane: Lane) -> tuple[str, str]:
    """What may be relied on, in two words and in a sentence."""
    if not lane.exact:
        return "lossy", "This rule changes the target's distribution at these settings."
    law = "The text has the target's own distribution."
    if lane.bit_equal:
        return "bit-equal here", (
            f"{law} On this machine a row's logits are the same to the last bit in any pass, so greedy text is that of "
            "plain decoding, token by token."
        )
    return "exact", f"{law} Same law as plain decoding; at temperature 0 a near-tie may flip, as rounding decides."


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
        if "specdemo" in event:
            lane.exact, lane.recipe = event["exact"], event["recipe"]
            lane.bit_equal = event.get("bit_equal", False)
            sizes = [event["environment"].get(name) for name in ("target_bytes", "drafter_bytes")]
            lane.weights = sum(filter(None, sizes)) or None
            self.phase = ("prefill", f"{len(event['prompt_tokens'])} prompt tokens")
            badge, why = guarantee(lane)
            head = {"prompt": event["prompt"], "exact": lane.exact, "badge": badge, "why": why}
            self.records.append({"l": name, "head": {**head, "title": title(lane.recipe)}})
        elif "end" in event:
            lane.ended = True
            if event["end"] not in ENDS:
                self.phase = ("failed", event["error"] or "the model gave no reason")
            elif name == self.plan[-1]:
                self.phase = self._ending(event["end"])
        else:
            lane.metrics.add_record(event)
            lane.memory = event.get("memory") or lane.memory
            doing = "the speculative run" if name == SPEC else "the plain run"
            self.phase = ("decoding", doing)
            self.records.append({"l": name, "i": event["i"], "t": round(event["t"], 4), "c": cells(event)})

    def finish(self, error: str | None = None) -> None:
        """Nothing follows. A lane that was cut off gets its last line here, so that no trace ends without one."""
        if self.over:
            return
        self.over = True
        if error:
            self.phase = ("failed", error)
        elif self.phase[0] != "failed" and not all(lane.ended for lane in self.lanes.values()):
            self.phase = self._ending("cancelled")
        for lane in self.lanes.values():
            if lane.lines and not lane.ended:
                lane.lines.append(ending("error" if error else "cancelled", lane.metrics, error))
                lane.ended = True

    def _ending(self, end: str) -> tuple[str, str]:
        phase, why = ENDS[end]
        return phase, ", ".join(filter(None, (f"{self.lanes[self.plan[0]].metrics.tokens} tokens", why)))

    def frame(self, at: int) -> str:
        """The state now and the records from `at` on, as one JSON string (strings survive gradio's wire best)."""
        text = json.dumps(
            {
                "run": self.id,
                "plan": self.plan,
                "at": at,
                "r": self.records[at:],
                "phase": self.phase,
                "tiles": tiles(self),
                "rates": {name: lane.rate for name, lane in self.lanes.items()},
                "verdict": verdict(self) if self.over else "",
                "over": self.over,
            },
            separators=(",", ":"),
        )
        return text.replace("<", "\\u003c")  # so that nothing on the way takes a model's text for markup

    def trace(self, name: str) -> str | None:
        """A lane's trace as JSON Lines; None if it never began."""
        lane = self.lanes.get(name)
        return "".join(json.dumps(line) + "\n" for line in lane.lines) if lane and lane.lines else None


def title(recipe: Mapping[str, Any]) -> str:
    """What a lane is, in a few words."""
    if recipe["method"] == "ar":
        return "target only"
    policy, rule = recipe.get("policy", "fixed"), recipe.get("rule", "rejection")
    length = f"γ {recipe['gamma']}" if policy == "fixed" else f"γ by {policy}"
    return f"{recipe['method']}, {length}" + ("" if rule == "rejection" else f", {rule}")


def tiles(run: Run) -> dict[str, tuple[str, str]]:
    """Value and footnote of each tile, for the run's first lane; a dash where there is nothing to say."""
    lane = run.lanes[run.plan[0]]
    m = lane.metrics.as_dict()
    compared = speedup(run)
    drafted = m["drafted"]
    return {
        "acceptance": (
            _percent(m["acceptance_rate"]),
            f"{m['accepted']} of {drafted} drafted · α {_number(m['alpha'], 2)}" if drafted else "nothing drafted",
        ),
        "tokens_per_pass": (
            _number(m["tokens_per_target_pass"] if m["steps"] > 1 else None, 2),
            f"{max(m['steps'] - 1, 0)} target passes",
        ),
        "tokens_per_second": (_number(m["tokens_per_second"], 1), f"{m['tokens']} tokens, prefill apart"),
        "ttft": (_milliseconds(m["ttft_s"]), "from the worker's start"),
        "memory": (
            _size(lane.memory.get("rss_bytes")),
            f"weights {_size(lane.weights)} · KV {_size(lane.memory.get('kv_bytes'))}"
            + (f" · device {_size(device)}" if (device := lane.memory.get("device_bytes")) is not None else ""),
        ),
        "speedup": (
            NOTHING if compared is None else f"{compared:.2f}×",
            "plain run not measured" if compared is None else "against plain decoding",
        ),
    }


def speedup(run: Run) -> float | None:
    """Tokens per second of the speculative lane over those of the plain lane, once both are measured."""
    if not all(name in run.lanes and run.lanes[name].ended for name in (SPEC, PLAIN)):
        return None
    fast, plain = (run.lanes[name].metrics.as_dict()["tokens_per_second"] for name in (SPEC, PLAIN))
    return fast / plain if fast and plain else None


def verdict(run: Run) -> str:
    """Did it help, and where did the time go? Empty when nothing was compared.

    A round is priced in plain steps, so the words add up: speed-up = tokens won per round / plain steps it took.
    """
    ratio = speedup(run)
    if ratio is None:
        return ""
    spec, plain = (run.lanes[name].metrics.as_dict() for name in (SPEC, PLAIN))
    rounds, step = spec["steps"] - 1, plain["decode_s"] / max(plain["steps"] - 1, 1)
    draft, verify, host = (spec[part] / rounds / step for part in ("draft_s", "verify_s", "host_s"))
    if ratio > 1.02:
        outcome = f"Speculation was {ratio:.2f}× as fast"
    elif ratio < 0.98:
        outcome = f"Speculation lost: {ratio:.2f}× the speed of plain decoding"
    else:
        outcome = "Speculation made no difference"
    words = [
        f"{outcome}: {spec['tokens_per_second']:.1f} against {plain['tokens_per_second']:.1f} tokens per second.",
        f"A round won {spec['tokens_per_target_pass']:.2f} tokens and took as long as {draft + verify + host:.2f} "
        f"plain steps (drafting {draft:.2f}, verifying {verify:.2f}, the rest {host:.2f}).",
    ]
    if ratio < 0.98:
        words.append(_advice(spec, draft, verify, host))
    if run.lanes[SPEC].recipe["temperature"] == 0 and run.lanes[SPEC].exact:
        words.append(_sameness(run.lanes[SPEC], run.lanes[PLAIN]))
    return " ".join(words)


def _advice(spec: Mapping[str, Any], draft: float, verify: float, host: float) -> str:
    if not spec["drafted"]:
        return "Nothing was drafted: the text held no context that the drafter knew."
    if spec["acceptance_rate"] < 0.5:
        return f"Only {_percent(spec['acceptance_rate'])} of the drafted tokens were accepted: try a shorter draft."
    if draft >= max(verify, host):
        return "The drafter is too dear for this target: try a shorter draft, a smaller drafter, or NASD."
    if verify > 1.3:
        return "Verifying several tokens costs this device clearly more than one: try a shorter draft."
    return "The rounds cost more than they won: try a shorter draft or a larger target."


def _sameness(spec: Lane, plain: Lane) -> str:
    ours, theirs = spec.tokens, plain.tokens
    if ours == theirs:
        return "Both runs wrote the same text."
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    cause = "which is a fault, since rows are bit-equal here" if spec.bit_equal else "a near-tie that rounding decided"
    return f"The texts part at token {first + 1}: {cause}."


def _number(x: float | None, digits: int) -> str:
    return NOTHING if x is None else f"{x:.{digits}f}"


def _percent(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.0%}".replace("%", " %")


def _milliseconds(x: float | None) -> str:
    if x is None:
        return NOTHING
    return f"{x * 1000:.0f} ms" if x < 1 else f"{x:.2f} s"


def _size(n: float | None) -> str:
    if n is None:
        return NOTHING
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


class Runs:
    """The latest runs by id and by visitor: bounded, so that a page that is up for weeks does not grow."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._of: dict[str, str] = {}  # visitor -> id of that visitor's latest run
        self._lock = threading.Lock()

    def new(self, visitor: str, plan: tuple[str, ...]) -> Run:
        """A run for this visitor; the one they still had going is asked to stop."""
        self.leave(visitor)
        run = Run(plan)
        with self._lock:
            self._runs[run.id] = run
            self._of[visitor] = run.id
            while len(self._runs) > self._capacity:
                gone, _ = self._runs.popitem(last=False)
                self._of = {who: what for who, what in self._of.items() if what != gone}
        return run

    def get(self, run_id: object) -> Run | None:
        """The run of that id, which thereby becomes the last to be dropped; None if there is none (any more)."""
        with self._lock:
            if not isinstance(run_id, str) or run_id not in self._runs:
                return None
            self._runs.move_to_end(run_id)
            return self._runs[run_id]

    def leave(self, visitor: str) -> None:
        """This visitor has gone or starts anew: stop what they had going."""
        with self._lock:
            run = self._runs.get(self._of.pop(visitor, ""))
        if run is not None:
            run.stop()

    def __len__(self) -> int:
        return len(self._runs)
