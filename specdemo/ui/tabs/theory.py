"""Theory tab, which plots the closed forms. A test compares the published tables with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import gradio as gr

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.ui.call_timeline import call_timeline
from specdemo.ui.frames import Run
from specdemo.ui.markdown import escape_markdown, figures_table, link_papers
from specdemo.ui.run_store import RunStore
from specdemo.ui.tabs.components import SHOWN_RUN_JS, UNPROCESSED, chart_view
from specdemo.ui.tabs.worked_example import residual_example
from specdemo.ui.theory_curves import (
    SLIDERS,
    THEORY_PLOTS,
    TheoryPoint,
    TheorySettings,
    describe_settings,
    parse_settings,
    point_of,
    point_words,
    settings_from_run,
)

_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_CALLS_INTRO = """### Model calls over time
A row per compared run, to scale: γ drafter calls, then a target pass. Hover a block to see its tokens."""


def gamma_table(settings: TheorySettings, run: TheoryPoint | None) -> str:
    alpha = settings.alpha
    rows: list[Sequence[object]] = [
        (
            gamma,
            theory.accepted_share(alpha, gamma),
            theory.expected_tokens(alpha, gamma),
            theory.walltime_improvement(alpha, gamma, settings.c),
            settings.modelled_speedup(gamma),
            theory.operations(alpha, gamma, settings.c_hat),
        )
        for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, settings.gamma})
    ]
    head = ("γ", "accepted / drafted", "tokens per pass", "Theorem 3.8", "with v and o", "operations")
    if run:
        rows.append((f"**this run**, {run.gamma:.2f}", run.share, run.tokens, run.theorem, run.speedup, run.operations))
    note = " The last row is this run: measured, except Theorem 3.8." if run else ""
    return (
        f"α = {alpha:g} is the acceptance probability per *tested* token. It does not depend on γ. "
        "Other reports define α as accepted / drafted. That ratio falls as γ grows: tokens after a rejection are "
        f"not tested.{note}\n\n{figures_table(head, rows)}"
    )


PAPER_TABLES = """The practice guide defines α as accepted / drafted. The table converts it to α per tested token.
Each formula is correct for its definition of α.

| γ | accepted / drafted | c | (1 + γα) / (1 + γc) | α per tested token | Theorem 3.8 |
|---|---|---|---|---|---|
| 2 | 0.80 | 0.10 | 2.17 | 0.86 | 2.17 |
| 4 | 0.70 | 0.10 | 2.71 | 0.86 | 2.71 |
| 6 | 0.60 | 0.10 | 2.88 | 0.86 | 2.88 |
| 8 | 0.50 | 0.10 | 2.78 | 0.84 | 2.78 |

Leviathan et al., Table 1, computed for c = ĉ = 0.

| α | γ | operations | speed-up |
|---|---|---|---|
| 0.60 | 2 | 1.53 | 1.96 |
| 0.70 | 3 | 1.58 | 2.53 |
| 0.80 | 2 | 1.23 | 2.44 |
| 0.80 | 5 | 1.63 | 3.69 |
| 0.90 | 2 | 1.11 | 2.71 |
| 0.90 | 10 | 1.60 | 6.86 |

Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1. Speed-ups are measured by the authors; Theorem 3.8 is
computed.

| task, drafter | T | γ | α | c | measured | Theorem 3.8 | realised |
|---|---|---|---|---|---|---|---|
| EnDe, T5-small | 0 | 7 | 0.75 | 0.02 | 3.4 | 3.16 | 108% |
| EnDe, T5-base | 0 | 7 | 0.80 | 0.04 | 2.8 | 3.25 | 86% |
| EnDe, T5-large | 0 | 7 | 0.82 | 0.11 | 1.7 | 2.50 | 68% |
| EnDe, T5-small | 1 | 7 | 0.62 | 0.02 | 2.6 | 2.26 | 115% |
| EnDe, T5-base | 1 | 5 | 0.68 | 0.04 | 2.4 | 2.35 | 102% |
| EnDe, T5-large | 1 | 3 | 0.71 | 0.11 | 1.4 | 1.93 | 72% |
| CNN/DM, T5-small | 0 | 5 | 0.65 | 0.02 | 3.1 | 2.40 | 129% |
| CNN/DM, T5-base | 0 | 5 | 0.73 | 0.04 | 3.0 | 2.62 | 115% |
| CNN/DM, T5-large | 0 | 3 | 0.74 | 0.11 | 2.2 | 2.02 | 109% |
| CNN/DM, T5-small | 1 | 5 | 0.53 | 0.02 | 2.3 | 1.89 | 122% |
| CNN/DM, T5-base | 1 | 3 | 0.55 | 0.04 | 2.2 | 1.80 | 122% |
| CNN/DM, T5-large | 1 | 3 | 0.56 | 0.11 | 1.7 | 1.54 | 110% |

Chen et al. 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B, batch size 1. Speed-ups are measured by the
authors. The last column is computed: the α that explains the speed-up.

| task | γ | c | measured | α for Theorem 3.8 |
|---|---|---|---|---|
| XSum, nucleus | 4 | 0.128 | 1.92 | 0.72 |
| XSum, greedy | 4 | 0.128 | 2.01 | 0.75 |
| HumanEval, nucleus | 4 | 0.128 | 2.46 | 0.85 |
"""


def figures_of_run(run: TheoryPoint | None) -> str:
    """Return the figures of the published tables for a run; empty without one."""
    if run is None:
        return ""
    by_share: float | None = None
    explained: float | None = None
    realised: str | None = None
    if run.c is not None:
        by_share = theory.share_speedup(run.share, run.gamma, run.c)
    if run.c is not None and run.speedup and run.theorem:
        explained = theory.alpha_of_speedup(run.speedup, run.gamma, run.c)
        realised = f"{run.speedup / run.theorem:.0%}"
    rows: list[tuple[str, object]] = [
        ("T", f"{run.temperature:g}"),
        ("γ", run.gamma),
        ("c", run.c),
        ("accepted / drafted", run.share),
        ("(1 + γα) / (1 + γc)", by_share),
        ("α per tested token", run.alpha),
        ("Theorem 3.8", run.theorem),
        ("measured speed-up", run.speedup),
        ("realised", realised),
        ("α for Theorem 3.8", explained),
        ("operations, with drafting", run.operations),
    ]
    return figures_table(("figure", f"**this run**, {escape_markdown(run.method)}"), rows)


def theory_tab(runs: RunStore, tab: gr.Tab) -> None:
    gr.Markdown(link_papers(_INTRO))
    shown_id = gr.Textbox(visible=False)
    sliders = _sliders()
    with gr.Row():
        set_sliders = gr.Button("Set sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    run_text, settings_text = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots = _plots()
    gr.Markdown("### Two definitions of α")
    table_by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("Published tables and this run", open=False, elem_id="theory-papers"):
        gr.Markdown(link_papers(PAPER_TABLES), elem_classes="figures")
        run_figures = gr.Markdown(elem_classes="figures")
    _calls_section(runs, shown_id, tab)
    residual_example(tab)

    def measured(run_id: Any, request: gr.Request) -> tuple[TheoryPoint | None, str]:
        try:
            run = point_of(runs.get(run_id) or runs.latest(request.session_hash or ""))
        except UserError as error:
            return None, f"*{error}.*"
        return run, point_words(run)

    def draw(request: gr.Request, run_id: Any, *values: Any) -> Any:
        settings = parse_settings(values)
        if settings is None:
            return gr.skip()
        run, text = measured(run_id, request)
        charts = (plot.chart(settings, run) for plot in THEORY_PLOTS)
        return [text, describe_settings(settings), *charts, gamma_table(settings, run), figures_of_run(run)]

    def set_to_run(request: gr.Request, run_id: Any) -> Any:
        run, text = measured(run_id, request)
        if run is None:
            gr.Info(text)
            return gr.skip()
        return list(astuple(settings_from_run(run)))

    drawn = [run_text, settings_text, *plots, table_by_gamma, run_figures]
    triggers = [tab.select, *(slider.change for slider in sliders)]
    shown: dict[str, Any] = {"js": SHOWN_RUN_JS, **UNPROCESSED}
    gr.on(triggers, draw, [shown_id, *sliders], drawn, trigger_mode="always_last", **shown)
    set_sliders.click(set_to_run, shown_id, sliders, **shown).then(draw, [shown_id, *sliders], drawn, **shown)


def calls_view(run: Run | None, first_token: int, tokens: int) -> str:
    if run is None or not run.over:
        return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
    lanes = list(run.lanes.values())
    if picture := call_timeline(lanes, first_token, tokens):
        return picture
    if call_timeline(lanes, 0, tokens):
        return "<p>The run ends before this token: choose an earlier first token.</p>"
    return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"


def _calls_section(runs: RunStore, shown_id: gr.Textbox, tab: gr.Tab) -> None:
    gr.Markdown(_CALLS_INTRO)
    with gr.Row():
        first = gr.Slider(0, 200, 0, step=1, label="First token", min_width=220, elem_id="theory-calls-first")
        count = gr.Slider(4, 64, 16, step=4, label="Tokens", min_width=220, elem_id="theory-calls-count")
    picture = gr.HTML(elem_id="theory-calls", apply_default_css=False)

    def draw(request: gr.Request, run_id: Any, start: Any, tokens: Any) -> Any:
        if not all(isinstance(value, (int, float)) and 0 <= value <= 1000 for value in (start, tokens)):
            return gr.skip()
        run = runs.get(run_id) or runs.latest(request.session_hash or "")
        return calls_view(run, int(start), max(1, int(tokens)))

    triggers, inputs = [tab.select, first.change, count.change], [shown_id, first, count]
    gr.on(triggers, draw, inputs, picture, js=SHOWN_RUN_JS, trigger_mode="always_last", **UNPROCESSED)


def _plots() -> list[gr.HTML]:
    plots = []
    for first in range(0, len(THEORY_PLOTS), 2):
        with gr.Row():
            plots += [chart_view(plot.elem_id) for plot in THEORY_PLOTS[first : first + 2]]
    return plots


def _sliders() -> list[gr.Slider]:
    defaults = asdict(TheorySettings())
    names = [*SLIDERS]
    sliders = []
    for first in range(0, len(names), 3):
        with gr.Row():
            for name in names[first : first + 3]:
                label, low, high, step = SLIDERS[name]
                elem_id = f"theory-{name.replace('_', '-')}"
                sliders.append(
                    gr.Slider(low, high, defaults[name], step=step, label=label, min_width=240, elem_id=elem_id)
                )
    return sliders
