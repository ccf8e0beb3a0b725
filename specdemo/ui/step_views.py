"""Data of lanes and steps that their trace lines lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from specdemo.core.explain import (
    FATES,
    REASON_INDEX,
    STYLES,
    Decision,
    Reason,
    decision_of,
    reason_of,
    takes_most_probable,
)
from specdemo.core.rules import DecidedBy, rule_traits
from specdemo.core.step import Step
from specdemo.drafters import METHODS
from specdemo.ui.lane import BASELINE, Lane, model_name
from specdemo.ui.text_comparison import guarantee

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
