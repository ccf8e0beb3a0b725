"""Comparison of the texts of two lanes, in words: equal or not, and why they may or must not differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdemo.core.events import StepEvent
from specdemo.core.explain import exact_label
from specdemo.core.options import Option
from specdemo.core.rules import rule_traits
from specdemo.core.step import common_prefix
from specdemo.recipe import TEXT_OPTIONS
from specdemo.ui.lane import BASELINE, Lane, mode

NEAR_TIE = 0.05  # nats between the two most probable tokens: bfloat16 rounding
_WEIGHT_FORMAT = {"quantization", "activations"}
_EARLY = ("cancelled", "error")  # ends within a text
EXACT = "Each text is as probable as from the large model alone."
CHANGED = "With these settings, the rule changes the text of the large model."
SAME_TEXT, OTHER_DRAW = "same text", "other random text"  # badges


@dataclass(frozen=True)
class TextComparison:
    """Badge and sentence about a text compared with the baseline's."""

    badge: str
    why: str
    tone: str  # good, even or bad for texts that must agree, otherwise empty
    equal: int  # number of equal tokens at the start
    differing: tuple[str, ...]  # text options, and "prompt"


def compare_texts(lane: Lane, baseline: Lane) -> TextComparison:
    differing = differing_inputs(lane, baseline)
    equal = common_prefix(lane.tokens, baseline.tokens)
    badge, why, tone = _compared(lane, baseline, differing, equal)
    if not _exact(lane) or differing or not _must_agree(lane, baseline):
        tone = ""
    reported = "reported by engine, " if lane.external and badge != guarantee(lane)[0] else ""
    return TextComparison(reported + badge, why, tone, equal, differing)


def _compared(lane: Lane, baseline: Lane, differing: Sequence[str], equal: int) -> tuple[str, str, str]:
    exact, greedy = _exact(lane), lane.recipe.get("temperature") == 0
    first = f"differs at token {equal + 1}"
    if lane.tokens == baseline.tokens and "prompt" not in differing:
        return SAME_TEXT, f"All {equal} tokens equal those of the baseline.", "good"
    if differing and (lane.external or exact):
        names = ", ".join(differing).replace("_", " ")
        return "other settings", f"The texts may differ, since these differ: {names}.", "even"
    if lane.external and greedy:
        return first, "Engines round differently, which decides near-ties.", "even"
    if not exact:
        return *guarantee(lane), "even"
    if not _must_agree(lane, baseline):
        return OTHER_DRAW, "Both runs roll their own dice, so the words differ.", "even"
    if any(text.end and text.end.reason in _EARLY and len(text.tokens) == equal for text in (lane, baseline)):
        return "same so far", f"A run ended early: its {equal} tokens are equal.", "even"
    nearest = (_top_tokens_at(baseline.steps, equal) or _top_tokens_at(lane.steps, equal))[:2]
    gave = " and ".join(f"{text!r} {p:.4f}" for text, p in nearest)
    where = f"from token {equal + 1} on" + (f", where the large model gave {gave}" if gave else "")
    apart = greedy and len(nearest) > 1 and nearest[0][1] > nearest[1][1] * math.exp(NEAR_TIE)
    if apart or (lane.bit_equal and not mode(lane.recipe)):
        return first, f"The texts differ {where}: this is an error, not a near-tie.", "bad"
    return first, f"The texts differ {where}: rounding decided a near-tie.", "even"


def _exact(lane: Lane) -> bool:
    return lane.exact and lane.recipe["method"] != "beam"


def compare_weight_formats(lane: Lane, plain: Lane) -> str:
    """Return how the greedy text of another form of the target compares; empty for other lanes."""
    compared = compare_texts(lane, plain)
    if not compared.differing or not _WEIGHT_FORMAT.issuperset(compared.differing) or lane.recipe.get("temperature"):
        return ""
    same = compared.badge.endswith(SAME_TEXT)
    return f", {SAME_TEXT}" if same else f", text differs from token {compared.equal + 1} on"


def compare_all_texts(lanes: Mapping[str, Lane]) -> dict[str, tuple[str, str, str]]:
    """Return badge, sentence and tone of each compared lane."""
    plain = lanes.get(BASELINE)
    if plain is None or not (plain.begun and plain.ended):
        return {}
    ended = {name: lane for name, lane in lanes.items() if name != BASELINE and lane.begun and lane.ended}
    compared = {name: compare_texts(lane, plain) for name, lane in ended.items() if lane.metrics.steps}
    return {name: (text.badge, text.why, text.tone) for name, text in compared.items()}


def compare_lengths(lanes: Mapping[str, Lane]) -> str:
    """Return a sentence if the texts cannot be compared by their times."""
    begun = {name: lane for name, lane in lanes.items() if lane.begun}
    if BASELINE not in begun:
        return ""
    if any("prompt" in differing_inputs(lane, begun[BASELINE]) for lane in begun.values()):
        return "The prompts differ: speeds and texts are not compared."
    if len({lane.metrics.tokens for lane in begun.values()}) < 2:
        return ""
    counts = " and ".join(str(lane.metrics.tokens) for lane in begun.values())
    return f"The texts differ in length ({counts} tokens), so tokens per second are compared."


def differing_inputs(lane: Lane, other: Lane) -> tuple[str, ...]:
    """Return differing text options, and "prompt"."""

    def value(recipe: Mapping[str, Any], option: Option) -> Any:
        chosen = recipe.get(option.name, option.default)
        return list(chosen) if isinstance(chosen, tuple) else chosen

    options = [
        name for name, option in TEXT_OPTIONS.items() if value(lane.recipe, option) != value(other.recipe, option)
    ]
    prompts = [header and header.prompt_tokens for header in (lane.header, other.header)]
    return (*options,) if prompts[0] == prompts[1] else (*options, "prompt")


def _must_agree(lane: Lane, baseline: Lane) -> bool:
    a, b = lane.recipe, baseline.recipe
    return a.get("temperature") == 0 or (rule_traits(a).shares_noise and a.get("rule") == b.get("rule"))


def _top_tokens_at(steps: tuple[StepEvent, ...], position: int) -> list[tuple[str, float]]:
    start = 0
    names: dict[int, str] = {}
    for event in steps:
        names.update(event.token_texts)
        offset = position - start
        if offset < len(event.step.tokens):
            top, accepted = event.step.verdict.target_top, event.step.verdict.accepted
            if not top or offset > len(accepted):
                return []
            row = accepted[offset - 1] + 1 if offset else 0
            return [(names.get(token, f"id {token}"), p) for token, p in top[row].top]
        start += len(event.step.tokens)
    return []


def guarantee(lane: Lane) -> tuple[str, str]:
    """Return a badge and a sentence about the exactness of the output."""
    if lane.external:
        return "reported by engine", "Text and counts are those of the other engine; this program verified nothing."
    if lane.recipe["method"] == "beam":
        return "search", "Beam search returns a probable text; it does not draw words at random."
    if not lane.exact:
        return "lossy", _lossy(lane.recipe)
    label, near_tie = exact_label(lane.recipe, lane.metrics.remote), "At temperature 0 rounding may flip a near-tie."
    if lane.metrics.remote.get("numerics"):
        near_tie = "The run changed to a service that rounds differently, which may flip a near-tie."
    elif label != "exact":
        near_tie = f"This is the claim of the service. {near_tie}"
    elif lane.bit_equal:
        near_tie = "Logits are equal to the last bit in passes of any size."
    return label, f"{EXACT} {near_tie}"


def _lossy(recipe: Mapping[str, Any]) -> str:
    cloud = recipe.get("cloud") or {}
    if cloud.get("mode") == "edge_only":
        return "The helper writes alone: this is not the text of the large model."
    reasons = {
        "late responses are replaced by guesses": cloud.get("provisional"),
        "confident guesses are not checked": cloud.get("gates"),
        "the helper continues alone if the cloud is lost": cloud.get("on_loss") == "edge",
        "probabilities of guesses are sent incompletely": cloud.get("q_rows", "float32") != "float32",
    }
    causes = [reason for reason, applies in reasons.items() if applies]
    return f"Not the text of the large model: {', and '.join(causes)}." if causes else CHANGED
