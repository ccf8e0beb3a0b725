"""Worked example: p and q over four tokens, and trials of the acceptance rules."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gradio as gr
import torch

from specdemo.core import theory
from specdemo.core.distributions import residual
from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import (
    SimulatedText,
    chance_distance,
    compared_verdicts,
    distance,
    rare_distance,
    simulated_text,
)
from specdemo.core.step import Verdict
from specdemo.ui.tabs.components import UNPROCESSED, Series, chart, chart_view, figures_table, is_number

EXAMPLE_TOKENS = "abcd"
EXAMPLE_P = (0.45, 0.32, 0.18, 0.05)  # every lossy rule visibly changes this p
EXAMPLE_Q = (0.20, 0.30, 0.15, 0.35)
TRIAL_TOKENS, MAX_TRIAL_GAMMA = 10_000, 4
_COMPARED = (DEFAULT_RULE, next(name for name, rule in RULES.items() if rule.chains_only))
RULE_CHOICES: dict[str, tuple[str, dict[str, bool]]] = {  # rules and options of `simulated_text` by title
    **{f"{name}: {rule.title}": (name, {}) for name, rule in RULES.items()},
    **{
        f"{name}, corrections drawn from p: lossy": (name, {"adjust": False})
        for name, rule in RULES.items()
        if rule.adjusts
    },
    f"{DEFAULT_RULE}, residual from q of the drafted token only: lossy": (DEFAULT_RULE, {"scalar": True}),
}
_INTRO = """### Why the output follows the target's distribution
Enter any p (target) and q (drafter) over four tokens."""
_TRIAL_INTRO = """### Try a rule
Draw 10,000 tokens from this p and q with any acceptance rule. With an exact rule the drawn tokens follow p for every
q."""
_BLOCK_INTRO = """### Token by token, or as a block
Verify the same draft with both rules and the same random draws."""
_Probs = Sequence[float]


def parse_probs(name: str, values: Sequence[Any]) -> tuple[list[float], str]:
    """Validate and normalize probabilities; return them with a note. Raises `UserError`."""
    for token, value in zip(EXAMPLE_TOKENS, values, strict=True):
        if not is_number(value):
            raise UserError(f"{name}({token}) must be a number{', not empty' if value is None else ''}")
        if value < 0:
            raise UserError(f"{name}({token}) is {value:g}, but probabilities must be at least 0")
    total = sum(values)
    if not 0 < total < math.inf:
        raise UserError(f"{name} sums to {total:g}: enter at least 1 positive probability, and only finite values")
    note = "" if abs(total - 1) < 1e-9 else f"{name} sums to {total:g} and was normalised. "
    return [value / total for value in values], note


def describe_example(p: _Probs, q: _Probs) -> str:
    """Explain per token why the output follows p; compare beta with its KL bounds."""
    beta, kl = theory.overlap(p, q), theory.divergence(p, q)
    ratio, false_bound = theory.largest_ratio(p, q), 1 / (1 + kl)
    corrections = residual(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    assert isinstance(corrections, torch.Tensor)
    rows = []
    for token, a, b, correction in zip(EXAMPLE_TOKENS, p, q, corrections.tolist(), strict=True):
        accepted, corrected = min(a, b), (1 - beta) * correction
        total = f"{accepted:.3f} + {corrected:.3f} = {accepted + corrected:.3f}"
        rows.append((token, *map(_digits, (a, b, accepted, max(a - b, 0), correction)), total))
    head = ("token", "p", "q", "accepted: min(p, q)", "max(p − q, 0)", "residual", "accepted + (1 − β) · residual")
    return (
        f"A token from q is accepted with probability min(1, p/q). The acceptance rate is **β = {beta:.3f}**, the "
        f"sum of min(p, q). With probability {1 - beta:.3f}, a correction is drawn from the residual. "
        "The residual is max(p − q, 0), normalised. The last column equals p. "
        f"Lemma 3.3: β = 1 − D_LK(p, q), where D_LK is half the sum of |p − q|, {1 - beta:.3f}.\n\n"
        f"{figures_table(head, rows)}\n\n"
        f"Classic rejection sampling accepts with probability p/(Mq), where M = max p/q = {_digits(ratio)}. It "
        f"accepts 1/M = {1 / ratio:.3f} of the draws and repeats the others. Importance sampling keeps all draws "
        f"with weights p/q, of variance {_digits(theory.weight_variance(p, q))}: the draws follow q, not p.\n\n"
        f"KL(p‖q) = {_digits(kl)}. Pinsker: β ≥ 1 − √(KL/2) = {theory.pinsker(kl):.3f}. "
        f"Bretagnolle–Huber: β ≥ e^(−KL)/2 = {theory.bretagnolle_huber(kl):.3f}. "
        f"The often-quoted 1/(1 + KL) = {false_bound:.3f} is not a bound. "
        f"It is {'satisfied' if false_bound <= beta else 'violated'} here. "
        "Nor is (1 − KL)/γ: p = (0.5, 0.5) and q = (0.6, 0.4) have β = 0.90, but 1 − KL = 0.98 at γ 1."
    )


def _digits(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.3f}" if x < math.inf else "∞"


def example_chart(p: _Probs, q: _Probs) -> str:
    pairs = list(zip(p, q, strict=True))
    parts = {
        "accepted": [height for a, b in pairs for height in (min(a, b), min(a, b))],
        "correction": [height for a, b in pairs for height in (max(a - b, 0.0), 0.0)],
        "rejected": [height for a, b in pairs for height in (0.0, max(b - a, 0.0))],
    }
    series = [Series("bar", f"var(--bar-{part})", list(enumerate(heights)), part) for part, heights in parts.items()]
    names = [f"{probs}({token})" for token in EXAMPLE_TOKENS for probs in "pq"]
    return chart("p and q", "token", "probability", series, names)


def try_rule(choice: Any, p: _Probs, q: _Probs, gamma: Any, seed: int) -> SimulatedText:
    if not isinstance(choice, str) or choice not in RULE_CHOICES:
        raise UserError(f"unknown rule: choose one of {', '.join(RULE_CHOICES)}")
    name, options = RULE_CHOICES[choice]
    a, b = torch.tensor([p, q])
    return simulated_text(name, a, b, _length(gamma), TRIAL_TOKENS, seed, **options)


def _length(gamma: Any) -> int:
    if isinstance(gamma, bool) or gamma not in range(1, MAX_TRIAL_GAMMA + 1):
        raise UserError(f"the draft length must be from 1 to {MAX_TRIAL_GAMMA}")
    return int(gamma)


def describe_trial(choice: str, result: SimulatedText, p: _Probs, q: _Probs) -> str:
    name, options = RULE_CHOICES[choice]
    exact = RULES[name].exact(SamplingParams()) and not options
    shares, count = result.shares(len(p)), len(result.tokens)
    deviation, rare = distance(shares, p), rare_distance(p, count)
    verdict = {
        (True, True): "**The output follows p** within statistical error. This rule is exact at any temperature.",
        (True, False): "**The output differs from p.** This occurs by chance once in 1,000 trials: draw again.",
        (False, True): "**No difference detected** for this p and q. The rule is still lossy: try other values.",
        (False, False): "**The output differs from p.** The rule is lossy.",
    }[exact, deviation <= rare]
    rows = [
        (token, *map(_digits, (a, b, share)), f"{share - a:+.3f}".replace("-", "−"))
        for token, a, b, share in zip(EXAMPLE_TOKENS, p, q, shares, strict=True)
    ]
    return (
        f"{verdict} Total variation distance from p over {count:,} tokens: {deviation:.4f}. "
        f"Samples of p itself: {chance_distance(p, count):.4f} on average, above {rare:.4f} once in 1,000 trials. "
        f"Accepted: {result.accepted:,} of {result.tested:,} tested tokens in {result.rounds:,} steps.\n\n"
        f"{figures_table(('token', 'p', 'q', 'drawn', 'drawn − p'), rows)}"
    )


def trial_chart(result: SimulatedText, p: _Probs, q: _Probs) -> str:
    parts = {"p": ("curve-set", p), "drawn": ("bar-correction", result.shares(len(p))), "q": ("curve-2", q)}
    names = [f"{token} {part}" for token in EXAMPLE_TOKENS for part in parts]
    series = [
        Series("bar", f"var(--{colour})", [(3 * i + k, share) for i, share in enumerate(shares)], part)
        for k, (part, (colour, shares)) in enumerate(parts.items())
    ]
    return chart("p, drawn, q", f"token (n {len(result.tokens)} drawn)", "probability", series, names)


def compare_rules(p: _Probs, q: _Probs, gamma: Any, seed: int) -> str:
    a, b = torch.tensor([p, q])
    draft, (token, block) = compared_verdicts(_COMPARED, a, b, _length(gamma), seed)
    rows = [
        (
            *(EXAMPLE_TOKENS[drafted], _digits(p[drafted] / q[drafted]), _digits(block.draw[node])),
            *(_decision(verdict, node) for verdict in (token, block)),
        )
        for node, drafted in enumerate(draft.tokens)
    ]
    rows.append(("", "", "", *(f"→ {EXAMPLE_TOKENS[verdict.token or 0]}" for verdict in (token, block))))
    alone, together = theory.expected_tokens(theory.overlap(p, q), gamma) - 1, theory.block_accepted(p, q, gamma)
    return (
        f"**Accepted: {len(token.accepted)} token by token, {len(block.accepted)} as a block.** "
        f"On average: {alone:.3f} and {together:.3f} of {gamma}. Both outputs follow p.\n\n"
        f"{figures_table(('draft', 'p/q', 'draw', 'token by token', 'as a block'), rows)}\n\n"
        "Each draw is compared with a bound. Token by token it is min(1, p/q), and the first failure ends the "
        "draft. As a block, the last success decides: all tokens before it are accepted, too. The last row "
        "is the correction or bonus token."
    )


def _decision(verdict: Verdict, node: int) -> str:
    if verdict.beta[node] is None:
        return "not tested"
    return f"{verdict.bound[node]:.3f}: {'accepted' if node in verdict.accepted else 'rejected'}"


def worked_example(tab: gr.Tab) -> None:
    gr.Markdown(_INTRO)
    with gr.Row(elem_classes="probabilities"):
        inputs: list[Any] = [
            gr.Number(value, label=f"{name}({token})", step=0.05, min_width=110, elem_id=f"theory-{name}-{token}")
            for name, probs in (("p", EXAMPLE_P), ("q", EXAMPLE_Q))
            for token, value in zip(EXAMPLE_TOKENS, probs, strict=True)
        ]
    explained = [gr.Markdown(elem_id="theory-residual", elem_classes="figures"), chart_view("theory-parts")]
    gr.Markdown(_TRIAL_INTRO)
    with gr.Row():
        rule = gr.Dropdown(list(RULE_CHOICES), label="Acceptance rule", scale=3, min_width=300, elem_id="theory-rule")
        length = _length_slider(1, "theory-length")
        draw = gr.Button("Draw 10,000 tokens", scale=1, min_width=220, elem_id="theory-draw")
    drawn = [gr.Markdown(elem_id="theory-trial", elem_classes="figures"), chart_view("theory-shares")]
    gr.Markdown(_BLOCK_INTRO)
    with gr.Row():
        block_length = _length_slider(MAX_TRIAL_GAMMA, "theory-block-length")
        verify = gr.Button("Verify a draft", scale=1, min_width=220, elem_id="theory-verify")
    compared = [gr.Markdown(elem_id="theory-block", elem_classes="figures")]

    def explain(p: _Probs, q: _Probs) -> list[str]:
        return [describe_example(p, q), example_chart(p, q)]

    def draw_tokens(p: _Probs, q: _Probs, gamma: Any, choice: Any) -> list[str]:
        result = try_rule(choice, p, q, gamma, secrets.randbits(31))
        return [describe_trial(choice, result, p, q), trial_chart(result, p, q)]

    def compare(p: _Probs, q: _Probs, gamma: Any) -> list[str]:
        return [compare_rules(p, q, gamma, secrets.randbits(31))]

    changes = [tab.select, *(number.change for number in inputs)]
    for triggers, view, options, outputs in (
        (changes, explain, [], explained),
        ([draw.click], draw_tokens, [length, rule], drawn),
        ([*changes, block_length.change, verify.click], compare, [block_length], compared),
    ):
        call = partial(_checked, view, len(outputs))
        gr.on(triggers, call, [*inputs, *options], outputs, trigger_mode="always_last", **UNPROCESSED)


def _checked(view: Callable[..., list[str]], count: int, *values: Any) -> Any:
    """Return the `count` outputs of a view of p and q, the first values, with a note or an error."""
    half = len(EXAMPLE_TOKENS)
    try:
        p, p_note = parse_probs("p", values[:half])
        q, q_note = parse_probs("q", values[half : 2 * half])
        text, *charts = view(p, q, *values[2 * half :])
    except UserError as error:
        text, *charts = [f"**{error}.**", ""][:count]
    else:
        note = p_note + q_note
        text = f"{note}\n\n{text}" if note else text
    return [text, *charts] if charts else text


def _length_slider(default: int, elem_id: str) -> gr.Slider:
    label = "Draft length γ (tokens)"
    return gr.Slider(1, MAX_TRIAL_GAMMA, default, step=1, label=label, scale=2, min_width=220, elem_id=elem_id)
