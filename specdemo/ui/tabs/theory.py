"""Theory tab: closed forms at the sliders' values, with the latest run in every plot and table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import theory_curves as curves
from specdemo.ui import theory_tables as tables
from specdemo.ui.frames import Run
from specdemo.ui.tabs.plots import line_plot, plot_value
from specdemo.ui.tabs.residual import residual_example
from specdemo.ui.theory_point import TheoryPoint, point_of, point_words

_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_LABELS = {
    "alpha": "α: acceptance rate",
    "c": "c: draft token (steps)",
    "gamma": "γ: draft length (tokens)",
    "v": "v: verification (steps)",
    "o": "o: overhead (steps)",
    "c_hat": "ĉ: draft operations",
}
_SHADES = [f"var(--curve-{i})" for i in range(1, 5)]
_COMMON = {
    curves.RUN_SERIES: "var(--dot-run)",
    curves.SLIDER_SERIES: "var(--curve-set)",
    curves.SLIDER_DOT: "var(--dot-set)",
    curves.BASELINE_SERIES: "var(--curve-baseline)",
}
_GAMMAS = tuple(map(str, curves.CURVE_GAMMAS))
_COSTS = tuple(map(str, curves.CURVE_COSTS))
_BY_GAMMA = _COMMON | dict(zip([*_GAMMAS, curves.UNBOUNDED_SERIES], _SHADES, strict=True))
_BY_COST = _COMMON | dict(zip(_COSTS, _SHADES, strict=False))
_BY_FORMULA = _COMMON | {curves.THEOREM_SERIES: _SHADES[1], curves.SHARE_SERIES: _SHADES[1]}


@dataclass(frozen=True)
class TheoryPlot:
    """A plot of the tab; the legend lists the run, the sliders and `legend_series`."""

    curves: Callable[[curves.TheorySettings, TheoryPoint | None], list[curves.CurvePoint]]
    title: str
    x: str
    y: str
    colours: dict[str, str]
    legend_series: tuple[str, ...]
    legend_title: str
    elem_id: str

    def component(self) -> gr.LinePlot:
        series = (curves.RUN_SERIES, curves.SLIDER_SERIES, *self.legend_series)
        return line_plot(self.title, self.x, self.y, self.colours, series, self.elem_id, self.legend_title)


_UNBOUNDED = (*_GAMMAS, curves.UNBOUNDED_SERIES)
THEORY_PLOTS = (
    TheoryPlot(curves.token_curves, "Tokens per target pass", "α", "tokens", _BY_GAMMA, _UNBOUNDED, "γ", "plot-tokens"),
    TheoryPlot(curves.speed_curves, "Speed-up", "α", "speed-up", _BY_GAMMA, _GAMMAS, "γ", "plot-speed"),
    TheoryPlot(
        curves.gamma_curves,
        "Speed-up by draft length",
        "γ",
        "speed-up",
        _BY_FORMULA,
        (curves.THEOREM_SERIES,),
        " ",
        "plot-gamma",
    ),
    TheoryPlot(curves.best_gamma_curves, "Best draft length", "α", "γ", _BY_COST, _COSTS, "c", "plot-best"),
    TheoryPlot(curves.operation_curves, "Operations per token", "α", "× baseline", _BY_GAMMA, _GAMMAS, "γ", "plot-ops"),
    TheoryPlot(
        curves.share_curves,
        "α and accepted / drafted",
        "γ",
        "share",
        _BY_FORMULA,
        (curves.SHARE_SERIES,),
        " ",
        "plot-share",
    ),
)


def theory_tab(latest_run: Callable[[str], Run | None], tab: gr.Tab) -> None:
    """Lay out the tab. `latest_run` maps a session hash to a run."""
    gr.Markdown(_INTRO)
    sliders = _sliders()
    with gr.Row():
        set_sliders = gr.Button("Set sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    run_text, settings_text = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots = _plots()
    gr.Markdown("### Two definitions of α")
    table_by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("Published tables and this run", open=False, elem_id="theory-papers"):
        paper_tables = [gr.Markdown(elem_classes="figures") for _ in range(3)]
    residual_example(tab)

    def measured(request: gr.Request) -> tuple[TheoryPoint | None, str]:
        try:
            run = point_of(latest_run(request.session_hash or ""))
        except UserError as error:
            return None, f"*{error}.*"
        return run, point_words(run)

    def draw(request: gr.Request, *values: Any) -> Any:
        settings = curves.parse_settings(values)
        return gr.skip() if settings is None else _values(settings, *measured(request), plots)

    def set_to_run(request: gr.Request) -> Any:
        run, text = measured(request)
        if run is None:
            gr.Info(text)
            return gr.skip()
        return list(astuple(curves.settings_from_run(run)))

    hidden = {"show_progress": "hidden", "api_visibility": "private"}
    unprocessed = {"preprocess": False, **hidden}  # gradio would raise an error for an incomplete number
    drawn = [run_text, settings_text, *plots, table_by_gamma, *paper_tables]
    triggers = [tab.select, *(slider.change for slider in sliders)]
    gr.on(triggers, draw, sliders, drawn, trigger_mode="always_last", **unprocessed)
    set_sliders.click(set_to_run, None, sliders, **hidden).then(draw, sliders, drawn, **unprocessed)


def _values(
    settings: curves.TheorySettings, run: TheoryPoint | None, run_text: str, plots: list[gr.LinePlot]
) -> list[Any]:
    return [
        run_text,
        curves.describe_settings(settings),
        *(plot_value(plot, spec.curves(settings, run)) for plot, spec in zip(plots, THEORY_PLOTS, strict=True)),
        tables.gamma_table(settings, run),
        tables.guide_table(run),
        tables.leviathan_table_1(run),
        tables.leviathan_table_2(run),
    ]


def _plots() -> list[gr.LinePlot]:
    plots = []
    for first in range(0, len(THEORY_PLOTS), 2):
        with gr.Row():
            plots += [spec.component() for spec in THEORY_PLOTS[first : first + 2]]
    return plots


def _sliders() -> list[gr.Slider]:
    defaults, sliders = curves.TheorySettings(), []
    names = list(curves.SLIDER_BOUNDS)
    for row in (names[:3], names[3:]):
        with gr.Row():
            for name in row:
                minimum, maximum, step = curves.SLIDER_BOUNDS[name]
                sliders.append(
                    gr.Slider(
                        minimum,
                        maximum,
                        getattr(defaults, name),
                        step=step,
                        label=_LABELS[name],
                        min_width=240,
                        elem_id=f"theory-{name.replace('_', '-')}",
                    )
                )
    return sliders
