"""Worked example in the Theory tab."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import worked_example as worked
from specdemo.ui.tabs.plots import plot_value, probability_plot

_EXAMPLE_COLOURS = {part: f"var(--bar-{part})" for part in ("accepted", "correction", "rejected")}
_TRIAL_COLOURS = {"p": "var(--curve-set)", "drawn": "var(--bar-correction)", "q": "var(--curve-2)"}
_INTRO = """### Why the output follows the target's distribution
Enter any p (target) and q (drafter) over four tokens."""
_TRIAL_INTRO = """### Try a rule
Draw 10,000 tokens from this p and q with any acceptance rule. With an exact rule the drawn tokens follow p for every
q."""


def residual_example(tab: gr.Tab) -> None:
    gr.Markdown(_INTRO)
    p, q = _probability_inputs("p", worked.EXAMPLE_P), _probability_inputs("q", worked.EXAMPLE_Q)
    example_text = gr.Markdown(elem_id="theory-residual", elem_classes="figures")
    example_plot = probability_plot("p and q", _EXAMPLE_COLOURS, worked.EXAMPLE_ORDER, "theory-parts")
    gr.Markdown(_TRIAL_INTRO)
    with gr.Row():
        rule = gr.Dropdown(list(worked.rule_choices()), label="Rule", scale=3, min_width=300, elem_id="theory-rule")
        gamma = gr.Slider(
            1, 4, 1, step=1, label="Draft length γ (tokens)", scale=2, min_width=220, elem_id="theory-length"
        )
        draw = gr.Button("Draw 10,000 tokens", scale=1, min_width=220, elem_id="theory-draw")
    trial_text = gr.Markdown(elem_id="theory-trial", elem_classes="figures")
    with gr.Column(visible=False) as trial_results:  # screen readers announce an empty plot without a name
        trial_plot = probability_plot("p, drawn, q", _TRIAL_COLOURS, worked.TRIAL_ORDER, "theory-shares")

    def explain(*values: float | None) -> Any:
        try:
            target, drafter, note = _parse(values)
        except UserError as error:
            return [f"**{error}.**", None]
        text = note + worked.describe_example(target, drafter)
        return [text, plot_value(example_plot, worked.example_bars(target, drafter))]

    def try_rule(choice: str, length: int, *values: float | None) -> Any:
        try:
            target, drafter, note = _parse(values)
            result = worked.try_rule(choice, target, drafter, length, secrets.randbits(31))
        except UserError as error:
            return [f"**{error}.**", None, gr.Column(visible=False)]
        text = note + worked.describe_trial(choice, result, target, drafter)
        return [text, plot_value(trial_plot, worked.trial_bars(result, target, drafter)), gr.Column(visible=True)]

    hidden = {"show_progress": "hidden", "api_visibility": "private"}
    inputs = [*p, *q]
    triggers = [tab.select, *(number.change for number in inputs)]
    gr.on(triggers, explain, inputs, [example_text, example_plot], trigger_mode="always_last", **hidden)
    draw.click(try_rule, [rule, gamma, *inputs], [trial_text, trial_plot, trial_results], trigger_mode="once", **hidden)


def _probability_inputs(name: str, defaults: Sequence[float]) -> list[gr.Number]:
    with gr.Row():
        return [
            gr.Number(value, label=f"{name}({token})", step=0.05, min_width=110, elem_id=f"theory-{name}-{token}")
            for token, value in zip(worked.EXAMPLE_TOKENS, defaults, strict=True)
        ]


def _parse(values: Sequence[float | None]) -> tuple[list[float], list[float], str]:
    half = len(worked.EXAMPLE_TOKENS)
    p, p_note = worked.parse_probs("p", values[:half])
    q, q_note = worked.parse_probs("q", values[half:])
    note = p_note + q_note
    return p, q, f"{note}\n\n" if note else ""
