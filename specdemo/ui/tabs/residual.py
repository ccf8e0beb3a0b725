"""The second half of the theory tab: why the text has the target's law, and a trial of any rule."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import worked_example as worked
from specdemo.ui.tabs.plots import bars, shown

PARTS = {"kept": "var(--bar-kept)", "correction": "var(--bar-correction)", "rejected": "var(--bar-rejected)"}
DRAWN = {"p": "var(--curve-set)", "drawn": "var(--bar-correction)", "q": "var(--curve-2)"}

INTRO = """### Why the text has the target's law
Type any p (the target's) and q (the drafter's) over four tokens."""

TRIAL = """### Try a rule
10,000 tokens drawn from these p and q by the program's own rules and noise. An exact rule gives p back, whatever q
is."""


def residual(looked_at: gr.Tab) -> None:
    """Lay it out and wire it; `looked_at` is the tab that it stands in."""
    gr.Markdown(INTRO)
    p, q = _law("p", worked.P), _law("q", worked.Q)
    explained = gr.Markdown(elem_id="theory-residual", elem_classes="figures")
    parts = bars("p and q", PARTS, worked.PARTS_ORDER, "theory-parts")
    gr.Markdown(TRIAL)
    with gr.Row():
        rule = gr.Dropdown(list(worked.choices()), label="Rule", scale=3, min_width=300, elem_id="theory-rule")
        gamma = gr.Slider(1, 4, 1, step=1, label="Draft length γ", scale=2, min_width=220, elem_id="theory-length")
        go = gr.Button("Draw 10,000 tokens", scale=1, min_width=220, elem_id="theory-draw")
    outcome = gr.Markdown(elem_id="theory-trial", elem_classes="figures")
    with gr.Column(visible=False) as tried:  # a place for a plot that is not there yet has no name to be read out
        shares = bars("p, drawn, q", DRAWN, worked.SHARES_ORDER, "theory-shares")

    def explain(*values: float | None) -> Any:
        try:
            target, drafter, note = _laws(values)
        except UserError as error:
            return [f"**{error}.**", None]
        return [note + worked.example_words(target, drafter), shown(parts, worked.example_bars(target, drafter))]

    def try_rule(choice: str, length: int, *values: float | None) -> Any:
        try:
            target, drafter, note = _laws(values)
            done = worked.try_rule(choice, target, drafter, length, secrets.randbits(31))
        except UserError as error:
            return [f"**{error}.**", None, gr.Column(visible=False)]
        said = note + worked.trial_words(choice, done, target, drafter)
        return [said, shown(shares, worked.trial_bars(done, target, drafter)), gr.Column(visible=True)]

    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    moved = [looked_at.select, *(number.change for number in (*p, *q))]
    gr.on(moved, explain, [*p, *q], [explained, parts], trigger_mode="always_last", **quiet)
    go.click(try_rule, [rule, gamma, *p, *q], [outcome, shares, tried], trigger_mode="once", **quiet)


def _law(name: str, usual: Sequence[float]) -> list[gr.Number]:
    with gr.Row():
        return [
            gr.Number(value, label=f"{name}({token})", step=0.05, min_width=110, elem_id=f"theory-{name}-{token}")
            for token, value in zip(worked.TOKENS, usual, strict=True)
        ]


def _laws(values: Sequence[float | None]) -> tuple[list[float], list[float], str]:
    """p, q, and what had to be done to them."""
    half = len(worked.TOKENS)
    p, changed = worked.reference_probs("p", values[:half])
    q, likewise = worked.reference_probs("q", values[half:])
    note = changed + likewise
    return p, q, f"{note}\n\n" if note else ""
