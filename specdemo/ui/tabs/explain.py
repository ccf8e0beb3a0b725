"""Tab about statistics of other engines: pasted, dropped or opened log lines and responses."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from specdemo.bench.table import markdown_table
from specdemo.core.errors import UserError
from specdemo.external.engine_log import (
    ENGINE_FORMATS,
    FIGURES,
    EngineStatistics,
    conclusions,
    figure_rows,
    figures_line,
    read_engine_log,
)
from specdemo.ui.tabs.components import UNPROCESSED, Series, chart, chart_view, escape_markdown, is_number

MOST_LOG = 1_000_000  # characters
_INTRO = f"""Paste log lines or a response, drop a file on the field, or open one. Read are {ENGINE_FORMATS}."""


def statistics_of(text: Any, ar: Any) -> EngineStatistics:
    """Return the statistics of a text, with the tokens per second without drafts. Raises `UserError`."""
    if not isinstance(text, str) or not text.strip():
        raise UserError("the field is empty: paste log lines or a response of an engine")
    if len(text) > MOST_LOG:
        raise UserError(f"the text has more than {MOST_LOG:,} characters: keep the lines with statistics")
    if ar and not is_number(ar):
        raise UserError(f"tokens per second without drafts must be a number, not {ar!r}")
    return read_engine_log(text, ar or None)


def position_chart(reported: EngineStatistics) -> str:
    if not reported.by_position:
        return ""
    points = [(float(position), rate) for position, rate in enumerate(reported.by_position, 1)]
    series = [Series("bar", "var(--bar-accepted)", points)]
    axis = "position of the guess" + (f" (n {reported.steps:.0f} drafts)" if reported.steps else "")
    return chart("Acceptance by position", axis, "accepted / drafts", series, elem_id="engine-positions")


def cost_chart(reported: EngineStatistics) -> str:
    """Draw tokens per step / cost of a step, for 1 to 4 AR steps."""
    tokens = reported.tokens_per_step
    if tokens is None:
        return ""
    costs = [1 + quarter / 4 for quarter in range(13)]
    series = [Series("line", "var(--curve-1)", [(cost, tokens / cost) for cost in costs], "speed-up")]
    return chart("Speed-up by cost of a step", "cost, AR steps", "speed-up", series, elem_id="engine-costs")


def explain_tab() -> None:
    gr.Markdown(_INTRO)
    text = gr.Textbox(label="Log lines or response", lines=6, max_lines=12, elem_id="engine-log")
    with gr.Row():
        ar = gr.Number(label="Tokens per second without drafts (0: unknown)", value=0, elem_id="engine-ar")
        gr.Button("Open file", elem_id="engine-open", scale=0)
        run = gr.Button("Explain", variant="primary", elem_id="engine-explain", scale=0)
    words = gr.Markdown(elem_id="engine-diagnosis", elem_classes="figures")
    charts = chart_view("engine-charts", "engine-positions", "engine-costs")

    def explain(pasted: Any, without: Any) -> list[str]:
        try:
            reported = statistics_of(pasted, without)
        except UserError as error:
            return [f"**{html.escape(str(error))}.**", ""]
        first, *lines = map(escape_markdown, [figures_line(reported), *conclusions(reported)])
        rows = list(figure_rows(reported))
        figures = markdown_table(FIGURES, rows) if rows else ""
        text = "\n".join([f"**{first}**", "", *(f"- {line}" for line in lines), "", figures])
        return [text, position_chart(reported) + cost_chart(reported)]

    run.click(explain, [text, ar], [words, charts], concurrency_limit=None, **UNPROCESSED)
