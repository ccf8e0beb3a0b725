"""Theory tab: plots of the closed forms, next to runs and published figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gradio as gr

from specdemo.bench.published_tables import published_figures
from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.ui.call_timeline import calls_view
from specdemo.ui.frames import Run
from specdemo.ui.markdown import escape_markdown, figures_table, link_papers
from specdemo.ui.run_store import RunStore
from specdemo.ui.tabs.components import RunViews, chart_view
from specdemo.ui.tabs.worked_example import worked_example
from specdemo.ui.theory_curves import THEORY_PLOTS, Coefficients, TheoryPoint, point_of

SLIDERS = {  # label, minimum, maximum, step
    "alpha": ("α: acceptance rate", 0, 1, 0.01),
    "c": ("c: draft token (steps)", 0, 2, 0.01),
    "gamma": ("γ: draft length (tokens)", 1, 16, 1),
    "v": ("v: verification (steps)", 0.5, 5, 0.01),
    "o": ("o: overhead (steps)", 0, 2, 0.01),
    "c_hat": ("ĉ: draft operations", 0, 2, 0.01),
}
_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_TWO_ALPHAS = """### Two definitions of α
α is the acceptance probability per *tested* token. It does not depend on γ. Other reports define α as accepted /
drafted. That ratio falls as γ grows: tokens after a rejection are not tested. Here, α = """
_FORMULAS = """Tokens per pass: (1 − α^(γ+1)) / (1 − α). Speed-up: tokens / (γc + 1) by Theorem 3.8, or
tokens / (v + γc + o). Operations per token: Theorem 3.11. Memory accesses per token, for the target's weights and KV
cache: section 3.4."""
_CALLS_INTRO = """### Model calls over time
A row per compared run, to scale: γ drafter calls, then a target pass. Hover a block to see its tokens."""
_HEAD = (
    "γ", "accepted / drafted", "tokens per pass", "speed-up, Theorem 3.8", "speed-up with v and o", "operations",
    "memory accesses",
)  # fmt: skip
_MAX_GAMMA = 64


def describe_settings(at: Coefficients) -> str:
    """Return the best draft lengths and the bound of Corollary 3.9."""
    alpha, c = at.alpha, at.c
    best, theorem_best = at.best_gamma(_MAX_GAMMA), theory.best_gamma(alpha, c, _MAX_GAMMA)
    theorem = theory.walltime_improvement(alpha, theorem_best, c)
    thumb = f" The rule of thumb √(1/c − 1) = {theory.thumb_gamma(c):.1f} ignores α." if c else ""
    bound = "α ≤ c: no γ improves the speed (Corollary 3.9). Use autoregressive decoding."
    if theory.can_improve(alpha, c):
        bound = (
            f"α > c: the best γ yields at least (1 + α) / (1 + c) = {theory.least_improvement(alpha, c):.2f}×. "
            "This bound requires v = 1 and o = 0 (Corollary 3.9)."
        )
    return (
        f"- Best γ: **{_gamma_text(best)}** with v and o ({at.at_gamma(best).speedup:.2f}×), "
        f"{_gamma_text(theorem_best)} by Theorem 3.8 ({theorem:.2f}×).{thumb}\n- {bound}"
    )


def _gamma_text(gamma: int) -> str:
    return "0, the baseline" if not gamma else f"{gamma} or more" if gamma == _MAX_GAMMA else str(gamma)


def figures_by_gamma(at: Coefficients, run: TheoryPoint | None) -> str:
    """Return the closed forms by draft length, and of a run, below its measurements."""
    rows = [_closed_forms(f"{gamma:g}", at.at_gamma(gamma)) for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, at.gamma})]
    if run:
        own = run.coefficients
        measured = (run.share, run.tokens, None, run.speedup, run.operations, None)
        rows.append((f"**this run**, {own.gamma:.2f}: measured", *measured))
        rows.append(_closed_forms(f"**this run**, {own.gamma:.2f}: closed forms", own))
    return f"{_TWO_ALPHAS}{at.alpha:g}.\n\n{figures_table(_HEAD, rows)}\n\n{_FORMULAS}"


def _closed_forms(label: str, at: Coefficients) -> tuple[object, ...]:
    return (
        label,
        theory.accepted_share(at.alpha, at.gamma),
        theory.expected_tokens(at.alpha, at.gamma),
        theory.walltime_improvement(at.alpha, at.gamma, at.c),
        at.speedup,
        theory.operations(at.alpha, at.gamma, at.c_hat),
        theory.memory_accesses(at.alpha, at.gamma),
    )


def describe_run(run: TheoryPoint) -> str:
    """Return the coefficients of a run, and its speed-up by the definitions of the papers."""
    at, recipe = run.coefficients, run.lane.recipe
    source = "accepted / tested under its rule" if run.lane.counted else "the mean overlap β = Σ min(p, q) of all tests"
    sentences = [
        f"**This run** ({escape_markdown(recipe['method'])}, T {recipe['temperature']:g}): α = {at.alpha:.3f}, "
        f"estimated by {source}; accepted / drafted = {run.share:.3f}; γ = {at.gamma:.2f} draft tokens per step."
    ]
    if math.isnan(at.c):
        sentences.append("Without an AR baseline c, v, o and the speed-up are unknown: tick *Compare* and run again.")
    else:
        sentences.append(
            f"In AR steps, a draft token took c = {at.c:.3f}, a verification pass v = {at.v:.2f}, and the host "
            f"o = {at.o:.2f} per step."
        )
    theorem = theory.walltime_improvement(at.alpha, at.gamma, at.c)
    if run.speedup > 0 and theorem > 0:
        sentences.append(
            f"The run was **{run.speedup:.2f}×** as fast as AR decoding, {run.speedup / theorem:.0%} of Theorem 3.8. "
            f"The theorem gives this speed-up for α = {theory.alpha_of_speedup(run.speedup, at.gamma, at.c):.2f}. The "
            f"formula (1 + γα) / (1 + γc) predicts {theory.share_speedup(run.share, at.gamma, at.c):.2f}×."
        )
    if not run.chains:
        sentences.append("The drafts were trees, and γ counts their nodes: the curves for chains do not apply exactly.")
    return " ".join(sentences)


def parse_settings(values: Sequence[Any]) -> Coefficients | None:
    """Validate raw slider values; return None for incomplete numbers."""
    for value, (_, minimum, maximum, _) in zip(values, SLIDERS.values(), strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
            return None
    return Coefficients(**dict(zip(SLIDERS, values, strict=True)))


def slider_values(measured: Coefficients) -> list[float]:
    """Clamp measurements to the sliders; use defaults for unknown values."""
    values = []
    for name, (_, minimum, maximum, step) in SLIDERS.items():
        value = getattr(measured, name)
        value = getattr(Coefficients, name) if math.isnan(value) else min(maximum, max(minimum, value))
        values.append(round(value) if step == 1 else round(value, 2))
    return values


def theory_tab(runs: RunStore, tab: gr.Tab) -> None:
    """Lay out the tab."""
    gr.Markdown(link_papers(_INTRO))
    views = RunViews(runs, tab, "theory-refresh")
    with gr.Row(elem_classes="grid"):
        sliders = [_slider(name, *SLIDERS[name]) for name in SLIDERS]
    set_sliders = gr.Button("Set sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    run_text, settings_text = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots = chart_view("theory-plots", *THEORY_PLOTS)
    by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("Published tables", open=False, elem_id="theory-papers"):
        gr.Markdown(link_papers(published_figures()), elem_classes="figures")
    _calls_section(views)
    worked_example(tab)

    def draw(run: Run | None, *values: Any) -> Any:
        at = parse_settings(values)
        if at is None:
            return gr.skip()
        point: TheoryPoint | None = None
        try:
            point = point_of(run)
            text = describe_run(point)
        except UserError as error:
            text = f"*{error}.*"
        charts = "".join(plot.chart(name, at, point) for name, plot in THEORY_PLOTS.items())
        return text, describe_settings(at), charts, figures_by_gamma(at, point)

    def set_to_run(run: Run | None) -> Any:
        try:
            return slider_values(point_of(run).coefficients)
        except UserError as error:
            gr.Info(f"{error}.")
            return gr.skip()

    triggers = [*views.changes, *(slider.change for slider in sliders)]
    views.connect(triggers, draw, sliders, [run_text, settings_text, plots, by_gamma])
    views.connect([set_sliders.click], set_to_run, [], sliders)


def _slider(name: str, label: str, low: float, high: float, step: float) -> gr.Slider:
    elem_id = f"theory-{name.replace('_', '-')}"
    return gr.Slider(low, high, getattr(Coefficients, name), step=step, label=label, elem_id=elem_id)


def _calls_section(views: RunViews) -> None:
    gr.Markdown(_CALLS_INTRO)
    with gr.Row():
        first = gr.Slider(0, 200, 0, step=1, label="First token", min_width=220, elem_id="theory-calls-first")
        count = gr.Slider(4, 64, 16, step=4, label="Tokens", min_width=220, elem_id="theory-calls-count")
    picture = gr.HTML(elem_id="theory-calls", apply_default_css=False)

    def draw(run: Run | None, start: Any, tokens: Any) -> Any:
        if not all(isinstance(value, (int, float)) and 0 <= value <= 1000 for value in (start, tokens)):
            return gr.skip()
        return calls_view(run, int(start), max(1, int(tokens)))

    views.connect([*views.changes, first.change, count.change], draw, [first, count], [picture])
