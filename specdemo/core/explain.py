"""Labels, styles and explanations of token outcomes, shared by page and terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specdemo.core.rules import DecidedBy, rule_traits
from specdemo.core.step import Outcome, Source, Step


@dataclass(frozen=True)
class Style:
    """Appearance of an outcome besides its colour, which is never the only signal."""

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
    Outcome.UNKNOWN: Style("not reported", decoration="underline dotted"),
}


def exact_label(recipe: Mapping[str, Any], remote: Mapping[str, float]) -> str:
    """Return `exact`, with the service that verified the run, or that another engine reported it.

    `remote`: totals of the link.
    """
    cloud = recipe.get("cloud") or {}
    if recipe.get("external"):
        return "reported by engine"
    if remote.get("numerics"):
        return "exact, text may differ"
    verified = cloud.get("remote") and cloud.get("mode") != "edge_only"
    addresses = cloud["remote"].split() if verified else ()
    services = f"service{'s' * (len(addresses) > 1)} at {', '.join(addresses)}"
    return f"exact, verified by the {services}" if verified else "exact"


def failover_note(step: Step) -> str:
    """Return a sentence if another service continued in this step."""
    link, replica = step.verdict.link, step.verdict.replica or "another service"
    if link is None or not link.switched:
        return ""
    return f"Failover: {replica} continues after {link.gap_s or 0:.2f} s, and read {link.reread or 0:.0f} tokens again."


class Reason(Enum):
    """Templates that explain outcomes. Placeholders are fields of `Decision`."""

    MATCHED = "Accepted: the target sampled the same token."
    MISMATCHED = "Rejected: the target sampled another token."
    COUPLED = "Accepted: with the shared noise, the target sampled the same token."
    DECOUPLED = "Rejected: with the shared noise, the target sampled another token."
    TOP = "Accepted: it is the target's most probable token."
    NOT_TOP = "Rejected: it is not the target's most probable token."
    NOT_TOP_RANKED = "Rejected: it is the target's choice number {rank}, with {p} against {best}."
    RULE_ACCEPTED = "Accepted without a random draw: p = {p} reaches the rule's bound {bound}."
    RULE_REJECTED = "Rejected without a random draw: p = {p} does not reach the rule's bound {bound}."
    SIBLING_ACCEPTED = "Accepted: the draw {draw} is below its share {bound} of the siblings' residual."
    SIBLING_REJECTED = "Rejected: the draw {draw} is not below its share {bound} of the siblings' residual."
    CERTAIN = "Accepted for any draw: p/q is at least 1."
    IMPOSSIBLE = "Rejected for any draw: the target never samples this token here."
    BELOW = "Accepted: the draw {draw} is below p/q = {bound}."
    ABOVE = "Rejected: the draw {draw} is not below p/q = {bound}."
    LENIENT_BELOW = "Accepted: the draw {draw} is below min(1, p/(l q)) = {bound}. l is the threshold."
    LENIENT_ABOVE = "Rejected: the draw {draw} is not below min(1, p/(l q)) = {bound}. l is the threshold."
    LENIENT_NEAR = "Accepted: its probability reaches the threshold times that of the most probable token."
    LENIENT_FAR = "Rejected: its probability is below the threshold times that of the most probable token."
    BLOCK_ACCEPTED = "Accepted: the draw {draw} is below {bound}. The last draw below its bound decides."
    BLOCK_RESCUED = "Accepted, although the draw {draw} is not below {bound}. The last draw below its bound decides."
    BLOCK_REJECTED = "Rejected: the draw {draw} is not below {bound}. No later draw is below its bound either."
    NOT_TESTED = "Not tested: an earlier draft token was rejected."
    NOT_NEEDED = "Not tested: another continuation was accepted at this position."
    AFTER_END = "Not tested: the text ended before it."
    LATE_ACCEPTED = "Accepted by a late response of the cloud."
    LATE_REJECTED = "Discarded: a late response of the cloud accepted fewer tokens."
    DROPPED = "Discarded without verification."
    PROVISIONAL = "Unverified: the cloud was late, so the first draft token was committed."
    GATE = "Unverified: the gates accepted the draft, so the cloud was not queried."
    ALONE = "Unverified: the connection is lost, so the drafter decodes alone."
    EDGE_ONLY = "Unverified: the drafter decodes alone in this mode."
    RESIDUAL = "Sampled from the residual max(p − q, 0), normalised."
    LENIENT_RESIDUAL = "Sampled from max(p − l q, 0), normalised. l is the threshold."
    BLOCK_RESIDUAL = "Sampled from the residual max(w p − q, 0), normalised. w is the weight of the accepted tokens."
    SIBLINGS_RESIDUAL = "Sampled from the residual that the rejected siblings left of p."
    CORRECTION = "Chosen by the target where a draft token was rejected."
    BONUS = "All draft tokens were accepted; the same target pass gave this token."
    PLAIN = "Chosen by the target; the draft was empty."
    SEARCHED = "All beams agree on this token."
    REPORTED_ACCEPTED = "Drafted and accepted, as the counts of the engine show."
    UNREPORTED = "The counts of the engine do not show how this token was chosen."


REASON_INDEX = {reason: i for i, reason in enumerate(Reason)}
FATES = {"confirmed": "The cloud confirmed it later.", "overruled": "The cloud later chose another token."}
UNVERIFIED = {Source.PROVISIONAL: Reason.PROVISIONAL, Source.GATE: Reason.GATE, Source.ALONE: Reason.ALONE}


_REASONS = {  # templates for accepted and rejected tokens
    DecidedBy.SAMPLE: (Reason.MATCHED, Reason.MISMATCHED),
    DecidedBy.SHARED_DRAW: (Reason.COUPLED, Reason.DECOUPLED),
}


@dataclass(frozen=True, slots=True)
class Decision:
    """Figures that decided about a draft node; `None` if irrelevant or unknown.

    With `rank`, the most probable token, of probability `best`, decides. Otherwise `draw`, or without a draw `p`, was
    compared with `bound`.
    """

    p: float | None = None
    q: float | None = None  # None for a point mass
    draw: float | None = None
    bound: float | None = None
    rank: int | None = None
    best: float | None = None


def decision_of(step: Step, node: int, recipe: Mapping[str, Any]) -> Decision:
    verdict, draft = step.verdict, step.draft
    q = None if draft.token_probs is None else draft.token_probs[node]
    if takes_most_probable(recipe):
        top = verdict.target_top[draft.parents[node] + 1].top if verdict.target_top else ()
        if not verdict.rank or not top:
            return Decision(q=q)
        return Decision(dict(top).get(draft.tokens[node]), q, rank=verdict.rank[node], best=top[0][1])
    bound = verdict.bound[node] if verdict.bound else None
    return Decision(verdict.p[node], q, verdict.draw[node], bound)


def takes_most_probable(recipe: Mapping[str, Any]) -> bool:
    """Return True for greedy decoding without blocks, and rules that accept only the most probable token."""
    rule = rule_traits(recipe)
    return rule.decided_by is DecidedBy.TOP_TOKEN or (recipe.get("temperature") == 0 and not rule.chains_only)


def explain(step: Step, node: int | None, recipe: Mapping[str, Any]) -> str:
    """Explain the outcome of a draft node, or the origin of the target's token."""
    text = reason_of(step, node, recipe).value
    if node is None:
        return text
    decision = decision_of(step, node, recipe)
    figures = {name: figure(getattr(decision, name)) for name in ("p", "q", "draw", "bound", "best")}
    return text.format(**figures, rank=decision.rank)


def reason_of(step: Step, node: int | None, recipe: Mapping[str, Any]) -> Reason:
    if node is None:
        return _reason_of_target_token(step, recipe)
    verdict, accepted = step.verdict, node in step.verdict.accepted
    if step.unverified:
        return UNVERIFIED[verdict.source] if accepted else Reason.DROPPED
    if step.draft.undisclosed is not None:
        return Reason.REPORTED_ACCEPTED
    if verdict.p[node] is None:
        return Reason.LATE_ACCEPTED if accepted else Reason.LATE_REJECTED
    if verdict.beta[node] is None:
        return _reason_of_untested(step, node)
    return _reason_of_decided(step, node, recipe, accepted)


def _reason_of_decided(step: Step, node: int, recipe: Mapping[str, Any], accepted: bool) -> Reason:
    verdict, rule = step.verdict, rule_traits(recipe)
    if reasons := _REASONS.get(rule.decided_by):
        return reasons[0 if accepted else 1]
    if rule.chains_only:
        draw, bound = verdict.draw[node], verdict.bound[node] if verdict.bound else None
        passed = draw is not None and bound is not None and draw < bound
        return Reason.BLOCK_ACCEPTED if passed else Reason.BLOCK_RESCUED if accepted else Reason.BLOCK_REJECTED
    if takes_most_probable(recipe):
        if rule.lenient and verdict.p[node] != 1:  # p is one-hot
            return Reason.LENIENT_NEAR if accepted else Reason.LENIENT_FAR
        if accepted:
            return Reason.TOP
        ranked = decision_of(step, node, recipe)
        return Reason.NOT_TOP_RANKED if ranked.rank and ranked.p is not None else Reason.NOT_TOP
    if rule.lenient:
        return Reason.LENIENT_BELOW if accepted else Reason.LENIENT_ABOVE
    return _reason_of_tested(step, node, accepted)


def _reason_of_tested(step: Step, node: int, accepted: bool) -> Reason:
    verdict, parents = step.verdict, step.draft.parents
    bound = verdict.bound[node] if verdict.bound else None
    if verdict.draw[node] is None:
        return Reason.RULE_ACCEPTED if accepted else Reason.RULE_REJECTED
    earlier = range(parents[node] + 1, node)  # children follow their parent
    if any(parents[m] == parents[node] and verdict.beta[m] is not None for m in earlier):
        return Reason.SIBLING_ACCEPTED if accepted else Reason.SIBLING_REJECTED
    if accepted:
        return Reason.CERTAIN if bound == 1 else Reason.BELOW
    return Reason.IMPOSSIBLE if bound == 0 else Reason.ABOVE


def _reason_of_untested(step: Step, node: int) -> Reason:
    verdict, draft = step.verdict, step.draft
    path = draft.path(node)
    if any(verdict.beta[above] is not None and above not in verdict.accepted for above in path):
        return Reason.NOT_TESTED
    first = next(above for above in path if verdict.beta[above] is None)
    siblings = [other for other, parent in enumerate(draft.parents) if parent == draft.parents[first]]
    return Reason.NOT_NEEDED if any(other in verdict.accepted for other in siblings) else Reason.AFTER_END


def _reason_of_target_token(step: Step, recipe: Mapping[str, Any]) -> Reason:
    if (recipe.get("cloud") or {}).get("mode") == "edge_only":
        return Reason.EDGE_ONLY
    if step.unverified:
        return UNVERIFIED[step.verdict.source]
    match step.kind:
        case Outcome.BONUS:
            return Reason.BONUS
        case Outcome.PLAIN:
            return Reason.SEARCHED if step.searched else Reason.PLAIN
        case Outcome.UNKNOWN:
            return Reason.UNREPORTED
    if step.draft.undisclosed is not None:
        return Reason.CORRECTION
    last = step.verdict.accepted[-1] if step.verdict.accepted else -1
    rule = rule_traits(recipe)
    if not rule.needs_rows or recipe.get("temperature") == 0 or recipe.get("skip_sample_adjustment"):
        return Reason.CORRECTION
    if rule.chains_only:
        return Reason.BLOCK_RESIDUAL
    if rule.lenient:
        return Reason.LENIENT_RESIDUAL
    return Reason.RESIDUAL if step.draft.parents.count(last) == 1 else Reason.SIBLINGS_RESIDUAL


def figure(x: float | None) -> str:
    if x is None:
        return "–"
    return "< 0.001" if 0 < x < 0.001 else f"{x:.3f}"


def explain_engine(environment: Mapping[str, Any]) -> str:
    """Name the engine of a run."""
    engine, threads = str(environment.get("engine", "")), environment.get("threads", 1)
    name, _, note = engine.partition(": ")
    if name == "native":
        parts = f"native CPU engine, {threads} thread{'' if threads == 1 else 's'}", note
        return ", ".join(filter(None, parts))
    name, _, reason = engine.partition(": no native engine, ")
    return f"torch engine, several times slower than the native CPU engine: {reason}" if reason else name
