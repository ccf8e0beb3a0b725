"""The theory tab: the closed forms under sliders, with this run's point on every curve and in every table.

Drawn when it is looked at or a slider is moved, never while tokens stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import theory_curves as understand
from specdemo.ui import theory_tables as tables
from specdemo.ui.frames import Run
from specdemo.ui.tabs.plots import lines, shown
from specdemo.ui.tabs.residual import residual
from specdemo.ui.theory_curves import BOUNDS, COSTS, DOT, ENDLESS, GAMMAS, PLAIN, RUN, SET, SHARE, THEOREM, Settings
from specdemo.ui.theory_point import TheoryPoint, point_of, point_words

Latest = Callable[[str], Run | None]

INTRO = """What speculation can win follows from α, the chance that a tested token is kept, and from what a round costs.
Costs are in plain passes of the target: c for a drafted token, v for verifying γ + 1 rows, o for the rest of a round; ĉ
is c in operations. Dots: where the sliders stand, and what *this run* measured. *Leviathan et al. 2211.17192, Figures 2
to 4.*"""

LABELS = {
    "alpha": "α: acceptance",
    "c": "c: drafting a token",
    "gamma": "γ: draft length",
    "v": "v: verifying",
    "o": "o: the rest",
    "c_hat": "ĉ: operations",
}

SHADES = [f"var(--curve-{i})" for i in range(1, 5)]
INK = {RUN: "var(--dot-run)", SET: "var(--curve-set)", DOT: "var(--dot-set)", PLAIN: "var(--curve-plain)"}
BY_GAMMA = INK | dict(zip([*map(str, GAMMAS), ENDLESS], SHADES, strict=True))
BY_COST = INK | dict(zip(map(str, COSTS), SHADES, strict=False))
BY_FORM = INK | {THEOREM: SHADES[1], SHARE: SHADES[1]}
DRAFTS, PRICES = tuple(map(str, GAMMAS)), tuple(map(str, COSTS))

DRAWINGS = (  # two in a row: what gives the curves, title, x, y, colours, named in the legend, its title, id
    (
        (understand.token_curves, "Tokens per pass", "α", "tokens", BY_GAMMA, (*DRAFTS, ENDLESS), "γ", "plot-tokens"),
        (understand.speed_curves, "Speed-up", "α", "speed-up", BY_GAMMA, DRAFTS, "γ", "plot-speed"),
    ),
    (
        (
            understand.gamma_curves,
            "Speed-up by draft length",
            "γ",
            "speed-up",
            BY_FORM,
            (THEOREM,),
            " ",
            "plot-gamma",
        ),
        (understand.best_curves, "Best draft length", "α", "γ", BY_COST, PRICES, "c", "plot-best"),
    ),
    (
        (understand.operation_curves, "Operations per token", "α", "times plain", BY_GAMMA, DRAFTS, "γ", "plot-ops"),
        (understand.share_curves, "α, and accepted / drafted", "γ", "share", BY_FORM, (SHARE,), " ", "plot-share"),
    ),
)


def theory_tab(latest: Latest, looked_at: gr.Tab) -> None:
    """Lay out the tab and wire it. `latest` gives a visitor's latest run by their session's hash."""
    gr.Markdown(INTRO)
    sliders = _sliders()
    with gr.Row():
        here = gr.Button("Set the sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    told, words = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots: list[tuple[Callable[[Settings, TheoryPoint | None], list], gr.LinePlot]] = []
    for row in DRAWINGS:
        with gr.Row():
            for curves, title, x, y, colours, named, legend, name in row:
                plots.append((curves, lines(title, x, y, colours, (RUN, SET, *named), legend, name)))
    gr.Markdown("### Two alphas")
    by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("The papers' tables, and this run", open=False, elem_id="theory-papers"):
        papers = [gr.Markdown(elem_classes="figures") for _ in range(3)]
    residual(looked_at)

    def point(request: gr.Request) -> tuple[TheoryPoint | None, str]:
        try:
            found = point_of(latest(request.session_hash or ""))
        except UserError as none:
            return None, f"*{none}.*"
        return found, point_words(found)

    def draw(request: gr.Request, *values: Any) -> Any:
        at = understand.settings_from(values)
        if at is None:
            return gr.skip()
        run, said = point(request)
        return [
            said,
            understand.set_words(at),
            *(shown(plot, curves(at, run)) for curves, plot in plots),
            tables.by_gamma(at, run),
            tables.guide(run),
            tables.leviathan_1(run),
            tables.leviathan_2(run),
        ]

    def set_to_run(request: gr.Request) -> Any:
        run, said = point(request)
        if run is None:
            gr.Info(said)
            return gr.skip()
        return list(astuple(understand.settings_of(run)))

    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    raw = {"preprocess": False, **quiet}  # a number that is half typed is nobody's error
    drawn = [told, words, *(plot for _, plot in plots), by_gamma, *papers]
    moved = [looked_at.select, *(slider.change for slider in sliders)]
    gr.on(moved, draw, sliders, drawn, trigger_mode="always_last", **raw)
    here.click(set_to_run, None, sliders, **quiet).then(draw, sliders, drawn, **raw)


def _sliders() -> list[gr.Slider]:
    """In the order of `BOUNDS`, three in a row."""
    usual, made = Settings(), []
    for names in (list(BOUNDS)[:3], list(BOUNDS)[3:]):
        with gr.Row():
            for name in names:
                least, most, step = BOUNDS[name]
                place, css = getattr(usual, name), f"theory-{name.replace('_', '-')}"
                made.append(gr.Slider(least, most, place, step=step, label=LABELS[name], min_width=240, elem_id=css))
    return made
