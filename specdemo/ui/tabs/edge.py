"""Edge-cloud tab: timeline, measurements and best draft length of a run over a link; comparison of modes."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import edge_cloud_modes as modes
from specdemo.ui import link_speedup as best_k
from specdemo.ui.labels import Lane
from specdemo.ui.link_metrics import LINK_TABLE_HEAD, describe_link, edge_lane, measures, steps, window
from specdemo.ui.link_timeline import timeline_svg
from specdemo.ui.service import Service
from specdemo.ui.sweep import Sweep, SweepResult
from specdemo.ui.tabs.measurement import UNPROCESSED, MeasurementPanel
from specdemo.ui.tabs.plots import line_plot, plot_value

_TIMELINE_STEPS = 12
_INTRO = """The edge device runs the drafter; the cloud runs the target. They exchange token ids. Choose a mode under
*Edge and cloud*, then press *Run*."""
_LOCAL_CLOUD = """Without a service address, a cloud process starts on this machine. The emulated link sets its delay
and bandwidth."""
_TIMELINE_CSS = """.timeline { overflow-x: auto; }
svg { width: 100%; min-width: 720px; display: block; }
text { fill: var(--ink); font-size: 12px; font-family: var(--font); }
.tick, .caption { fill: var(--quiet); font-size: 11px; }
line { stroke: var(--line); }
rect { stroke: var(--paper); stroke-width: 0.5; } rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.draft { --of: var(--accepted-ink); } .idle { --of: var(--line); }
.up { --of: var(--link-up); } .way { --of: var(--link-delay); } .verify { --of: var(--link-verify); }
.down { --of: var(--link-down); } .wait { --of: var(--link-wait); }
rect { fill: var(--of); }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 6px 0 0; list-style: none; font-size: 13px; }
.key li::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
.key li::before { background: var(--of); }"""
_SERIES = {best_k.CURVE: "var(--curve-set)", best_k.RUN: "var(--dot-run)", best_k.BEST: "var(--dot-set)"}
# Replace the first input by the id of the displayed run, which may be imported.
_SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


@dataclass(frozen=True)
class _RunView:
    summary: gr.Markdown
    refresh: gr.Button
    details: gr.Column
    first: gr.Slider
    timeline: gr.HTML
    table: gr.Dataframe
    best: gr.Markdown
    plot: gr.LinePlot
    curve: gr.Column


def edge_tab(service: Service, controls: Mapping[str, gr.components.Component], device: str, tab: gr.Tab) -> None:
    gr.Markdown(_INTRO if service.limits.remote is not None else f"{_INTRO} {_LOCAL_CLOUD}")
    _run_section(service, tab)
    _modes_section(service, controls, device)


def _run_section(service: Service, tab: gr.Tab) -> None:
    run_id = gr.Textbox(visible=False)
    view = _run_view()

    def lane_of(shown_id: Any, request: gr.Request) -> Lane:
        shown_run = service.runs.get(shown_id)
        return edge_lane(shown_run if shown_run is not None else service.runs.latest(request.session_hash or ""))

    def draw(shown_id: Any, request: gr.Request) -> dict[Any, Any]:
        try:
            lane = lane_of(shown_id, request)
        except UserError as error:
            return {view.summary: f"*{html.escape(str(error))}.*", view.details: gr.Column(visible=False)}
        return _run_values(view, lane)

    def move(shown_id: Any, first: Any, request: gr.Request) -> Any:
        try:
            lines = steps(lane_of(shown_id, request))
        except UserError:
            return gr.skip()
        return (
            timeline_svg(*window(lines, int(first), _TIMELINE_STEPS)) if isinstance(first, (int, float)) else gr.skip()
        )

    drawn = [view.summary, view.details, view.first, view.timeline, view.table, view.best, view.plot, view.curve]
    unqueued = {"js": _SHOWN_RUN_JS, "queue": False, **UNPROCESSED}
    gr.on([tab.select, view.refresh.click], draw, run_id, drawn, **unqueued)
    view.first.change(move, [run_id, view.first], view.timeline, trigger_mode="always_last", **unqueued)


def _run_view() -> _RunView:
    summary = gr.Markdown(elem_id="edge-run")
    refresh = gr.Button("Refresh", size="sm", scale=0, elem_id="edge-refresh")
    with gr.Column(visible=False) as details:
        gr.Markdown("### Timeline of steps")
        label = f"First of {_TIMELINE_STEPS} steps"
        first = gr.Slider(0, 1, 0, step=1, label=label, elem_id="edge-first")
        timeline = gr.HTML(elem_id="edge-timeline", css_template=_TIMELINE_CSS, apply_default_css=False)
        gr.Markdown("### Measurements per step")
        table = gr.Dataframe(headers=list(LINK_TABLE_HEAD), interactive=False, max_height=420, elem_id="edge-table")
        gr.Markdown("### Best draft length over this link")
        best = gr.Markdown(elem_id="edge-best")
        with gr.Column(visible=False) as curve:
            plot = line_plot("Speed by draft length", "k (tokens)", "tokens/s", _SERIES, tuple(_SERIES), "edge-plot")
    return _RunView(summary, refresh, details, first, timeline, table, best, plot, curve)


def _run_values(view: _RunView, lane: Lane) -> dict[Any, Any]:
    lines = steps(lane)
    try:
        link = best_k.link_of(lane)
        best = best_k.describe_best_gamma(link)
    except UserError as error:
        link, best = None, f"*{error}.*"
    return {
        view.summary: describe_link(lane),
        view.details: gr.Column(visible=True),
        view.first: gr.Slider(maximum=max(1, len(lines) - _TIMELINE_STEPS), value=0),
        view.timeline: timeline_svg(*window(lines, 0, _TIMELINE_STEPS)),
        view.table: measures(lines),
        view.best: best,
        view.plot: plot_value(view.plot, best_k.curve(link) if link else []),
        view.curve: gr.Column(visible=link is not None),
    }


def _modes_section(service: Service, controls: Mapping[str, gr.components.Component], device: str) -> None:
    gr.Markdown(
        "### Compare edge only, cloud only and both\n"
        "All modes continue the same prompts. Models, sampling and link are taken from the settings."
    )
    with gr.Row():
        count = gr.Slider(1, modes.MOST_PROMPTS, 3, step=1, label="Prompts", min_width=200, elem_id="modes-prompts")
        length = gr.Slider(8, 128, 48, step=8, label="Tokens per run", min_width=200, elem_id="modes-tokens")
    panel = MeasurementPanel(service, "modes")
    with panel.results:
        table = gr.Dataframe(headers=list(modes.MODE_TABLE_HEAD), interactive=False, elem_id="modes-table")

    def make_sweep(session: str, values: tuple[Any, ...]) -> Sweep:
        prompts, tokens, *settings = values
        return modes.three(dict(zip(controls, settings, strict=True)), device, prompts, tokens)

    def compute_rows(result: SweepResult) -> list[list[str]]:
        return modes.rows(result.sweep.recipes, result.records)

    inputs = [count, length, *controls.values()]
    panel.connect(inputs, [table], make_sweep, compute_rows, lambda result, rows: {table: rows})
