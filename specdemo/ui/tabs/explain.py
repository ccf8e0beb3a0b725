"""Tab about statistics of other engines: pasted, dropped or opened log lines and responses."""

from __future__ import annotations

import html
import math
from dataclasses import replace
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.external.diagnosis import conclusions, figures_line
from specdemo.external.engine_log import ENGINE_FORMATS, EngineStatistics, read_engine_log
from specdemo.ui.line_chart import ChartPoint, LineChart
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.tabs.components import UNPROCESSED, bar_values, chart_view, probability_plot, save_svg_button

MOST_LOG = 1_000_000  # characters
_INTRO = f"""Paste log lines or a response, drop a file on the field, or open one. Read are {ENGINE_FORMATS}."""
_ACCEPTED, _SPEEDUP = "accepted", "speed-up"
_COLOURS = {_ACCEPTED: "var(--bar-accepted)", _SPEEDUP: "var(--curve-1)"}
_POSITION_AXES: dict[str, Any] = {"x_title": "position", "y_title": "accepted / drafts", "visible": False}
_COSTS = LineChart("Speed-up by cost of a step", "cost, AR steps", _SPEEDUP, _COLOURS, {_SPEEDUP: _SPEEDUP})
_OPEN_JS = """() => new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    input.addEventListener("change", async () => resolve(await input.files[0].text()));
    input.addEventListener("cancel", () => resolve(document.querySelector("#engine-log textarea").value));
    input.click();
})"""


def statistics_of(text: Any, ar: Any) -> EngineStatistics:
    """Return the statistics of a text, with the tokens per second without drafts. Raises `UserError`."""
    if not isinstance(text, str) or not text.strip():
        raise UserError("the field is empty: paste log lines or a response of an engine")
    if len(text) > MOST_LOG:
        raise UserError(f"the text has more than {MOST_LOG:,} characters: keep the lines with statistics")
    reported = read_engine_log(text)
    if ar in (None, "", 0):
        return reported
    if isinstance(ar, bool) or not isinstance(ar, (int, float)) or not 0 < ar < math.inf:
        raise UserError(f"tokens per second without drafts must be above 0, not {ar!r}")
    return replace(reported, ar_tokens_per_second=float(ar))


def position_rows(reported: EngineStatistics) -> list[tuple[str, float, str]]:
    return [(str(position), rate, _ACCEPTED) for position, rate in enumerate(reported.by_position, 1)]


def cost_rows(reported: EngineStatistics) -> list[ChartPoint]:
    """Return the speed-up at costs of a step from 1 to 4 autoregressive steps: tokens per step / cost."""
    tokens = reported.tokens_per_step
    costs = [1 + quarter / 4 for quarter in range(13)]
    return [] if tokens is None else [(cost, tokens / cost, _SPEEDUP) for cost in costs]


def explain_tab() -> None:
    gr.Markdown(_INTRO)
    text = gr.Textbox(label="Log lines or response", lines=6, max_lines=12, elem_id="engine-log")
    with gr.Row():
        ar = gr.Number(label="Tokens per second without drafts (0: unknown)", value=0, elem_id="engine-ar")
        opened = gr.Button("Open file", elem_id="engine-open", scale=0)
        run = gr.Button("Explain", variant="primary", elem_id="engine-explain", scale=0)
    words = gr.Markdown(elem_id="engine-diagnosis", elem_classes="figures")
    with gr.Row():
        positions = probability_plot("Acceptance by position", _COLOURS, [], "engine-positions", **_POSITION_AXES)
        costs = chart_view("engine-costs")
    save = save_svg_button("engine-positions", visible=False)

    def explain(pasted: Any, without: Any) -> dict[Any, Any]:
        try:
            reported = statistics_of(pasted, without)
        except UserError as error:
            hidden = gr.update(visible=False)
            return {words: f"**{html.escape(str(error))}.**", positions: hidden, costs: "", save: hidden}
        rows, by_cost = position_rows(reported), cost_rows(reported)
        return {
            words: _words(reported),
            positions: gr.BarPlot(value=bar_values(rows), sort=[row[0] for row in rows], visible=bool(rows)),
            costs: _COSTS.svg(by_cost) if by_cost else "",
            save: gr.update(visible=bool(rows)),
        }

    run.click(explain, [text, ar], [words, positions, costs, save], concurrency_limit=None, **UNPROCESSED)
    opened.click(None, None, text, js=_OPEN_JS, api_visibility="private")


def _words(reported: EngineStatistics) -> str:
    first, *lines = map(escape_markdown, [figures_line(reported), *conclusions(reported)])
    return "\n".join([f"**{first}**", "", *(f"- {line}" for line in lines)])
