"""What the page says of a lane: title, badge, tiles; and of a preflight. Every figure comes from the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.metrics import Metrics
from specdemo.preflight import Preflight

SPEC, PLAIN = "spec", "ar"
LANES = (SPEC, PLAIN, "third", "fourth")  # the places on the page
NOTHING = "–"
OTHER_LAW = "This rule changes the target's distribution at these settings."
ALONE = {"edge_only": "edge only: the drafter alone", "cloud_only": "cloud only: the target alone"}


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
    if lane.recipe["method"] == "beam":
        return "search", "Beam search looks for one probable text: nothing is drawn from the target's distribution."
    if not lane.exact:
        return "lossy", _lossy(lane.recipe)
    probs = "The text has the target's own distribution."
    if lane.bit_equal:
        return "bit-equal here", (
            f"{probs} On this machine a row's logits are the same to the last bit in any pass, so greedy text is that of "
            "plain decoding, token by token."
        )
    return "exact", f"{probs} Same law as plain decoding; at temperature 0 a near-tie may flip, as rounding decides."


def _lossy(recipe: Mapping[str, Any]) -> str:
    """What it is that costs exactness."""
    cloud = recipe.get("cloud") or {}
    if cloud.get("mode") == "edge_only":
        return "The drafter decodes by itself: this is its text, not the target's."
    reasons = {
        "what comes too late is not waited for": cloud.get("provisional"),
        "the cloud is not asked about every draft": cloud.get("gates"),
        "the drafter goes on alone if the cloud is lost": cloud.get("on_loss") == "edge",
        "the law that drafts were drawn from does not travel whole": cloud.get("q_rows", "float32") != "float32",
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return f"Not the target's own text: {', and '.join(found)}." if found else OTHER_LAW


def mode(recipe: Mapping[str, Any]) -> str:
    """Who decodes, of a recipe whose target is elsewhere; empty where all is here."""
    return (recipe.get("cloud") or {}).get("mode", "")


def unseen(step: Mapping[str, Any]) -> str:
    """Why no target has seen what this round committed: `provisional`, `alone` or `gate`; empty if it has."""
    notes = step.get("remote", {})
    if notes.get("provisional"):
        return "provisional"
    if notes.get("edge"):
        return "alone"
    return "gate" if notes.get("escalated") == 0 else ""


def title(recipe: Mapping[str, Any]) -> str:
    """What a lane is, in a few words."""
    if mode(recipe) in ALONE:
        return ALONE[mode(recipe)]
    if recipe["method"] == "ar":
        return "target only" + (", over the link" if mode(recipe) else "")
    if recipe["method"] == "beam":
        return f"{recipe['num_beams']} beams"
    policy, rule = recipe.get("policy", "fixed"), recipe.get("rule", "rejection")
    length = f"γ {recipe['gamma']}" if policy == "fixed" else f"γ by {policy}"
    link = ", edge and cloud" if mode(recipe) else ""
    return f"{recipe['method']}, {length}" + ("" if rule == "rejection" else f", {rule}") + link


def tiles(lanes: Mapping[str, Lane]) -> dict[str, tuple[str, str]]:
    """Value and footnote of each tile, for the first lane; a dash where there is nothing to say."""
    lane = next(iter(lanes.values()))
    m = lane.metrics.as_dict()
    compared = speedup(lanes)
    drafted = m["drafted"]
    return {
        "acceptance": (
            percent(m["acceptance_rate"]),
            f"{m['accepted']} of {drafted} drafted · α {number(m['alpha'], 2)}" if drafted else "nothing drafted",
        ),
        "tokens_per_pass": (
            number(m["tokens_per_target_pass"] if m["steps"] > 1 else None, 2),
            f"{max(m['steps'] - 1, 0)} target passes",
        ),
        "tokens_per_second": (number(m["tokens_per_second"], 1), f"{m['tokens']} tokens, prefill apart"),
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


def speedup(lanes: Mapping[str, Lane], name: str = SPEC) -> float | None:
    """Tokens per second of a lane over those of the plain lane, once both are measured."""
    if name == PLAIN or not all(one in lanes and lanes[one].ended for one in (name, PLAIN)):
        return None
    fast, plain = (lanes[one].metrics.as_dict()["tokens_per_second"] for one in (name, PLAIN))
    return fast / plain if fast and plain else None


def told_of(found: Preflight) -> str:
    """A preflight as Markdown: the advice, what it rests on, and every draft length."""
    rows = [
        f"| {one.gamma} | {one.tokens_per_pass:.2f} | {one.speedup:.2f}× | {one.low:.2f}–{one.high:.2f} |"
        for one in found.estimates
    ]
    last = max(found.v)
    return "\n".join(
        [
            f"**Preflight of {found.recipe.method}:** {found.advice}. α is {found.alpha:.2f}, a drafted token costs "
            f"{found.c:.2f} plain passes and a pass over {last} rows {found.v[last]:.2f}. Weights take "
            f"{_size(found.weight_bytes)}, keys and values {_size(found.kv_bytes)} per 1,000 tokens. "
            "Nothing was generated.",
            "",
            "| γ | tokens per pass | expected speed-up | 95 % |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def number(x: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return NOTHING if x is None else f"{x:.{digits}f}"


def percent(x: float | None) -> str:
    """A share in per cent, or a dash."""
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
