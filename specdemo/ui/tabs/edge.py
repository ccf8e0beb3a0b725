"""The Edge-cloud tab: the rounds of a run over a link in time, its measures, its best draft length, and three modes.

Drawn when it is looked at or asked, never while tokens stream.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui import edge_cloud_modes as modes
from specdemo.ui import link_speedup as best_k
from specdemo.ui.api import address_of
from specdemo.ui.labels import Lane
from specdemo.ui.link_metrics import HEADERS, edge_lane, measures, steps, told, window
from specdemo.ui.link_timeline import picture
from specdemo.ui.live_updates import followed
from specdemo.ui.service import Service
from specdemo.ui.streams import reason
from specdemo.ui.sweep import SweepResult
from specdemo.ui.tabs.bench import LOOK as PROGRESS
from specdemo.ui.tabs.plots import lines, shown
from specdemo.worker import WorkerBusy

AT_ONCE = 12  # rounds in the picture
INTRO = """The drafter on the edge, the target in the cloud, token ids between them. Choose a mode under *Edge and
cloud* in the settings and press *Run*."""
HOME = """Without the address of a service, a cloud of its own is started on this machine, a process beside the page;
the emulated link puts it as far away as you like."""
LOOK = """.timeline { overflow-x: auto; }
svg { width: 100%; min-width: 720px; display: block; }
text { fill: var(--ink); font-size: 12px; font-family: var(--font); }
.tick, .caption { fill: var(--quiet); font-size: 11px; }
line { stroke: var(--line); }
rect { stroke: var(--paper); stroke-width: 0.5; } rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.draft { --of: var(--accepted-ink); } .up { --of: #c47f00; } .way { --of: #9aa6b6; } .verify { --of: #3b6fd4; }
.down { --of: #c2577b; } .wait { --of: #7a8698; } .idle { --of: var(--line); }
rect { fill: var(--of); }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 6px 0 0; list-style: none; font-size: 13px; }
.key li::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
.key li::before { background: var(--of); }"""
COLOURS = {best_k.CURVE: "var(--curve-set)", best_k.RUN: "var(--dot-run)", best_k.BEST: "var(--dot-set)"}
SHOWN = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


def edge_tab(service: Service, controls: Mapping[str, gr.components.Component], device: str, looked_at: gr.Tab) -> None:
    """Lay out the tab and wire it. `controls` are the sidebar's."""
    gr.Markdown(INTRO if service.limits.remote is not None else f"{INTRO} {HOME}")
    run_id = gr.Textbox(visible=False)
    words = gr.Markdown(elem_id="edge-run")
    again = gr.Button("Refresh", size="sm", scale=0, elem_id="edge-refresh")
    with gr.Column(visible=False) as found:
        gr.Markdown("### Rounds in time")
        first = gr.Slider(0, 1, 0, step=1, label=f"First of {AT_ONCE} rounds", elem_id="edge-first")
        drawing = gr.HTML(elem_id="edge-timeline", css_template=LOOK, apply_default_css=False)
        gr.Markdown("### Measures, a row per round")
        table = gr.Dataframe(headers=list(HEADERS), interactive=False, max_height=420, elem_id="edge-table")
        gr.Markdown("### The best draft length over this link")
        best = gr.Markdown(elem_id="edge-best")
        with gr.Column(visible=False) as curve:
            plot = lines(
                "Tokens per second by draft length", "k", "tokens/s", COLOURS, tuple(COLOURS), " ", "edge-plot"
            )
    compare = _three_modes(service, controls, device)

    def lane_of(shown_id: Any, request: gr.Request) -> Lane:
        shown_run = service.runs.get(shown_id)
        return edge_lane(shown_run if shown_run is not None else service.runs.latest(request.session_hash or ""))

    def look(shown_id: Any, request: gr.Request) -> dict[Any, Any]:
        try:
            lane = lane_of(shown_id, request)
        except UserError as none:
            return {words: f"*{html.escape(str(none))}.*", found: gr.Column(visible=False)}
        rounds = steps(lane)
        try:
            link = best_k.link_of(lane)
            said = best_k.told(link)
        except UserError as none:
            link, said = None, f"*{none}.*"
        return {
            words: told(lane),
            found: gr.Column(visible=True),
            first: gr.Slider(maximum=max(1, len(rounds) - AT_ONCE), value=0),
            drawing: picture(*window(rounds, 0, AT_ONCE)),
            table: measures(rounds),
            best: said,
            plot: shown(plot, best_k.curve(link) if link else []),
            curve: gr.Column(visible=link is not None),
        }

    def move(shown_id: Any, at: Any, request: gr.Request) -> Any:
        try:
            rounds = steps(lane_of(shown_id, request))
        except UserError:
            return gr.skip()
        return picture(*window(rounds, int(at), AT_ONCE)) if isinstance(at, (int, float)) else gr.skip()

    quiet: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    drawn = [words, found, first, drawing, table, best, plot, curve]
    gr.on([looked_at.select, again.click], look, run_id, drawn, js=SHOWN, queue=False, **quiet)
    first.change(move, [run_id, first], drawing, js=SHOWN, queue=False, trigger_mode="always_last", **quiet)
    compare(quiet)


def _three_modes(service: Service, controls: Mapping[str, gr.components.Component], device: str) -> Any:
    """The comparison; what comes back wires it."""
    gr.Markdown(
        "### The edge alone, the cloud alone, and both\n"
        "Measured one right after the other on the same prompts, with models, sampling and link as in the settings."
    )
    with gr.Row():
        count = gr.Slider(1, modes.MOST_PROMPTS, 3, step=1, label="Prompts", min_width=200, elem_id="modes-prompts")
        longest = gr.Slider(8, 128, 48, step=8, label="Tokens per run", min_width=200, elem_id="modes-tokens")
    with gr.Row():
        go = gr.Button("Measure", variant="primary", elem_id="modes-run", scale=0)
        halt = gr.Button("Stop", interactive=False, elem_id="modes-stop", scale=0)
    status = gr.HTML(elem_id="modes-status", css_template=PROGRESS)
    with gr.Column(visible=False) as results:
        table = gr.Dataframe(headers=list(modes.HEADERS), interactive=False, elem_id="modes-table")

    async def measured(request: gr.Request, prompts: Any, tokens: Any, *values: Any) -> AsyncIterator[dict[Any, Any]]:
        visitor = request.session_hash or ""
        ready = {go: gr.Button(interactive=True), halt: gr.Button(interactive=False)}
        try:
            outcome = SweepResult(modes.three(dict(zip(controls, values, strict=True)), device, prompts, tokens))
            stream = service.bench(outcome.sweep.recipes, outcome.sweep.prompts, visitor, address_of(request))
        except (UserError, WorkerBusy) as error:
            yield {status: f"<p role='status'>{html.escape(reason(error))}</p>", results: gr.Column(visible=False)}
            return
        yield {go: gr.Button(interactive=False), halt: gr.Button(interactive=True), results: gr.Column(visible=False)}
        async with aclosing(followed(outcome, stream, service.worker)) as sentences:
            async for now in sentences:
                yield {status: now}
        if not outcome.records:
            yield ready
            return
        rows = await asyncio.to_thread(modes.rows, outcome.sweep.recipes, outcome.records)
        yield ready | {table: rows, results: gr.Column(visible=True)}

    def stop(request: gr.Request) -> None:
        service.stop_bench(request.session_hash or "")

    def wire(quiet: dict[str, Any]) -> None:
        asked = [count, longest, *controls.values()]
        out = [go, halt, status, results, table]
        go.click(measured, asked, out, concurrency_limit=None, trigger_mode="once", **quiet)
        halt.click(stop, None, None, queue=False, **quiet)

    return wire
