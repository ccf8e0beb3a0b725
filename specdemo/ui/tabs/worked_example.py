"""Worked example: p and q over four tokens, and trials of the acceptance rules."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import gradio as gr
import torch

from specdemo.core.distributions import residual
from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import Trial, chance_distance, distance, rare_distance, trial
from specdemo.core.theory import bretagnolle_huber, divergence, overlap, pinsker
from specdemo.ui.labels import figures_table
from specdemo.ui.tabs.components import plot_value, probability_plot

EXAMPLE_TOKENS = "abcd"
EXAMPLE_P = (0.45, 0.32, 0.18, 0.05)  # every lossy rule visibly changes this p
EXAMPLE_Q = (0.20, 0.30, 0.15, 0.35)
TRIAL_TOKENS, MAX_TRIAL_GAMMA = 10_000, 4
EXAMPLE_ORDER = [f"{probs}({token})" for token in EXAMPLE_TOKENS for probs in "pq"]
TRIAL_ORDER = [f"{token} {part}" for token in EXAMPLE_TOKENS for part in ("p", "drawn", "q")]
_UNADJUSTED = "corrections drawn from p: lossy"
_EXAMPLE_COLOURS = {part: f"var(--bar-{part})" for part in ("accepted", "correction", "rejected")}
_TRIAL_COLOURS = {"p": "var(--curve-set)", "drawn": "var(--bar-correction)", "q": "var(--curve-2)"}
_INTRO = """### Why the output follows the target's distribution
Enter any p (target) and q (drafter) over four tokens."""
_TRIAL_INTRO = """### Try a rule
Draw 10,000 tokens from this p and q with any acceptance rule. With an exact rule the drawn tokens follow p for every
q."""

ProbabilityBar = tuple[str, float, str]  # label, height, part


def rule_choices() -> dict[str, tuple[str, bool]]:
    """Map dropdown titles to (rule name, draw corrections from the residual)."""
    unadjusted = {f"{name}, {_UNADJUSTED}": (name, False) for name, rule in RULES.items() if rule.adjusts}
    return {f"{name}: {rule.title}": (name, True) for name, rule in RULES.items()} | unadjusted


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
    note = "" if abs(total - 1) < 1e-9 else f"{name} sums to {total:g} and was normalized. "
    return [weight / total for weight in weights], note


def describe_example(p: Sequence[float], q: Sequence[float]) -> str:
    """Explain per token why the output follows p; compare beta with its KL bounds."""
    beta, kl = overlap(p, q), divergence(p, q)
    corrections = residual(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)).tolist()
    rows = []
    for token, a, b, correction in zip(EXAMPLE_TOKENS, p, q, corrections, strict=True):
        accepted, corrected = min(a, b), (1 - beta) * correction
        total = f"{accepted:.3f} + {corrected:.3f} = {accepted + corrected:.3f}"
        rows.append((token, *(f"{x:.3f}" for x in (a, b, accepted, max(a - b, 0), correction)), total))
    head = ("token", "p", "q", "accepted: min(p, q)", "max(p − q, 0)", "residual", "accepted + (1 − β) · residual")
    false_bound = 1 / (1 + kl)
    return "\n\n".join(
        [
            f"A token from q is accepted with probability min(1, p/q). The acceptance rate is **β = {beta:.3f}**, the "
            f"sum of min(p, q). With probability {1 - beta:.3f}, a correction is drawn from the residual. "
            "The residual is max(p − q, 0), normalized. The last column equals p.",
            figures_table(head, rows),
            f"KL(p‖q) = {f'{kl:.3f}' if kl < math.inf else '∞'}. Pinsker: β ≥ 1 − √(KL/2) = {pinsker(kl):.3f}. "
            f"Bretagnolle–Huber: β ≥ e^(−KL)/2 = {bretagnolle_huber(kl):.3f}. "
            f"The often-quoted 1/(1 + KL) = {false_bound:.3f} is not a bound. "
            + ("It is satisfied here." if false_bound <= beta else "It is violated here."),
        ]
    )


def example_bars(p: Sequence[float], q: Sequence[float]) -> list[ProbabilityBar]:
    """Return stacked bars: p as accepted and correction, q as accepted and rejected."""
    rows = []
    for token, a, b in zip(EXAMPLE_TOKENS, p, q, strict=True):
        rows += [(f"p({token})", max(a - b, 0.0), "correction"), (f"p({token})", min(a, b), "accepted")]
        rows += [(f"q({token})", max(b - a, 0.0), "rejected"), (f"q({token})", min(a, b), "accepted")]
    return rows


def try_rule(choice: str, p: Sequence[float], q: Sequence[float], gamma: int, seed: int) -> Trial:
    if not isinstance(choice, str) or choice not in rule_choices():
        raise UserError(f"unknown rule: choose one of {', '.join(rule_choices())}")
    if isinstance(gamma, bool) or gamma not in range(1, MAX_TRIAL_GAMMA + 1):
        raise UserError(f"the draft length must be from 1 to {MAX_TRIAL_GAMMA}")
    name, adjust = rule_choices()[choice]
    return trial(name, torch.tensor(p), torch.tensor(q), int(gamma), TRIAL_TOKENS, seed, adjust=adjust)


def describe_trial(choice: str, result: Trial, p: Sequence[float], q: Sequence[float]) -> str:
    name, adjust = rule_choices()[choice]
    exact = RULES[name].exact(SamplingParams()) and adjust
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


def trial_bars(result: Trial, p: Sequence[float], q: Sequence[float]) -> list[ProbabilityBar]:
    shares = result.shares(len(p))
    return [
        (f"{token} {part}", height, part)
        for token, *heights in zip(EXAMPLE_TOKENS, p, shares, q, strict=True)
        for part, height in zip(("p", "drawn", "q"), heights, strict=True)
    ]


def residual_example(tab: gr.Tab) -> None:
    gr.Markdown(_INTRO)
    p, q = _probability_inputs("p", EXAMPLE_P), _probability_inputs("q", EXAMPLE_Q)
    example_text = gr.Markdown(elem_id="theory-residual", elem_classes="figures")
    example_plot = probability_plot("p and q", _EXAMPLE_COLOURS, EXAMPLE_ORDER, "theory-parts")
    gr.Markdown(_TRIAL_INTRO)
    with gr.Row():
        rule = gr.Dropdown(list(rule_choices()), label="Rule", scale=3, min_width=300, elem_id="theory-rule")
        gamma = gr.Slider(
            1,
            MAX_TRIAL_GAMMA,
            1,
            step=1,
            label="Draft length γ (tokens)",
            scale=2,
            min_width=220,
            elem_id="theory-length",
        )
        draw = gr.Button("Draw 10,000 tokens", scale=1, min_width=220, elem_id="theory-draw")
    trial_text = gr.Markdown(elem_id="theory-trial", elem_classes="figures")
    with gr.Column(visible=False) as trial_results:  # screen readers announce an empty plot without a name
        trial_plot = probability_plot("p, drawn, q", _TRIAL_COLOURS, TRIAL_ORDER, "theory-shares")

    def explain(*values: float | None) -> Any:
        try:
            target, drafter, note = _parse(values)
        except UserError as error:
            return [f"**{error}.**", None]
        text = note + describe_example(target, drafter)
        return [text, plot_value(example_plot, example_bars(target, drafter))]

    def draw_tokens(choice: str, length: int, *values: float | None) -> Any:
        try:
            target, drafter, note = _parse(values)
            result = try_rule(choice, target, drafter, length, secrets.randbits(31))
        except UserError as error:
            return [f"**{error}.**", None, gr.Column(visible=False)]
        text = note + describe_trial(choice, result, target, drafter)
        return [text, plot_value(trial_plot, trial_bars(result, target, drafter)), gr.Column(visible=True)]

    hidden = {"show_progress": "hidden", "api_visibility": "private", "preprocess": False}
    inputs = [*p, *q]
    triggers = [tab.select, *(number.change for number in inputs)]
    gr.on(triggers, explain, inputs, [example_text, example_plot], trigger_mode="always_last", **hidden)
    draw.click(
        draw_tokens, [rule, gamma, *inputs], [trial_text, trial_plot, trial_results], trigger_mode="once", **hidden
    )


def _probability_inputs(name: str, defaults: Sequence[float]) -> list[gr.Number]:
    with gr.Row():
        return [
            gr.Number(value, label=f"{name}({token})", step=0.05, min_width=110, elem_id=f"theory-{name}-{token}")
            for token, value in zip(EXAMPLE_TOKENS, defaults, strict=True)
        ]


def _parse(values: Sequence[float | None]) -> tuple[list[float], list[float], str]:
    half = len(EXAMPLE_TOKENS)
    p, p_note = parse_probs("p", values[:half])
    q, q_note = parse_probs("q", values[half:])
    note = p_note + q_note
    return p, q, f"{note}\n\n" if note else ""
