"""Did it help, where did the time go, what was to be expected, and is the text the same? In words, from the trace.

Knows lanes; no gradio, no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specdemo.core.theory import expected_tokens, walltime_improvement
from specdemo.core.theory import speedup as cost_model
from specdemo.drafters import draft_shape
from specdemo.ui.labels import ALONE, PLAIN, SPEC, Lane, mode, percent, speedup, title

FAR = "Most of a round is the way to the cloud and back: try a longer draft, or let the cloud decode by itself."
NEAR_TIE = 0.05  # nats between the two likeliest tokens: what rounding in bfloat16 may turn round


def verdict(lanes: Mapping[str, Lane]) -> str:
    """Who won by how much, and why. Empty when nothing was compared.

    A round is priced in plain steps, so the words add up: speed-up = tokens won per round / plain steps it took.
    """
    ratio = speedup(lanes)
    if ratio is None:
        return ""
    spec, plain = (lanes[name].metrics.as_dict() for name in (SPEC, PLAIN))
    others = [
        f"{title(lane.recipe)} ran at {other:.2f}× plain decoding."
        for name, lane in lanes.items()
        if name not in (SPEC, PLAIN) and (other := speedup(lanes, name)) is not None
    ]
    if lanes[SPEC].recipe["method"] == "beam":
        words = (
            f"The search ran at {ratio:.2f}× the speed of plain decoding: {spec['tokens_per_second']:.1f} against "
            f"{plain['tokens_per_second']:.1f} tokens per second. It is after a probable text, not a fast one."
        )
        return " ".join([words, *others])
    if mode(lanes[SPEC].recipe) in ALONE:
        words = (
            f"{title(lanes[SPEC].recipe).capitalize()}, at {ratio:.2f}× the speed of plain decoding here: "
            f"{spec['tokens_per_second']:.1f} against {plain['tokens_per_second']:.1f} tokens per second."
        )
        return " ".join([words, *others])
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
        _promised(lanes[SPEC], draft, verify, host),
    ]
    if ratio < 0.98:
        far = spec.get("remote", {}).get("rtt_s", 0.0) > spec["verify_s"] / 2
        words.append(FAR if far else _advice(spec, draft, verify, host))
    return " ".join(filter(None, [*words, *others]))


def _promised(lane: Lane, draft: float, verify: float, host: float) -> str:
    """Theorem 3.8 (2211.17192), and the same with what verifying and the host cost here."""
    if draft_shape(lane.recipe["method"]) == "forest":  # the theorem is about chains
        return ""
    spec = lane.metrics.as_dict()
    alpha = spec["mean_beta" if lane.recipe.get("rule", "rejection") == "rejection" else "alpha"]
    rounds = spec["steps"] - 1
    if alpha is None:
        return ""
    drafted = spec["drafted"] / rounds
    c = draft / drafted
    theorem = walltime_improvement(alpha, drafted, c)
    model = cost_model(expected_tokens(alpha, drafted), drafted, c, verify, host)
    return (
        f"With α {alpha:.2f}, {drafted:.1f} drafted per round and c {c:.2f}, Theorem 3.8 promises "
        f"{theorem:.2f}×, and with what verifying and the rest cost here {model:.2f}×."
    )


def _advice(spec: Mapping[str, Any], draft: float, verify: float, host: float) -> str:
    if not spec["drafted"]:
        return "Nothing was drafted: the text held no context that the drafter knew."
    if spec["acceptance_rate"] < 0.5:
        return f"Only {percent(spec['acceptance_rate'])} of the drafted tokens were accepted: try a shorter draft."
    if draft >= max(verify, host):
        return "The drafter is too dear for this target: try a shorter draft, a smaller drafter, or NASD."
    if verify > 1.3:
        return "Verifying several tokens costs this device clearly more than one: try a shorter draft."
    return "The rounds cost more than they won: try a shorter draft or a larger target."


def sameness(lanes: Mapping[str, Lane]) -> dict[str, str] | None:
    """Whether the texts are the same, where they have to be: a badge, its tone (good, even, bad), and why.

    They have to be at temperature 0, and with the coupled rule at any temperature, of lanes with an exact recipe. None
    where nothing of the kind was run.
    """
    plain = lanes.get(PLAIN)
    if plain is None or not plain.ended or not plain.lines:
        return None
    for name, lane in lanes.items():
        if name == PLAIN or not lane.ended or not lane.exact or lane.recipe.get("method") == "beam":
            continue
        if not any("i" in line for line in lane.lines) or not _must_agree(lane.recipe, plain.recipe):
            continue
        ours, theirs = lane.tokens, plain.tokens
        if ours != theirs:
            return _parting(lane, plain)
        same = f"{len(ours)} tokens, one by one those of plain decoding"
        return {"badge": "identical text", "tone": "good", "why": f"The texts are the same: {same}."}
    return None


def _must_agree(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Same target, same law, and nothing left to chance but what both share."""
    alike = ("pair", "target", "temperature", "top_k", "top_p", "seed", "max_tokens", "quantization", "dtype")
    if any(ours.get(name) != theirs.get(name) for name in alike):
        return False
    return ours.get("temperature") == 0 or ours.get("rule") == theirs.get("rule") == "coupled"


def _parting(lane: Lane, plain: Lane) -> dict[str, str]:
    """Where the texts part, and what the target thought of it."""
    ours, theirs = lane.tokens, plain.tokens
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    badge = f"differs at token {first + 1}"
    where = f"The texts part at token {first + 1}"
    top = _law_at(plain, first) or _law_at(lane, first)
    if len(top) > 1:
        (a, p), (b, q) = top[:2]
        where += f", where the target gave {a!r} {p:.4f} and {b!r} {q:.4f}"
        if lane.recipe.get("temperature") == 0 and math.log(p / q) > NEAR_TIE:
            return {"badge": badge, "tone": "bad", "why": f"{where}: no near-tie, so this is a fault."}
    if lane.bit_equal and not mode(lane.recipe):
        return {"badge": badge, "tone": "bad", "why": f"{where}, which is a fault, since rows are bit-equal here."}
    return {"badge": badge, "tone": "even", "why": f"{where}: a near-tie that rounding decided."}


def _law_at(lane: Lane, place: int) -> list[tuple[str, float]]:
    """The likeliest tokens of the target's law for the token at `place`, if the trace has them."""
    at = 0
    names: dict[int, str] = {}
    for line in lane.lines:
        if "i" not in line:
            continue
        names.update({int(token): text for token, text in line.get("texts", {}).items()})
        if place < at + len(line["tokens"]):
            distributions, offset = line.get("laws"), place - at
            if not distributions or offset > len(line["accepted"]):
                return []
            row = line["accepted"][offset - 1] + 1 if offset else 0
            return [(names.get(token, f"id {token}"), p) for token, p in distributions[row]["top"]]
        at += len(line["tokens"])
    return []
