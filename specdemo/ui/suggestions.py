"""Advice after a run without gain: the reason from its figures, and changes as buttons."""

from __future__ import annotations

from typing import Any

from specdemo.core.theory import LengthEstimate
from specdemo.drafters import METHODS
from specdemo.ui.lane import Lane

Suggestion = dict[str, Any]  # label, and what the button does: `press`: a turn that is run, `example`, `set` settings
PRESS_REPEAT: Suggestion = {"label": "Repeat ×5", "press": "repeat"}
CHOOSE_BASELINE: Suggestion = {"label": "Turn speculation off", "set": {"method": "ar"}}
DRAFT_AT_THE_EDGE: Suggestion = {
    "label": "Use draft on the bundled pair",
    "example": "Function",
    "set": {"method": "draft"},
}
REPETITIVE = {"smollm2-135m": "Rewrite a text", "bundled": "Unit tests"}  # by pair: an example that gains
_SLOW_DRAFT = 0.2  # share of a baseline step


def nothing_drafted(lane: Lane) -> str:
    """Return the reason for a lane without drafts; empty if it drafted."""
    if lane.metrics.drafted:
        return ""
    method = METHODS.get(lane.recipe["method"])
    copies = method is not None and method.copies
    cause = "no phrase of the text fits" if copies else "policy or token limit allowed no guess"
    return f"Nothing was guessed: {cause}."


def rarely_drafts(lane: Lane) -> bool:
    return lane.metrics.drafted < lane.metrics.decode_steps


def no_gain(lane: Lane, checking: str, drafting: float) -> str:
    """Return the reason for a small gain; `checking`: cost of a pass in words, `drafting`: in passes of the target."""
    m = lane.metrics
    guesses = f"{m.accepted} of {m.drafted} guesses were kept, and {checking}."
    return f"{guesses} Guessing takes another {drafting:.2f}." if drafting >= _SLOW_DRAFT else guesses


def at_a_time(gamma: int) -> str:
    return f"{gamma} guess{'' if gamma == 1 else 'es'} at a time"


def suggestions(
    lane: Lane, tone: str, better: LengthEstimate | None, *, linked: bool, decided: bool
) -> list[Suggestion]:
    """Return at most two changes, the most useful first."""
    repeat = [] if decided else [PRESS_REPEAT]
    if tone == "good":
        return repeat
    if linked and rarely_drafts(lane):
        return [DRAFT_AT_THE_EDGE, *repeat]
    if better and better.gamma:
        return [{"label": f"Try {at_a_time(better.gamma)}", "set": {"gamma": better.gamma}}, *repeat]
    if decided and tone == "bad":
        return [CHOOSE_BASELINE]
    title = REPETITIVE.get(lane.recipe.get("pair") or "")
    if title is None or linked:
        return repeat
    return [{"label": f"Try a text that repeats: {title}", "example": title}, *repeat]
