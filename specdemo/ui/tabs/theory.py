"""Theory tab, which plots the closed forms at the sliders' values, with the latest run.

Only published measurements are quoted; other values are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import gradio as gr

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.core.published import LEVIATHAN_2
from specdemo.ui import theory_curves as curves
from specdemo.ui.call_timeline import CALLS_CSS, calls_svg
from specdemo.ui.frames import Run
from specdemo.ui.line_chart import LineChart
from specdemo.ui.markdown import escape_markdown, figures_table, link_papers
from specdemo.ui.run_store import RunStore
from specdemo.ui.tabs.components import SHOWN_RUN_JS, UNPROCESSED, chart_view
from specdemo.ui.tabs.worked_example import residual_example
from specdemo.ui.theory_curves import SLIDERS, TheoryPoint, TheorySettings, point_of, point_words

# 2211.17192, Table 1: alpha and gamma at c = 0.
_LEVIATHAN_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))

# 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B on 16 TPU v4. Task, measured speed-up.
_CHEN = (("XSum, nucleus", 1.92), ("XSum, greedy", 2.01), ("HumanEval, nucleus", 2.46))
_CHEN_GAMMA, _CHEN_COST = 4, 0.128

_GUIDE_COST = 0.1
_GUIDE = ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5))  # gamma and accepted / drafted, assumed by the practice guide
_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_CALLS_INTRO = """### Model calls over time
A row per compared run, to scale: γ drafter calls, then a target pass. Hover a block to see its tokens."""
_SHADES = [f"var(--curve-{i})" for i in range(1, 5)]
_COMMON = {
    curves.RUN_SERIES: "var(--dot-run)",
    curves.SLIDER_SERIES: "var(--curve-set)",
    curves.SLIDER_DOT: "var(--dot-set)",
    curves.BASELINE_SERIES: "var(--curve-baseline)",
}
_GAMMAS = tuple(map(str, curves.CURVE_GAMMAS))
_COSTS = tuple(map(str, curves.CURVE_COSTS))
_UNBOUNDED = (*map(str, curves.TOKEN_GAMMAS), curves.UNBOUNDED_SERIES)
_BY_GAMMA = _COMMON | dict(zip(_GAMMAS, _SHADES, strict=False))
_BY_TOKEN_GAMMA = _COMMON | dict(zip(_UNBOUNDED, [*_SHADES[:3], "var(--curve-5)", _SHADES[3]], strict=True))
_BY_COST = _COMMON | dict(zip(_COSTS, _SHADES, strict=False))
_BY_FORMULA = _COMMON | {curves.THEOREM_SERIES: _SHADES[1], curves.SHARE_SERIES: _SHADES[1]}


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
        rows.append((_run_label(run.gamma), run.share, run.tokens, run.theorem, run.speedup, run.operations))
    note = " The last row is this run: measured, except Theorem 3.8." if run else ""
    return (
        f"α = {alpha:g} is the acceptance probability per *tested* token. It does not depend on γ. "
        "Other reports define α as accepted / drafted. That ratio falls as γ grows: tokens after a rejection are "
        f"not tested.{note}\n\n{figures_table(head, rows)}"
    )


def leviathan_table_1(run: TheoryPoint | None) -> str:
    rows: list[Sequence[object]] = [
        (alpha, gamma, theory.operations(alpha, gamma, 0), theory.walltime_improvement(alpha, gamma, 0))
        for alpha, gamma in _LEVIATHAN_1
    ]
    if run:
        rows.append((_run_label(run.alpha), run.gamma, run.operations, run.speedup))
    note = " The row of this run includes its drafting cost." if run else ""
    return (
        f"Leviathan et al., Table 1, computed for c = ĉ = 0.{note}\n\n"
        f"{figures_table(('α', 'γ', 'operations', 'speed-up'), rows)}"
    )


def leviathan_table_2(run: TheoryPoint | None) -> str:
    """Published measurements and the speed-up of Theorem 3.8."""
    rows: list[Sequence[object]] = []
    for task, drafter, temperature, gamma, alpha, c, measured in LEVIATHAN_2:
        theorem = theory.walltime_improvement(alpha, gamma, c)
        name = f"{task}, T5-{drafter}"
        rows.append((name, str(temperature), gamma, alpha, c, f"{measured:.1f}", theorem, f"{measured / theorem:.0%}"))
    if run:
        realised = f"{run.speedup / run.theorem:.0%}" if run.speedup and run.theorem else None
        label = _run_label(escape_markdown(run.method))
        rows.append((label, f"{run.temperature:g}", run.gamma, run.alpha, run.c, run.speedup, run.theorem, realised))
    head = ("task, drafter", "T", "γ", "α", "c", "measured", "Theorem 3.8", "realised")
    return (
        "Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1. "
        f"Speed-ups are measured by the authors; Theorem 3.8 is computed.\n\n{figures_table(head, rows)}"
    )


def chen_table(run: TheoryPoint | None) -> str:
    """Published measurements and the alpha from which Theorem 3.8 derives them."""
    inputs: list[tuple[object, float, float | None, float | None]] = [
        (task, _CHEN_GAMMA, _CHEN_COST, measured) for task, measured in _CHEN
    ]
    if run:
        inputs.append((_run_label(escape_markdown(run.method)), run.gamma, run.c, run.speedup))
    rows = [
        (label, gamma, c, speed, None if c is None or not speed else theory.alpha_of_speedup(speed, gamma, c))
        for label, gamma, c, speed in inputs
    ]
    head = ("task", "γ", "c", "measured", "α for Theorem 3.8")
    return (
        "Chen et al. 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B, batch size 1. Speed-ups are measured "
        f"by the authors. The last column is computed: the α that explains the speed-up.\n\n{figures_table(head, rows)}"
    )


def guide_table(run: TheoryPoint | None) -> str:
    """Convert accepted / drafted to alpha; both formulas yield the same speed-up."""
    inputs: list[tuple[object, float, float, float | None]] = [
        (gamma, gamma, share, _GUIDE_COST) for gamma, share in _GUIDE
    ]
    if run:
        inputs.append((_run_label(run.gamma), run.gamma, run.share, run.c))
    rows = []
    for label, gamma, share, c in inputs:
        alpha = theory.alpha_of_share(share, gamma)
        by_share = None if c is None else theory.share_speedup(share, gamma, c)
        by_alpha = None if c is None else theory.walltime_improvement(alpha, gamma, c)
        rows.append((label, share, c, by_share, alpha, by_alpha))
    head = ("γ", "accepted / drafted", "c", "(1 + γα) / (1 + γc)", "α per tested token", "Theorem 3.8")
    return (
        "The practice guide defines α as accepted / drafted. The table converts it to α per tested token. "
        "Each formula is correct for its definition of α.\n\n" + figures_table(head, rows)
    )


def _run_label(value: object) -> str:
    return f"**this run**, {value:.2f}" if isinstance(value, float) else f"**this run**, {value}"


@dataclass(frozen=True)
class TheoryPlot:
    """Plot of the tab. The run, the sliders and `legend_series` have labels."""

    curves: Callable[[TheorySettings, TheoryPoint | None], list[curves.CurvePoint]]
    elem_id: str
    title: str
    x: str
    y: str
    colours: dict[str, str]
    legend_series: tuple[str, ...]
    legend_title: str = " "

    def svg(self, settings: TheorySettings, run: TheoryPoint | None) -> str:
        named = {series: f"{self.legend_title} {series}".strip() for series in self.legend_series}
        labels = {curves.RUN_SERIES: curves.RUN_SERIES, curves.SLIDER_DOT: curves.SLIDER_SERIES, **named}
        return LineChart(self.title, self.x, self.y, self.colours, labels).svg(self.curves(settings, run))


_THEOREM, _SHARE = (curves.THEOREM_SERIES,), (curves.SHARE_SERIES,)
THEORY_PLOTS = (
    TheoryPlot(
        *(curves.token_curves, "plot-tokens", "Tokens per target pass", "α", "tokens"), _BY_TOKEN_GAMMA, _UNBOUNDED, "γ"
    ),
    TheoryPlot(curves.speed_curves, "plot-speed", "Speed-up", "α", "speed-up", _BY_GAMMA, _GAMMAS, "γ"),
    TheoryPlot(curves.gamma_curves, "plot-gamma", "Speed-up by draft length", "γ", "speed-up", _BY_FORMULA, _THEOREM),
    TheoryPlot(curves.best_gamma_curves, "plot-best", "Best draft length", "α", "γ", _BY_COST, _COSTS, "c"),
    TheoryPlot(curves.operation_curves, "plot-ops", "Operations per token", "α", "× baseline", _BY_GAMMA, _GAMMAS, "γ"),
    TheoryPlot(curves.share_curves, "plot-share", "α and accepted / drafted", "γ", "share", _BY_FORMULA, _SHARE),
)


def theory_tab(runs: RunStore, tab: gr.Tab) -> None:
    """Lay out the tab. It shows the displayed run, which may be a recording."""
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
        paper_tables = [gr.Markdown(elem_classes="figures") for _ in range(4)]
    _calls_section(runs, shown_id, tab)
    residual_example(tab)

    def measured(run_id: Any, request: gr.Request) -> tuple[TheoryPoint | None, str]:
        try:
            run = point_of(runs.get(run_id) or runs.latest(request.session_hash or ""))
        except UserError as error:
            return None, f"*{error}.*"
        return run, point_words(run)

    def draw(request: gr.Request, run_id: Any, *values: Any) -> Any:
        settings = curves.parse_settings(values)
        if settings is None:
            return gr.skip()
        run, text = measured(run_id, request)
        charts = (spec.svg(settings, run) for spec in THEORY_PLOTS)
        papers = (guide_table(run), leviathan_table_1(run), leviathan_table_2(run), chen_table(run))
        words = (text, curves.describe_settings(settings))
        return [*words, *charts, gamma_table(settings, run), *papers]

    def set_to_run(request: gr.Request, run_id: Any) -> Any:
        run, text = measured(run_id, request)
        if run is None:
            gr.Info(text)
            return gr.skip()
        return list(astuple(curves.settings_from_run(run)))

    drawn = [run_text, settings_text, *plots, table_by_gamma, *paper_tables]
    triggers = [tab.select, *(slider.change for slider in sliders)]
    shown: dict[str, Any] = {"js": SHOWN_RUN_JS, **UNPROCESSED}
    gr.on(triggers, draw, [shown_id, *sliders], drawn, trigger_mode="always_last", **shown)
    set_sliders.click(set_to_run, shown_id, sliders, **shown).then(draw, [shown_id, *sliders], drawn, **shown)


def calls_view(run: Run | None, first_token: int, tokens: int) -> str:
    if run is None or not run.over:
        return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
    lanes = list(run.lanes.values())
    if picture := calls_svg(lanes, first_token, tokens):
        return picture
    if calls_svg(lanes, 0, tokens):
        return "<p>The run ends before this token: choose an earlier first token.</p>"
    return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"


def _calls_section(runs: RunStore, shown_id: gr.Textbox, tab: gr.Tab) -> None:
    gr.Markdown(_CALLS_INTRO)
    with gr.Row():
        first = gr.Slider(0, 200, 0, step=1, label="First token", min_width=220, elem_id="theory-calls-first")
        count = gr.Slider(4, 64, 16, step=4, label="Tokens", min_width=220, elem_id="theory-calls-count")
    picture = gr.HTML(elem_id="theory-calls", css_template=CALLS_CSS, apply_default_css=False)

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
            plots += [chart_view(spec.elem_id) for spec in THEORY_PLOTS[first : first + 2]]
    return plots


def _sliders() -> list[gr.Slider]:
    defaults, sliders = astuple(TheorySettings()), []
    for first in range(0, len(SLIDERS), 3):
        with gr.Row():
            for i, (name, (label, low, high, step)) in list(enumerate(SLIDERS.items()))[first : first + 3]:
                about: dict[str, Any] = {
                    "label": label,
                    "min_width": 240,
                    "elem_id": f"theory-{name.replace('_', '-')}",
                }
                sliders.append(gr.Slider(low, high, defaults[i], step=step, **about))
    return sliders
