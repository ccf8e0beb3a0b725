"""Worked example: p and q over four tokens, and trials of the acceptance rules."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gradio as gr
import torch

from specdemo.core.distributions import residual
from specdemo.core.errors import UserError
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import Trial, chance_distance, compared_verdicts, distance, rare_distance, trial
from specdemo.core.step import Verdict
from specdemo.core.theory import (
    block_accepted,
    bretagnolle_huber,
    divergence,
    expected_tokens,
    largest_ratio,
    overlap,
    pinsker,
    weight_variance,
)
from specdemo.ui.charts import Series, chart
from specdemo.ui.markdown import figures_table
from specdemo.ui.tabs.components import UNPROCESSED, chart_view

EXAMPLE_TOKENS = "abcd"
EXAMPLE_P = (0.45, 0.32, 0.18, 0.05)  # every lossy rule visibly changes this p
EXAMPLE_Q = (0.20, 0.30, 0.15, 0.35)
TRIAL_TOKENS, MAX_TRIAL_GAMMA = 10_000, 4
_UNADJUSTED = "corrections drawn from p: lossy"
_SCALAR = "residual from q of the drafted token only: lossy"
_INTRO = """### Why the output follows the target's distribution
Enter any p (target) and q (drafter) over four tokens."""
_TRIAL_INTRO = """### Try a rule
Draw 10,000 tokens from this p and q with any acceptance rule. With an exact rule the drawn tokens follow p for every
q."""
_BLOCK_INTRO = """### Token by token, or as a block
Verify the same draft with both rules and the same random draws."""
_COMPARED = (DEFAULT_RULE, next(name for name, rule in RULES.items() if rule.chains_only))


class RuleChoice(NamedTuple):
    """Rule and corrections of a trial."""

    rule: str
    adjust: bool = True
    scalar: bool = False

    @property
    def exact(self) -> bool:
        return RULES[self.rule].exact(SamplingParams()) and self.adjust and not self.scalar


def rule_choices() -> dict[str, RuleChoice]:
    """Map titles of a dropdown to rules."""
    choices = {f"{name}: {rule.title}": RuleChoice(name) for name, rule in RULES.items()}
    choices |= {f"{name}, {_UNADJUSTED}": RuleChoice(name, adjust=False) for name in RULES if RULES[name].adjusts}
    return choices | {f"{DEFAULT_RULE}, {_SCALAR}": RuleChoice(DEFAULT_RULE, scalar=True)}


def parse_probs(name: str, values: Sequence[float | None]) -> tuple[list[float], str]:
    """Validate and normalize probabilities; return them with a note. Raises `UserError`."""
    weights: list[float] = []
    for token, value in zip(EXAMPLE_TOKENS, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
            raise UserError(f"{name}({token}) must be a number{', not empty' if value is None else ''}")
        if value < 0:
            raise UserError(f"{name}({token}) is {value:g}, but probabilities must be at least 0")
        weights.append(value)
    total = sum(weights)
    if not 0 < total < math.inf:
        raise UserError(f"{name} sums to {total:g}: enter at least 1 positive probability, and only finite values")
    note = "" if abs(total - 1) < 1e-9 else f"{name} sums to {total:g} and was normalised. "
    return [weight / total for weight in weights], note


def describe_example(p: Sequence[float], q: Sequence[float]) -> str:
    """Explain per token why the output follows p; compare beta with its KL bounds."""
    beta, kl = overlap(p, q), divergence(p, q)
    ratio = largest_ratio(p, q)
    corrections = residual(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    assert isinstance(corrections, torch.Tensor)
    rows = []
    for token, a, b, correction in zip(EXAMPLE_TOKENS, p, q, corrections.tolist(), strict=True):
        accepted, corrected = min(a, b), (1 - beta) * correction
        total = f"{accepted:.3f} + {corrected:.3f} = {accepted + corrected:.3f}"
        rows.append((token, *(f"{x:.3f}" for x in (a, b, accepted, max(a - b, 0), correction)), total))
    head = ("token", "p", "q", "accepted: min(p, q)", "max(p − q, 0)", "residual", "accepted + (1 − β) · residual")
    false_bound = 1 / (1 + kl)
    return "\n\n".join(
        [
            f"A token from q is accepted with probability min(1, p/q). The acceptance rate is **β = {beta:.3f}**, the "
            f"sum of min(p, q). With probability {1 - beta:.3f}, a correction is drawn from the residual. "
            "The residual is max(p − q, 0), normalised. The last column equals p. "
            f"Lemma 3.3: β = 1 − D_LK(p, q), where D_LK is half the sum of |p − q|, {1 - beta:.3f}.",
            figures_table(head, rows),
            f"Classic rejection sampling accepts with probability p/(Mq), where M = max p/q = {_finite(ratio)}. It "
            f"accepts 1/M = {1 / ratio:.3f} of the draws and repeats the others. Importance sampling keeps all draws "
            f"with weights p/q, of variance {_finite(weight_variance(p, q))}: the draws follow q, not p.",
            f"KL(p‖q) = {_finite(kl)}. Pinsker: β ≥ 1 − √(KL/2) = {pinsker(kl):.3f}. "
            f"Bretagnolle–Huber: β ≥ e^(−KL)/2 = {bretagnolle_huber(kl):.3f}. "
            f"The often-quoted 1/(1 + KL) = {false_bound:.3f} is not a bound. "
            + ("It is satisfied here. " if false_bound <= beta else "It is violated here. ")
            + "Nor is (1 − KL)/γ: p = (0.5, 0.5) and q = (0.6, 0.4) have β = 0.90, but 1 − KL = 0.98 at γ 1.",
        ]
    )


def _finite(x: float) -> str:
    return f"{x:.3f}" if x < math.inf else "∞"


def example_chart(p: Sequence[float], q: Sequence[float]) -> str:
    """Draw the parts of p and q as stacked bars."""
    parts: dict[str, list[tuple[float, float]]] = {"accepted": [], "correction": [], "rejected": []}
    for i, (a, b) in enumerate(zip(p, q, strict=True)):
        parts["accepted"] += [(2 * i, min(a, b)), (2 * i + 1, min(a, b))]
        parts["correction"].append((2 * i, max(a - b, 0.0)))
        parts["rejected"].append((2 * i + 1, max(b - a, 0.0)))
    series = [Series("bar", f"var(--bar-{part})", points, part) for part, points in parts.items()]
    names = [f"{probs}({token})" for token in EXAMPLE_TOKENS for probs in "pq"]
    return chart("p and q", "token", "probability", series, names)


def try_rule(choice: str, p: Sequence[float], q: Sequence[float], gamma: int, seed: int) -> Trial:
    if not isinstance(choice, str) or choice not in rule_choices():
        raise UserError(f"unknown rule: choose one of {', '.join(rule_choices())}")
    _check_length(gamma)
    name, adjust, scalar = rule_choices()[choice]
    a, b = torch.tensor([p, q], dtype=torch.float32)
    return trial(name, a, b, int(gamma), TRIAL_TOKENS, seed, adjust=adjust, scalar=scalar)


def describe_trial(choice: str, result: Trial, p: Sequence[float], q: Sequence[float]) -> str:
    exact = rule_choices()[choice].exact
    shares, count = result.shares(len(p)), len(result.tokens)
    deviation = distance(shares, p)
    expected, rare = chance_distance(p, count), rare_distance(p, count)
    if exact and deviation <= rare:
        verdict = "**The output follows p** within statistical error. This rule is exact at any temperature."
    elif exact:
        verdict = "**The output differs from p.** This occurs by chance once in 1,000 trials: draw again."
    elif deviation <= rare:
        verdict = "**No difference detected** for this p and q. The rule is still lossy: try other values."
    else:
        verdict = "**The output differs from p.** The rule is lossy."
    rows = [
        (token, *(f"{x:.3f}" for x in (a, b, share)), f"{share - a:+.3f}".replace("-", "−"))
        for token, a, b, share in zip(EXAMPLE_TOKENS, p, q, shares, strict=True)
    ]
    return "\n\n".join(
        [
            f"{verdict} Total variation distance from p over {count:,} tokens: {deviation:.4f}. "
            f"Samples of p itself: {expected:.4f} on average, above {rare:.4f} once in 1,000 trials. "
            f"Accepted: {result.accepted:,} of {result.tested:,} tested tokens in {result.rounds:,} steps.",
            figures_table(("token", "p", "q", "drawn", "drawn − p"), rows),
        ]
    )


def _check_length(gamma: int) -> None:
    if isinstance(gamma, bool) or gamma not in range(1, MAX_TRIAL_GAMMA + 1):
        raise UserError(f"the draft length must be from 1 to {MAX_TRIAL_GAMMA}")


def compare_rules(p: Sequence[float], q: Sequence[float], gamma: int, seed: int) -> str:
    """Verify a draft token by token and as a block."""
    _check_length(gamma)
    a, b = torch.tensor([p, q], dtype=torch.float32)
    draft, (token, block) = compared_verdicts(_COMPARED, a, b, int(gamma), seed)
    rows = [
        (
            *(EXAMPLE_TOKENS[drafted], f"{p[drafted] / q[drafted]:.3f}", f"{block.draw[node]:.3f}"),
            *(_decision(verdict, node) for verdict in (token, block)),
        )
        for node, drafted in enumerate(draft.tokens)
    ]
    rows.append(("", "", "", *(f"→ {EXAMPLE_TOKENS[verdict.token or 0]}" for verdict in (token, block))))
    means = expected_tokens(overlap(p, q), gamma) - 1, block_accepted(p, q, int(gamma))
    head = ("draft", "p/q", "draw", "token by token", "as a block")
    return "\n\n".join(
        [
            f"**Accepted: {len(token.accepted)} token by token, {len(block.accepted)} as a block.** "
            f"On average: {means[0]:.3f} and {means[1]:.3f} of {gamma}. Both outputs follow p.",
            figures_table(head, rows),
            "Each draw is compared with a bound. Token by token it is min(1, p/q), and the first failure ends the "
            "draft. As a block, the last success decides: all tokens before it are accepted, too. The last row "
            "is the correction or bonus token.",
        ]
    )


def _decision(verdict: Verdict, node: int) -> str:
    if verdict.beta[node] is None:
        return "not tested"
    return f"{verdict.bound[node]:.3f}: {'accepted' if node in verdict.accepted else 'rejected'}"


def trial_chart(result: Trial, p: Sequence[float], q: Sequence[float]) -> str:
    parts = {"p": (p, "curve-set"), "drawn": (result.shares(len(p)), "bar-correction"), "q": (q, "curve-2")}
    series = [
        Series("bar", f"var(--{colour})", [(3 * i + k, share) for i, share in enumerate(shares)], part)
        for k, (part, (shares, colour)) in enumerate(parts.items())
    ]
    return chart(
        "p, drawn, q", "token", "probability", series, [f"{token} {part}" for token in EXAMPLE_TOKENS for part in parts]
    )


def residual_example(tab: gr.Tab) -> None:
    gr.Markdown(_INTRO)
    inputs = [*_probability_inputs("p", EXAMPLE_P), *_probability_inputs("q", EXAMPLE_Q)]
    changes = [tab.select, *(number.change for number in inputs)]
    example_text = gr.Markdown(elem_id="theory-residual", elem_classes="figures")
    example_plot = chart_view("theory-parts")
    gr.Markdown(_TRIAL_INTRO)
    with gr.Row():
        rule = gr.Dropdown(list(rule_choices()), label="Rule", scale=3, min_width=300, elem_id="theory-rule")
        length = _length_slider(1, "theory-length")
        draw = gr.Button("Draw 10,000 tokens", scale=1, min_width=220, elem_id="theory-draw")
    trial_text = gr.Markdown(elem_id="theory-trial", elem_classes="figures")
    trial_plot = chart_view("theory-shares")
    gr.Markdown(_BLOCK_INTRO)
    with gr.Row():
        block_length = _length_slider(MAX_TRIAL_GAMMA, "theory-block-length")
        verify = gr.Button("Verify a draft", scale=1, min_width=220, elem_id="theory-verify")
    comparison = gr.Markdown(elem_id="theory-block", elem_classes="figures")

    def explain(p: Sequence[float], q: Sequence[float]) -> tuple[str, str]:
        return describe_example(p, q), example_chart(p, q)

    def draw_tokens(p: Sequence[float], q: Sequence[float], gamma: int, choice: str) -> tuple[str, str]:
        result = try_rule(choice, p, q, gamma, secrets.randbits(31))
        return describe_trial(choice, result, p, q), trial_chart(result, p, q)

    def compare(*values: Any) -> str:
        text, _ = _checked(lambda p, q, gamma: (compare_rules(p, q, gamma, secrets.randbits(31)), ""))(*values)
        return text

    latest: dict[str, Any] = {"trigger_mode": "always_last", **UNPROCESSED}
    gr.on(changes, _checked(explain), inputs, [example_text, example_plot], **latest)
    drawn = [trial_text, trial_plot]
    draw.click(_checked(draw_tokens), [*inputs, length, rule], drawn, trigger_mode="once", **UNPROCESSED)
    compared = [*changes, block_length.change, verify.click]
    gr.on(compared, compare, [*inputs, block_length], comparison, **latest)


def _checked(view: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    """Parse p and q, the first inputs of a view; add a note or show an error."""

    def show(*values: Any) -> tuple[str, str]:
        half = len(EXAMPLE_TOKENS)
        try:
            p, p_note = parse_probs("p", values[:half])
            q, q_note = parse_probs("q", values[half : 2 * half])
            text, picture = view(p, q, *values[2 * half :])
        except UserError as error:
            return f"**{error}.**", ""
        note = p_note + q_note
        return f"{note}\n\n{text}" if note else text, picture

    return show


def _length_slider(default: int, elem_id: str) -> gr.Slider:
    label = "Draft length γ (tokens)"
    return gr.Slider(1, MAX_TRIAL_GAMMA, default, step=1, label=label, scale=2, min_width=220, elem_id=elem_id)


def _probability_inputs(name: str, defaults: Sequence[float]) -> list[gr.Number]:
    with gr.Row():
        return [
            gr.Number(value, label=f"{name}({token})", step=0.05, min_width=110, elem_id=f"theory-{name}-{token}")
            for token, value in zip(EXAMPLE_TOKENS, defaults, strict=True)
        ]
