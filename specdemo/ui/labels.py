"""Texts about lanes for people: guarantee, tiles, preflight, and the summary of a comparison."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdemo.bench.table import markdown_table
from specdemo.core.events import StepEvent
from specdemo.core.explain import exact_label, explain_engine
from specdemo.core.formats import NOTHING, format_bytes, latency, number, percent
from specdemo.core.metrics import Metrics
from specdemo.core.options import Option
from specdemo.core.rules import rule_traits
from specdemo.core.step import common_prefix
from specdemo.core.theory import CostTerms, better_gamma, can_improve, expected_tokens, walltime_improvement
from specdemo.core.theory import speedup as cost_model
from specdemo.drafters import METHODS, draft_shape
from specdemo.preflight import Preflight
from specdemo.recipe import TEXT_OPTIONS
from specdemo.ui.lane import ALONE, PLAIN, SPEC, Lane, linked, mode, speed
from specdemo.ui.step_views import what_if

REPEAT = "confirm with Repeat"
DISABLE = "disable speculation (method ar)"
SMALLER_DRAFT = {
    "tree": "Each node of the tree costs drafting and verification: lower “Nodes per draft”",
    "lookahead": "Each guess adds a row to the pass: lower “Window, positions” or “Order n”",
}
_FORM = ("quantization", "activations")
NEAR_TIE = 0.05  # nats between the two most probable tokens: bfloat16 rounding
_EARLY = ("cancelled", "error")  # ends within a text
LONGEST_ADVISED = 16  # draft tokens
ENOUGH_PAIRS = 5  # equal speeds give 5 ratios on one side of 1 in 6 % of the repetitions
CHANGED = "This rule changes the target's distribution with these settings."


def escape_markdown(text: str) -> str:
    """Escape text of traces: an image in Markdown sends a request to another host."""
    return re.sub(r"(?=[\x00-\x7f])([^\w\s,.])", r"\\\1", text)


def link_papers(text: str) -> str:
    """Turn arXiv numbers into links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def guarantee(lane: Lane) -> tuple[str, str]:
    """Return a badge and a sentence about the exactness of the output."""
    if lane.external:
        return "reported by engine", "Text and counts are those of the other engine; this program verified nothing."
    if lane.recipe["method"] == "beam":
        return "search", "Beam search returns a probable text; it does not sample from the target."
    if not lane.exact:
        return "lossy", _lossy(lane.recipe)
    exact, label = "The text follows the target's distribution.", exact_label(lane.recipe, lane.metrics.remote)
    if lane.metrics.remote.get("numerics"):
        return label, f"{exact} The run changed to a service that rounds differently, which may flip a near-tie."
    if label != "exact":
        return label, f"{exact} This is the claim of the service. At temperature 0 rounding may flip a near-tie."
    if lane.bit_equal:
        return "exact", f"{exact} Logits are equal to the last bit in passes of any size."
    return "exact", f"{exact} At temperature 0 rounding may flip a near-tie."


def compare_texts(lanes: Mapping[str, Lane]) -> dict[str, tuple[str, str]]:
    """Return, for each lane besides the baseline, whether its text equals the baseline's, or why it need not."""
    baseline = lanes.get(PLAIN)
    if baseline is None or not (baseline.ended and baseline.begun):
        return {}
    ended = {name: lane for name, lane in lanes.items() if name != PLAIN and lane.ended and lane.begun}
    return {name: _text_badge(lane, baseline) for name, lane in ended.items() if lane.metrics.steps}


def _text_badge(lane: Lane, baseline: Lane) -> tuple[str, str]:
    badge, why = guarantee(lane)
    reported = f"{badge}, " if lane.external else ""
    differing = differing_inputs(lane, baseline)
    if lane.tokens == baseline.tokens and "prompt" not in differing:
        return f"{reported}same text", f"All {len(lane.tokens)} tokens equal the baseline's."
    lossy = not lane.exact or lane.recipe["method"] == "beam"
    if differing and (lane.external or not lossy):
        names = ", ".join(differing).replace("_", " ")
        return f"{reported}other settings", f"The texts may differ, since these differ: {names}."
    if lane.external and lane.recipe.get("temperature") == 0:
        first = common_prefix(lane.tokens, baseline.tokens) + 1
        return f"{reported}differs at token {first}", "Engines round differently, which decides near-ties."
    if lossy:
        return badge, why
    if _must_agree(lane, baseline):
        difference = _difference(lane, baseline)
        return difference["badge"], difference["why"]
    return "other random text", f"{why} Both runs draw their own random numbers, so the texts may differ."


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
    device = "" if lane.memory.device is None else f" · device {format_bytes(lane.memory.device)}"
    return {
        "acceptance": (percent(m.acceptance_rate), _acceptance_note(lane)),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (number(m.tokens_per_second, 1), f"{m.tokens} tokens, without prefill"),
        "ttft": (latency(m.ttft_s), "from the worker's start"),
        "memory": (
            format_bytes(lane.memory.process),
            f"weights {format_bytes(lane.weights)} · KV {format_bytes(lane.memory.kv)}{device}",
        ),
        "speedup": (
            NOTHING if ratio is None else f"{ratio_text(ratio)}×",
            "no baseline measured" if ratio is None else "total time" if linked(lanes) else "against AR decoding",
        ),
    }


def _acceptance_note(lane: Lane) -> str:
    m = lane.metrics
    unverified = f" · {m.unverified} unverified" if m.unverified else ""
    if not m.drafted:
        return f"nothing drafted{unverified}"
    alpha = "" if rule_traits(lane.recipe).chains_only else f" · α {number(m.alpha, 2)}"
    overlap = "" if lane.counted else f" · {_acceptance_label(lane)}"
    return f"{m.accepted} of {m.drafted - m.unverified_drafted} drafted{alpha}{overlap}{unverified}"


def _acceptance_label(lane: Lane) -> str:
    return f"{lane.acceptance_name} {number(lane.acceptance, 2)}"


def _tokens_per_pass(lane: Lane) -> tuple[str, str]:
    m = lane.metrics
    if mode(lane.recipe) == "edge_only":
        return NOTHING, f"{m.decode_steps} passes of the drafter, none of the target"
    return number(m.tokens_per_target_pass, 2), f"{m.target_passes} target passes"


def lane_speedup(lanes: Mapping[str, Lane], name: str = SPEC) -> float | None:
    """Speed of a lane relative to the AR lane, once both have ended; over a link including the first token."""
    if name == PLAIN or not all(lane in lanes and lanes[lane].ended for lane in (name, PLAIN)):
        return None
    if "prompt" in differing_inputs(lanes[name], lanes[PLAIN]):
        return None
    value, baseline = (speed(lanes[lane].metrics, linked(lanes)) for lane in (name, PLAIN))
    return value / baseline if value and baseline else None


def unequal_lanes(lanes: Mapping[str, Lane]) -> str:
    begun = [lane for lane in lanes.values() if lane.begun]
    if PLAIN in lanes and any("prompt" in differing_inputs(lane, begun[0]) for lane in begun):
        return "The prompts differ: speeds and texts are not compared."
    counts = {name: lane.metrics.tokens for name, lane in lanes.items() if lane.begun}
    if PLAIN not in counts or len(set(counts.values())) < 2:
        return ""
    parts = (f"{'AR' if name == PLAIN else lanes[name].title} {count} tokens" for name, count in counts.items())
    return f"{'; '.join(parts)}: speeds are compared, not times."


def repeated_ratios(speeds: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the speed-up of each pair; empty without repetitions."""
    spec, plain = speeds.get(SPEC, ()), speeds.get(PLAIN, ())
    pairs = [(a, b) for a, b in zip(spec, plain, strict=False) if a and b]
    return [a / b for a, b in pairs] if len(pairs) > 1 else []


def repeated_tile(speeds: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, str]]:
    ratios = repeated_ratios(speeds)
    if not ratios:
        return {}
    note = f"median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    return {"speedup": (f"{statistics.median(ratios):.2f}×", note)}


def describe_repeats(speeds: Mapping[str, Sequence[float]]) -> str:
    ratios = repeated_ratios(speeds)
    if not ratios:
        return ""
    figures = f"median {statistics.median(ratios):.2f}×, range {min(ratios):.2f}× to {max(ratios):.2f}×"
    if len(ratios) < ENOUGH_PAIRS:
        outcome = "Not enough repeats for a result"
    elif min(ratios) > 1:
        outcome = "Speculation was faster in every pair"
    elif max(ratios) <= 1:
        outcome = "Speculation was slower in every pair"
    else:
        outcome = "No clear difference"
    return f"{outcome}: {figures}, over {len(ratios)} alternating pairs."


def describe_waiting(lanes: Mapping[str, Lane]) -> str:
    shares = [
        f"{lane.title} {percent(min(1.0, waited / lane.metrics.decode_s))}"
        for lane in lanes.values()
        if mode(lane.recipe)
        and lane.metrics.decode_s
        and (waited := sum(event.step.verdict.remote.get("rtt_s", 0.0) for event in lane.steps[1:]))
    ]
    return f"Waiting for the link took part of the time: {', '.join(shares)}." if shares else ""


def describe_engines(lanes: Mapping[str, Lane]) -> str:
    names = dict.fromkeys(_engine(lane) for lane in lanes.values() if lane.environment)
    return f"Computed by the {' and the '.join(filter(None, names))}." if any(names) else ""


def _engine(lane: Lane) -> str:
    name = explain_engine(lane.environment)
    return f"{name} (batch-invariant)" if name and lane.bit_equal else name


def describe_queue(ahead: int, seconds: float | None) -> str:
    return f"{ahead} ahead" + ("" if seconds is None else f", about {max(1, round(seconds))} s")


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        (estimate.label(row), row.tokens_per_pass, f"{row.speedup:.2f}×", f"{row.low:.2f}–{row.high:.2f}")
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    return (
        f"**Will it pay off?** {estimate.advice[0].upper()}{estimate.advice[1:]}. "
        f"Texts of the target: {estimate.texts}; α is {estimate.alpha:.2f}. Costs are measured on this machine: "
        f"a draft token costs {estimate.c:.2f} AR steps, a pass over {last} tokens {estimate.v[last]:.2f}. "
        f"Weights take {format_bytes(estimate.weight_bytes)}, "
        f"keys and values {format_bytes(estimate.kv_bytes)} per 1,000 tokens.\n\n"
        f"{figures_table(('settings', 'tokens per pass', 'expected speed-up', '95 %'), rows)}"
    )


def figures_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows in Markdown: two digits, halves rounded up as in the papers, dash for None."""

    def cell(value: object) -> object:
        return number(value + 1e-9, 2) if isinstance(value, float) else NOTHING if value is None else value

    return markdown_table(head, [[cell(value) for value in row] for row in rows])


def verdict(lanes: Mapping[str, Lane]) -> str:
    """Return the speed-up and its causes; empty without a comparison.

    Times are in AR steps, so speed-up = tokens per step / AR steps per step.
    """
    ratio = lane_speedup(lanes)
    if ratio is None:
        return ""
    lane = lanes[SPEC]
    speeds = _speeds(lane, lanes[PLAIN], linked(lanes))
    if lane.recipe["method"] == "beam":
        words = [
            f"The search ran at {ratio_text(ratio)}× the speed of AR decoding: {speeds}",
            "Its aim is a probable text, not speed.",
        ]
    elif mode(lane.recipe) in ALONE:
        words = [f"{lane.title.capitalize()}, at {ratio_text(ratio)}× the speed of AR decoding here: {speeds}"]
    elif linked(lanes):
        words = _over_link(lane, ratio, speeds)
    else:
        words = _speculation(lane, lanes[PLAIN], ratio, speeds)
    words += [
        f"{other.title} ran at {ratio_text(value)}× the speed of AR decoding{_other_text(other, lanes[PLAIN])}."
        for name, other in lanes.items()
        if name not in (SPEC, PLAIN) and (value := lane_speedup(lanes, name)) is not None
    ]
    return " ".join(filter(None, words))


def _speeds(lane: Lane, baseline: Lane, total: bool) -> str:
    spec, plain = lane.metrics, baseline.metrics
    if not total:
        return f"{spec.tokens_per_second:.1f} against {plain.tokens_per_second:.1f} tokens per second."
    seconds = ((m.ttft_s or 0.0) + m.decode_s for m in (spec, plain))
    return "{:.2f} against {:.2f} s in total, with the first token.".format(*seconds)


def _over_link(lane: Lane, ratio: float, speeds: str) -> list[str]:
    spec = lane.metrics
    waited = spec.remote.get("rtt_s", 0.0) / (spec.decode_s or 1.0)
    words = [f"{_outcome(ratio)}: {speeds}", "The cloud alone streams its tokens after one round trip."]
    if ratio < 0.98 and waited > 0.5:
        words.append("The link takes most of each step: let the cloud decode alone.")
    return words


def _outcome(ratio: float) -> str:
    if ratio >= 1.05:
        return f"In this one run, speculation was {ratio_text(ratio)}× as fast"
    if ratio < 0.95:
        return f"In this one run, speculation lost: {ratio_text(ratio)}× the speed of AR decoding"
    return "In this one run, speculation made no clear difference"


def _speculation(lane: Lane, baseline: Lane, ratio: float, speeds: str) -> list[str]:
    spec = lane.metrics
    terms = cost_terms(spec, baseline.metrics)
    if terms is None:
        return [f"{_outcome(ratio)}: {speeds}", "The engine does not report the durations of its steps."]
    words = [
        f"{_outcome(ratio)}: {speeds}",
        f"A step gave {spec.tokens_per_step:.2f} tokens and took {terms.draft + terms.v + terms.o:.2f} AR steps "
        f"(drafting {terms.draft:.2f}, verifying {terms.v:.2f}, host {terms.o:.2f}).",
        _prediction(lane, terms),
    ]
    if ratio < 0.98:
        words.append(_advice(lane, terms, estimated_gamma(lane, baseline)))
    return words


def ratio_text(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def cost_terms(spec: Metrics, baseline: Metrics) -> CostTerms | None:
    """Return the costs of a step in AR steps; None without a measured step of either, or if they are unknown."""
    if not (spec.decode_steps and baseline.decode_steps and baseline.decode_s):
        return None
    if spec.draft_s is None or spec.verify_s is None or spec.host_s is None:
        return None
    counts = {"drafted": spec.drafted, "steps": spec.decode_steps}
    pass_s = baseline.decode_s / baseline.decode_steps
    return CostTerms.of(spec.draft_s, spec.verify_s, spec.host_s, **counts, pass_s=pass_s)


def _prediction(lane: Lane, terms: CostTerms) -> str:
    """Theorem 3.8 (2211.17192), and the cost model with measured verification and host costs."""
    alpha = lane.acceptance
    if alpha is None or draft_shape(lane.recipe["method"]) == "forest":  # the theorem is about chains
        return ""
    theorem = walltime_improvement(alpha, terms.drafted, terms.c)
    model = cost_model(expected_tokens(alpha, terms.drafted), terms.drafted, terms.c, terms.v, terms.o)
    return (
        f"With {_acceptance_label(lane)}, {terms.drafted:.1f} draft tokens per step and c {terms.c:.2f}, "
        f"Theorem 3.8 predicts {theorem:.2f}×. With the measured costs of verification and host it is {model:.2f}×."
    )


def estimated_gamma(lane: Lane, baseline: Lane) -> tuple[int, str] | None:
    """Return the best draft length of the estimate that the inspector shows, and its range, empty if none is better."""
    estimate, _ = what_if(lane, baseline)
    if estimate is None or not estimate["fits"]:
        return None
    gamma, _, _, low, high = max(estimate["rows"], key=lambda row: row[2])
    if gamma == estimate["gamma"] or low <= estimate["measured"]:
        return 0, ""
    return gamma, f"{low:.0f} to {high:.0f} tokens per second"


def _advice(lane: Lane, terms: CostTerms, estimated: tuple[int, str] | None) -> str:
    """Return a change that improves the estimate or the cost model's prediction."""
    recipe, alpha = lane.recipe, lane.acceptance
    if not terms.drafted:
        method = METHODS.get(recipe["method"])
        copies = method is not None and method.preflight == "replay"
        cause = "the drafter found no matching context" if copies else "policy or token limit allowed no draft"
        return f"Nothing was drafted: {cause}."
    if recipe["method"] in SMALLER_DRAFT:
        return f"{SMALLER_DRAFT[recipe['method']]}, or {REPEAT} and {DISABLE}."
    if alpha is None:
        return "The target tested no draft token: the speed does not depend on acceptance."
    drafted, gamma = terms.drafted, recipe["gamma"]
    fixed = recipe.get("policy", "fixed") == "fixed" and drafted > gamma - 0.5
    longest = LONGEST_ADVISED if fixed else max(1, round(drafted))
    better = better_gamma(alpha, gamma if fixed else drafted, terms.c, terms.v, terms.o, longest)
    if estimated and estimated[1]:
        length, speeds = estimated
        return f"γ {length} is estimated at {speeds}: " + ("try it." if length else f"{REPEAT}, then {DISABLE}.")
    if better and better[0] and not estimated:
        return f"By the cost model γ {better[0]} reaches {better[1]:.2f}×: try it."
    if not can_improve(alpha, terms.c):
        cause = f"Acceptance ({_acceptance_label(lane)}) does not exceed c {terms.c:.2f}"
        return f"{cause}: {REPEAT}, then {DISABLE} or choose a cheaper drafter."
    if better and not better[0]:
        return f"No draft length pays at these costs of verification and host: {REPEAT}, then {DISABLE}."
    return f"No other draft length is clearly faster: {REPEAT}, since timings vary."


def sameness(lanes: Mapping[str, Lane]) -> dict[str, str] | None:
    """Compare texts that must be equal (exact, greedy or shared noise): return badge, tone (good, even, bad), cause."""
    baseline = lanes.get(PLAIN)
    if baseline is None or not (baseline.ended and baseline.begun):
        return None
    for name, lane in lanes.items():
        if name == PLAIN or not lane.ended or not lane.exact or lane.recipe.get("method") == "beam":
            continue
        if not lane.metrics.steps or differing_inputs(lane, baseline) or not _must_agree(lane, baseline):
            continue
        if lane.tokens != baseline.tokens:
            return _difference(lane, baseline)
        same = f"all {len(lane.tokens)} tokens equal AR decoding"
        return {"badge": "identical text", "tone": "good", "why": f"The texts are the same: {same}."}
    return None


def differing_inputs(lane: Lane, other: Lane) -> list[str]:
    """Return differing text options, and "prompt"."""

    def value(recipe: Mapping[str, Any], option: Option) -> Any:
        chosen = recipe.get(option.name, option.default)
        return list(chosen) if isinstance(chosen, tuple) else chosen

    options = [
        name for name, option in TEXT_OPTIONS.items() if value(lane.recipe, option) != value(other.recipe, option)
    ]
    prompts = [header and header.prompt_tokens for header in (lane.header, other.header)]
    return options if prompts[0] == prompts[1] else [*options, "prompt"]


def _must_agree(lane: Lane, baseline: Lane) -> bool:
    a, b = lane.recipe, baseline.recipe
    return a.get("temperature") == 0 or (rule_traits(a).shares_noise and a.get("rule") == b.get("rule"))


def _difference(lane: Lane, baseline: Lane) -> dict[str, str]:
    tokens, expected = lane.tokens, baseline.tokens
    first = common_prefix(tokens, expected)
    if any(text.end and text.end.reason in _EARLY and len(text.tokens) == first for text in (lane, baseline)):
        return {"badge": "same so far", "tone": "even", "why": f"A run ended early: its {first} tokens are equal."}
    where, near_tie = f"The texts differ from token {first + 1} on", True
    top = _top_tokens_at(baseline.steps, first) or _top_tokens_at(lane.steps, first)
    if len(top) > 1:
        (a, p), (b, q) = top[:2]
        where += f", where the target gave {a!r} {p:.4f} and {b!r} {q:.4f}"
        near_tie = lane.recipe.get("temperature") != 0 or p <= q * math.exp(NEAR_TIE)
    if not near_tie:
        tone, cause = "bad", "this is an error, not a near-tie"
    elif lane.bit_equal and not mode(lane.recipe):
        tone, cause = "bad", "this is an error, since the engine is batch-invariant"
    else:
        tone, cause = "even", "rounding decided a near-tie"
    return {"badge": f"differs at token {first + 1}", "tone": tone, "why": f"{where}: {cause}."}


def _other_text(lane: Lane, baseline: Lane) -> str:
    differing = differing_inputs(lane, baseline)
    if not differing or not set(differing) <= set(_FORM) or not _must_agree(lane, baseline):
        return ""
    if lane.tokens == baseline.tokens:
        return "; its text is the same"
    return f"; its text differs from token {common_prefix(lane.tokens, baseline.tokens) + 1} on"


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
