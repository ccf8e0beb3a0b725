"""Texts about lanes for people: guarantee, tiles, preflight, and the summary of a comparison."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdemo.bench.table import markdown_table
from specdemo.core.events import StepEvent
from specdemo.core.explain import explain_engine
from specdemo.core.formats import NOTHING, format_bytes, latency, number, percent
from specdemo.core.metrics import Metrics
from specdemo.core.rules import rule_traits
from specdemo.core.step import common_prefix
from specdemo.core.theory import CostTerms, better_gamma, can_improve, expected_tokens, walltime_improvement
from specdemo.core.theory import speedup as cost_model
from specdemo.drafters import draft_shape
from specdemo.preflight import Preflight
from specdemo.ui.lane import ALONE, PLAIN, SPEC, Lane, mode, title

DISABLE = "disable speculation (method ar)"
SMALLER_DRAFT = {
    "tree": "Each node of the tree costs drafting and verification: lower “Nodes per draft”",
    "lookahead": "Each guess adds a row to the pass: lower “Window, positions” or “Order n”",
}
NEAR_TIE = 0.05  # nats between the two most probable tokens: bfloat16 rounding
LONGEST_ADVISED = 16  # draft tokens
CHANGED = "This rule changes the target's distribution with these settings."


def escape_markdown(text: str) -> str:
    """Escape text of traces: an image in Markdown sends a request to another host."""
    return re.sub(r"([^\w\s,.])", r"\\\1", text)


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
    device = "" if lane.memory.device is None else f" · device {format_bytes(lane.memory.device)}"
    return {
        "acceptance": (
            percent(m.acceptance_rate),
            _acceptance_note(lane),
        ),
        "tokens_per_pass": _tokens_per_pass(lane),
        "tokens_per_second": (number(m.tokens_per_second, 1), f"{m.tokens} tokens, without prefill"),
        "ttft": (latency(m.ttft_s), "from the worker's start"),
        "memory": (
            format_bytes(lane.memory.process),
            f"weights {format_bytes(lane.weights)} · KV {format_bytes(lane.memory.kv)}{device}",
        ),
        "speedup": (
            NOTHING if ratio is None else f"{ratio:.1f}×",
            "no baseline measured" if ratio is None else "against AR decoding",
        ),
    }


def _acceptance_note(lane: Lane) -> str:
    m = lane.metrics
    if not m.drafted:
        return "nothing drafted"
    unverified = f" · {m.unverified} unverified" if m.unverified else ""
    return f"{m.accepted} of {m.drafted - m.unverified_drafted} drafted · {_alpha_label(lane)}{unverified}"


def _alpha_label(lane: Lane) -> str:
    return f"{'accepted/tested' if lane.counted else 'α'} {number(lane.alpha, 2)}"


def _tokens_per_pass(lane: Lane) -> tuple[str, str]:
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


def unequal_lengths(lanes: Mapping[str, Lane]) -> str:
    counts = {name: lane.metrics.tokens for name, lane in lanes.items() if lane.begun}
    if PLAIN not in counts or len(set(counts.values())) < 2:
        return ""
    parts = (f"{'AR' if name == PLAIN else title(lanes[name].recipe)} {count} tokens" for name, count in counts.items())
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
    spec, plain = speeds[SPEC], speeds[PLAIN]
    figures = f"median {statistics.median(ratios):.2f}×, range {min(ratios):.2f}× to {max(ratios):.2f}×"
    if min(spec) > max(plain):
        outcome = "Speculation was faster"
    elif max(spec) < min(plain):
        outcome = "Speculation lost"
    else:
        outcome = "No clear difference, since the ranges of the speeds overlap"
    return f"{outcome}: {figures}, over {len(ratios)} alternating pairs."


def describe_waiting(lanes: Mapping[str, Lane]) -> str:
    shares = [
        f"{title(lane.recipe)} {percent(min(1.0, waited / lane.metrics.decode_s))}"
        for lane in lanes.values()
        if mode(lane.recipe)
        and lane.metrics.decode_s
        and (waited := sum(event.step.verdict.remote.get("rtt_s", 0.0) for event in lane.steps[1:]))
    ]
    return f"Waiting for the link took part of the time: {', '.join(shares)}." if shares else ""


def describe_engines(lanes: Mapping[str, Lane]) -> str:
    names = dict.fromkeys(explain_engine(lane.environment) for lane in lanes.values() if lane.environment)
    return f"Computed by the {' and the '.join(filter(None, names))}." if any(names) else ""


def describe_queue(ahead: int, seconds: float | None) -> str:
    return f"{ahead} ahead" + ("" if seconds is None else f", about {max(1, round(seconds))} s")


def describe_preflight(estimate: Preflight) -> str:
    rows = [
        (estimate.label(row), row.tokens_per_pass, f"{row.speedup:.2f}×", f"{row.low:.2f}–{row.high:.2f}")
        for row in estimate.estimates
    ]
    last = max(estimate.v)
    return (
        f"**Preflight of {estimate.recipe.method}:** {estimate.advice}. α is {estimate.alpha:.2f}. "
        f"A draft token costs {estimate.c:.2f} AR steps, a pass over {last} rows {estimate.v[last]:.2f}. "
        f"Weights take {format_bytes(estimate.weight_bytes)}, "
        f"keys and values {format_bytes(estimate.kv_bytes)} per 1,000 tokens. "
        f"Texts of the target: {estimate.texts}.\n\n"
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
    spec, baseline = lane.metrics, lanes[PLAIN].metrics
    speeds = f"{spec.tokens_per_second:.1f} against {baseline.tokens_per_second:.1f} tokens per second."
    if lane.recipe["method"] == "beam":
        words = [
            f"The search ran at {ratio:.1f}× the speed of AR decoding: {speeds}",
            "Its aim is a probable text, not speed.",
        ]
    elif mode(lane.recipe) in ALONE:
        words = [f"{title(lane.recipe).capitalize()}, at {ratio:.1f}× the speed of AR decoding here: {speeds}"]
    else:
        words = _speculation(lane, spec, baseline, ratio, speeds)
    words += [
        f"{title(other.recipe)} ran at {value:.1f}× the speed of AR decoding{_other_text(other, lanes[PLAIN])}."
        for name, other in lanes.items()
        if name not in (SPEC, PLAIN) and (value := lane_speedup(lanes, name)) is not None
    ]
    return " ".join(filter(None, words))


def _speculation(lane: Lane, spec: Metrics, baseline: Metrics, ratio: float, speeds: str) -> list[str]:
    terms = cost_terms(spec, baseline)
    assert terms is not None
    if ratio >= 1.05:
        outcome = f"Speculation was {ratio:.1f}× as fast"
    elif ratio < 0.95:
        outcome = f"Speculation lost: {ratio:.1f}× the speed of AR decoding"
    else:
        outcome = "Speculation made no clear difference"
    words = [
        f"{outcome}: {speeds}",
        f"A step gave {spec.tokens_per_step:.2f} tokens and took {terms.draft + terms.v + terms.o:.2f} AR steps "
        f"(drafting {terms.draft:.2f}, verifying {terms.v:.2f}, host {terms.o:.2f}).",
        _prediction(lane, terms),
    ]
    if ratio < 0.98:
        words.append(_advice(lane, terms, terms.v * spec.remote.get("rtt_s", 0.0) / (spec.verify_s or 1.0)))
    return words


def cost_terms(spec: Metrics, baseline: Metrics) -> CostTerms | None:
    """Return the costs of a step in AR steps, None without a measured step of either."""
    if not (spec.decode_steps and baseline.decode_steps and baseline.decode_s):
        return None
    seconds, ar_step_s = (spec.draft_s, spec.verify_s, spec.host_s), baseline.decode_s / baseline.decode_steps
    return CostTerms.of(*seconds, drafted=spec.drafted, steps=spec.decode_steps, pass_s=ar_step_s)


def _prediction(lane: Lane, terms: CostTerms) -> str:
    """Theorem 3.8 (2211.17192), and the cost model with measured verification and host costs."""
    alpha = lane.alpha
    if alpha is None or draft_shape(lane.recipe["method"]) == "forest":  # the theorem is about chains
        return ""
    theorem = walltime_improvement(alpha, terms.drafted, terms.c)
    model = cost_model(expected_tokens(alpha, terms.drafted), terms.drafted, terms.c, terms.v, terms.o)
    return (
        f"With {_alpha_label(lane)}, {terms.drafted:.1f} draft tokens per step and c {terms.c:.2f}, "
        f"Theorem 3.8 predicts {theorem:.2f}×. With the measured costs of verification and host it is {model:.2f}×."
    )


def _advice(lane: Lane, terms: CostTerms, link: float) -> str:
    """Return a change that improves the cost model's prediction; `link` is a part of v."""
    recipe, alpha = lane.recipe, lane.alpha
    verify = terms.v - link
    if not terms.drafted:
        return "Nothing was drafted: the drafter did not find a matching context."
    if recipe["method"] in SMALLER_DRAFT:
        return f"{SMALLER_DRAFT[recipe['method']]}, or {DISABLE}."
    if alpha is None:
        return "The target tested no draft token: the speed does not depend on acceptance."
    drafted, gamma = terms.drafted, recipe["gamma"]
    fixed = recipe.get("policy", "fixed") == "fixed" and drafted > gamma - 0.5
    longest = LONGEST_ADVISED if fixed else max(1, round(drafted))
    c, current = terms.c, gamma if fixed else drafted
    better = better_gamma(alpha, current, c, verify, terms.o + link, longest)
    cause = "The link takes most of each step. " if link > verify else ""
    if better and better[0]:
        return f"{cause}By the cost model γ {better[0]} reaches {better[1]:.2f}×: try it."
    if link > verify:
        return "The link takes most of each step: let the cloud decode alone."
    if not can_improve(alpha, c):
        return f"{_alpha_label(lane)} does not exceed c {c:.2f}: {DISABLE}, or choose a cheaper drafter."
    if better:
        return f"No draft length pays at these costs of verification and host: {DISABLE}."
    return "The cost model names no better draft length: run again, since timings vary."


def sameness(lanes: Mapping[str, Lane]) -> dict[str, str] | None:
    """Compare texts that must be equal (exact, greedy or shared noise): return badge, tone (good, even, bad), cause."""
    baseline = lanes.get(PLAIN)
    if baseline is None or not (baseline.ended and baseline.begun):
        return None
    for name, lane in lanes.items():
        if name == PLAIN or not lane.ended or not lane.exact or lane.recipe.get("method") == "beam":
            continue
        if not lane.metrics.steps or not _must_agree(lane.recipe, baseline.recipe):
            continue
        if lane.tokens != baseline.tokens:
            return _difference(lane, baseline)
        same = f"all {len(lane.tokens)} tokens equal AR decoding"
        return {"badge": "identical text", "tone": "good", "why": f"The texts are the same: {same}."}
    return None


def _must_agree(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    shared = ("pair", "target", "temperature", "top_k", "top_p", "seed", "max_tokens", "quantization", "dtype")
    if any(a.get(name) != b.get(name) for name in shared):
        return False
    return a.get("temperature") == 0 or (rule_traits(a).shares_noise and a.get("rule") == b.get("rule"))


def _difference(lane: Lane, baseline: Lane) -> dict[str, str]:
    tokens, expected = lane.tokens, baseline.tokens
    first = common_prefix(tokens, expected)
    where, near_tie = f"The texts differ from token {first + 1} on", True
    top = _top_tokens_at(baseline.steps, first) or _top_tokens_at(lane.steps, first)
    if len(top) > 1:
        (a, p), (b, q) = top[:2]
        where += f", where the target gave {a!r} {p:.4f} and {b!r} {q:.4f}"
        near_tie = lane.recipe.get("temperature") != 0 or math.log(p / q) <= NEAR_TIE
    if not near_tie:
        tone, cause = "bad", "this is an error, not a near-tie"
    elif lane.bit_equal and not mode(lane.recipe):
        tone, cause = "bad", "this is an error, since logits are bit-equal here"
    else:
        tone, cause = "even", "rounding decided a near-tie"
    return {"badge": f"differs at token {first + 1}", "tone": tone, "why": f"{where}: {cause}."}


def _other_text(lane: Lane, baseline: Lane) -> str:
    if not _must_agree(lane.recipe, {**baseline.recipe, "quantization": lane.recipe.get("quantization")}):
        return ""
    if lane.recipe.get("quantization") == baseline.recipe.get("quantization"):
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
