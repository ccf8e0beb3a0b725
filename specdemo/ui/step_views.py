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
from specdemo.ui.lane import PLAIN, Lane, model_name
from specdemo.ui.text_comparison import guarantee

_RESIDUALS = (Reason.RESIDUAL, Reason.SIBLINGS_RESIDUAL, Reason.BLOCK_RESIDUAL)
_FIGURES = tuple(field.name for field in fields(Decision))


def lane_view(name: str, lane: Lane) -> dict[str, Any]:
    """Return texts and facts for drawing a lane and its steps.

    `adjusts`: corrections are sampled from a residual; `scales`: the bound is a multiple of q; `residuals`: reasons of
    tokens from a residual.
    """
    recipe = lane.recipe
    rule, method = rule_traits(recipe), METHODS.get(recipe["method"])
    badge, why = guarantee(lane)
    if name == PLAIN and badge == "exact":
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
        "reasons": [reason.value for reason in Reason],
        "fates": FATES,
        "residuals": [REASON_INDEX[reason] for reason in _RESIDUALS],
        "styles": {outcome: asdict(style) for outcome, style in STYLES.items()},
    }


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
    nodes = [_node_view(step, node, recipe) for node in range(len(step.draft))]
    view = {"nodes": nodes, "why": REASON_INDEX[reason_of(step, None, recipe)]}
    return view | {"by": step.verdict.source} if step.unverified else view


def _node_view(step: Step, node: int, recipe: Mapping[str, Any]) -> dict[str, Any]:
    decision = decision_of(step, node, recipe)
    figures = {name: getattr(decision, name) for name in _FIGURES}
    if not takes_most_probable(recipe):
        figures["beta"] = step.verdict.beta[node]
    known = {name: value for name, value in figures.items() if value is not None}
    return {"state": step.outcome(node), "why": REASON_INDEX[reason_of(step, node, recipe)], **known}
