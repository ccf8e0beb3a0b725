"""What the page says of a lane or of two: titles, badges, tiles, the verdict. Every figure comes from the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.metrics import Metrics
from specdemo.preflight import Preflight

SPEC, PLAIN = "spec", "ar"
NOTHING = "–"


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
        return "lossy", "This rule changes the target's distribution at these settings."
    law = "The text has the target's own distribution."
    if lane.bit_equal:
        return "bit-equal here", (
            f"{law} On this machine a row's logits are the same to the last bit in any pass, so greedy text is that of "
            "plain decoding, token by token."
        )
    return "exact", f"{law} Same law as plain decoding; at temperature 0 a near-tie may flip, as rounding decides."


def title(recipe: Mapping[str, Any]) -> str:
    """What a lane is, in a few words."""
    if recipe["method"] == "ar":
        return "target only"
    if recipe["method"] == "beam":
        return f"{recipe['num_beams']} beams"
    policy, rule = recipe.get("policy", "fixed"), recipe.get("rule", "rejection")
    length = f"γ {recipe['gamma']}" if policy == "fixed" else f"γ by {policy}"
    return f"{recipe['method']}, {length}" + ("" if rule == "rejection" else f", {rule}")


def tiles(lanes: Mapping[str, Lane]) -> dict[str, tuple[str, str]]:
    """Value and footnote of each tile, for the first lane; a dash where there is nothing to say."""
    lane = next(iter(lanes.values()))
    m = lane.metrics.as_dict()
    compared = speedup(lanes)
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


def speedup(lanes: Mapping[str, Lane]) -> float | None:
    """Tokens per second of the speculative lane over those of the plain lane, once both are measured."""
    if not all(name in lanes and lanes[name].ended for name in (SPEC, PLAIN)):
        return None
    fast, plain = (lanes[name].metrics.as_dict()["tokens_per_second"] for name in (SPEC, PLAIN))
    return fast / plain if fast and plain else None


def verdict(lanes: Mapping[str, Lane]) -> str:
    """Did it help, and where did the time go? Empty when nothing was compared.

    A round is priced in plain steps, so the words add up: speed-up = tokens won per round / plain steps it took.
    """
    ratio = speedup(lanes)
    if ratio is None:
        return ""
    spec, plain = (lanes[name].metrics.as_dict() for name in (SPEC, PLAIN))
    if lanes[SPEC].recipe["method"] == "beam":
        return (
            f"The search ran at {ratio:.2f}× the speed of plain decoding: {spec['tokens_per_second']:.1f} against "
            f"{plain['tokens_per_second']:.1f} tokens per second. It is after a probable text, not a fast one."
        )
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
    if lanes[SPEC].recipe["temperature"] == 0 and lanes[SPEC].exact:
        words.append(_sameness(lanes[SPEC], lanes[PLAIN]))
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
