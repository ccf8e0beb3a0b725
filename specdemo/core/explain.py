"""Labels, styles and explanations of token outcomes, shared by terminal, tooltip, inspector and SVG export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specdemo.core.step import Outcome, Step


@dataclass(frozen=True)
class Style:
    """Appearance of a token besides its colour, which is never the only signal."""

    label: str
    ansi: str = ""
    decoration: str = ""
    italic: bool = False


STYLES = {
    Outcome.ACCEPTED: Style("accepted", "\x1b[32m"),
    Outcome.REJECTED: Style("rejected", "\x1b[31;9m", "line-through"),
    Outcome.IGNORED: Style("not tested", "\x1b[90;9m", italic=True),
    Outcome.UNVERIFIED: Style("unverified", "\x1b[33;3m", italic=True),
    Outcome.CORRECTION: Style("correction", "\x1b[34;4m", "underline"),
    Outcome.BONUS: Style("bonus", "\x1b[36;4m", "underline"),
    Outcome.PLAIN: Style("plain"),
}


class Reason(Enum):
    """Explanation templates. Placeholders: p, q, ratio (p/q), draw."""

    MATCHED = "Accepted: the target sampled the same token."
    MISMATCHED = "Rejected: the target sampled another token."
    COUPLED = "Accepted: with the shared noise, the target sampled the same token."
    DECOUPLED = "Rejected: with the shared noise, the target sampled another token."
    TOP = "Accepted: it is the target's most probable token."
    NOT_TOP = "Rejected: it is not the target's most probable token."
    RULE_ACCEPTED = "Accepted by the rule without a random draw: p = {p}, q = {q}."
    RULE_REJECTED = "Rejected by the rule without a random draw: p = {p}, q = {q}."
    SIBLING_ACCEPTED = "Accepted: the draw {draw} is below its share of the siblings' residual."
    SIBLING_REJECTED = "Rejected: the draw {draw} is above its share of the siblings' residual."
    CERTAIN = "Accepted for any draw: p/q = {ratio} is at least 1."
    BELOW = "Accepted: the draw {draw} is below p/q = {ratio}."
    ABOVE = "Rejected: the draw {draw} is above p/q = {ratio}."
    NOT_TESTED = "Not tested: an earlier draft token was rejected."
    LATE_ACCEPTED = "Accepted by a late response of the cloud."
    LATE_REJECTED = "Rejected by a late response of the cloud."
    DROPPED = "Discarded without verification."
    PROVISIONAL = "Unverified: the cloud was late, so the first draft token was committed."
    GATE = "Unverified: the drafter was confident, so the cloud was not queried."
    ALONE = "Unverified: the connection is lost, so the drafter decodes alone."
    RESIDUAL = "Sampled from the residual max(p − q, 0), normalized."
    CORRECTION = "Chosen by the target where a draft token was rejected."
    BONUS = "All draft tokens were accepted; the same target pass gave this token."
    PLAIN = "Chosen by the target; the draft was empty."
    SEARCHED = "All beams agree on this token."


REASON_INDEX = {reason: i for i, reason in enumerate(Reason)}
FATES = {"confirmed": "The cloud confirmed it later.", "overruled": "The cloud later chose another token."}
FALLBACKS = {"provisional": Reason.PROVISIONAL, "gate": Reason.GATE, "alone": Reason.ALONE}


def explain(step: Step, node: int | None, recipe: Mapping[str, Any]) -> str:
    """Explain the outcome of a draft node; without a node, the origin of the target's token."""
    text = reason_of(step, node, recipe).value
    if node is None:
        return text
    p, q = step.verdict.p[node], draft_prob(step, node)
    ratio = None if p is None else p / q if q else 0.0
    figures = {"p": p, "q": q, "ratio": ratio, "draw": step.verdict.draw[node]}
    return text.format(**{name: figure(value) for name, value in figures.items()})


def reason_of(step: Step, node: int | None, recipe: Mapping[str, Any]) -> Reason:
    if node is None:
        return _reason_of_target_token(step, recipe)
    verdict, accepted = step.verdict, node in step.verdict.accepted
    if step.fallback:
        return FALLBACKS[step.fallback] if accepted else Reason.DROPPED
    if verdict.p[node] is None:
        return Reason.LATE_ACCEPTED if accepted else Reason.LATE_REJECTED
    if verdict.beta[node] is None:
        return Reason.NOT_TESTED
    rule, draw = recipe.get("rule", "rejection"), verdict.draw[node]
    if rule == "match":
        return Reason.MATCHED if accepted else Reason.MISMATCHED
    if rule == "coupled":
        return Reason.COUPLED if accepted else Reason.DECOUPLED
    if recipe.get("temperature") == 0 or rule == "top1":
        return Reason.TOP if accepted else Reason.NOT_TOP
    if draw is None:
        return Reason.RULE_ACCEPTED if accepted else Reason.RULE_REJECTED
    parents = step.draft.parents
    if any(parents[m] == parents[node] and verdict.beta[m] is not None for m in range(node)):
        return Reason.SIBLING_ACCEPTED if accepted else Reason.SIBLING_REJECTED
    if accepted and verdict.p[node] >= draft_prob(step, node):
        return Reason.CERTAIN
    return Reason.BELOW if accepted else Reason.ABOVE


def _reason_of_target_token(step: Step, recipe: Mapping[str, Any]) -> Reason:
    if step.fallback:
        return FALLBACKS[step.fallback]
    match step.kind:
        case Outcome.BONUS:
            return Reason.BONUS
        case Outcome.PLAIN:
            return Reason.SEARCHED if step.searched else Reason.PLAIN
    last = step.verdict.accepted[-1] if step.verdict.accepted else -1
    sampled = recipe.get("rule", "rejection") == "rejection" and recipe.get("temperature") != 0
    one_child = step.draft.parents.count(last) == 1
    adjusted = not recipe.get("skip_sample_adjustment")
    return Reason.RESIDUAL if sampled and one_child and adjusted else Reason.CORRECTION


def draft_prob(step: Step, node: int) -> float:
    """Draft probability of a node; 1 for a point mass."""
    return 1.0 if step.draft.token_probs is None else step.draft.token_probs[node]


def figure(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:.1e}" if 0 < abs(x) < 0.001 else f"{x:.3f}"
