"""Texts about lanes: guarantee, tiles, preflight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdemo.core.metrics import Metrics
from specdemo.preflight import Preflight
from specdemo.ui.lane import PLAIN, SPEC, Lane, mode

NOTHING = "–"
CHANGED = "This rule changes the target's distribution with these settings."


def guarantee(lane: Lane) -> tuple[str, str]:
    """Return a badge and a sentence about the exactness of the output."""
    if lane.recipe["method"] == "beam":
        return "search", "Beam search returns a probable text; it does not sample from the target."
    if not lane.exact:
        return "lossy", _lossy(lane.recipe)
    exact = "The text follows the target's distribution."
    if lane.bit_equal:
        return "bit-equal here", (
            f"{exact} On this machine logits are equal to the last bit in passes of any size. "
            "Greedy text therefore equals autoregressive decoding token by token."
        )
    return "exact", f"{exact} At temperature 0 rounding may flip a near-tie."


def _lossy(recipe: Mapping[str, Any]) -> str:
    cloud = recipe.get("cloud") or {}
    if cloud.get("mode") == "edge_only":
        return "The drafter decodes alone: this is not the target's text."
    reasons = {
        "late responses are replaced by draft tokens": cloud.get("provisional"),
        "confident drafts are not verified": cloud.get("gates"),
        "the drafter continues alone if the cloud is lost": cloud.get("on_loss") == "edge",
        "draft distributions are sent incompletely": cloud.get("q_rows", "float32") != "float32",
    }
    causes = [reason for reason, applies in reasons.items() if applies]
    return f"Not the target's distribution: {', and '.join(causes)}." if causes else CHANGED


def tiles(lanes: Mapping[str, Lane]) -> dict[str, tuple[str, str]]:
    lane = next(iter(lanes.values()))
    m = lane.metrics
    ratio = lane_speedup(lanes)
    device = "" if lane.memory.device is None else f" · device {_size(lane.memory.device)}"
    return {
        "acceptance": (
            percent(m.acceptance_rate),
            _acceptance_note(m),
        ),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (number(m.tokens_per_second, 1), f"{m.tokens} tokens, without prefill"),
        "ttft": (_milliseconds(m.ttft_s), "from the worker's start"),
        "memory": (
            _size(lane.memory.process),
            f"weights {_size(lane.weights)} · KV {_size(lane.memory.kv)}{device}",
        ),
        "speedup": (
            NOTHING if ratio is None else f"{ratio:.2f}×",
            "no baseline measured" if ratio is None else "against AR decoding",
        ),
    }


def _acceptance_note(m: Metrics) -> str:
    if not m.drafted:
        return "nothing drafted"
    unverified = f" · {m.unverified} unverified" if m.unverified else ""
    return f"{m.accepted} of {m.drafted - m.unverified_drafted} drafted · α {number(m.alpha, 2)}{unverified}"


def _tokens_per_pass(lane: Lane) -> tuple[str, str]:
    """Return the figure and the number of passes that were executed."""
    m = lane.metrics
    if mode(lane.recipe) == "edge_only":
        return NOTHING, f"{m.decode_steps} passes of the drafter, none of the target"
    return number(m.tokens_per_target_pass, 2), f"{m.target_passes} target passes"


def lane_speedup(lanes: Mapping[str, Lane], name: str = SPEC) -> float | None:
    """Tokens per second of a lane relative to the AR lane, once both have ended."""
    if name == PLAIN or not all(lane in lanes and lanes[lane].ended for lane in (name, PLAIN)):
        return None
    speed, baseline = (lanes[lane].metrics.tokens_per_second for lane in (name, PLAIN))
    return speed / baseline if speed and baseline else None


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        f"| {row.gamma} | {row.tokens_per_pass:.2f} | {row.speedup:.2f}× | {row.low:.2f}–{row.high:.2f} |"
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    return "\n".join(
        [
            f"**Preflight of {estimate.recipe.method}:** {estimate.advice}. α is {estimate.alpha:.2f}. "
            f"A draft token costs {estimate.c:.2f} AR steps, a pass over {last} rows {estimate.v[last]:.2f}. "
            f"Weights take {_size(estimate.weight_bytes)}, keys and values {_size(estimate.kv_bytes)} "
            "per 1,000 tokens. Nothing was generated.",
            "",
            "| γ | tokens per pass | expected speed-up | 95 % |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def number(x: float | None, digits: int) -> str:
    return NOTHING if x is None else f"{x:.{digits}f}"


def percent(x: float | None) -> str:
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
