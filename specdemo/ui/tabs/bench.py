"""Bench tab, which measures a small selection of recipes on the bundled prompts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import gradio as gr

from specdemo.bench.published_tables import repetition_table
from specdemo.bench.table import BenchRow, acceptance, acceptance_markdown
from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING, number, percent
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.charts import Series, chart
from specdemo.ui.method_names import visible_recipe, with_method_names
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.tabs.bench_grid import grid_controls, sweep
from specdemo.ui.tabs.components import UNPROCESSED, chart_view
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelParts
from specdemo.ui.tabs.pairs import pairs_section
from specdemo.ui.tabs.sweep import Sweep, SweepResult
from specdemo.ui.theme import CATEGORIES

SWEEP_TABLE_HEAD = (
    "class", "recipe", "speed-up", "95 %", "slower on", "tokens/s", "accepted", "α", "mean overlap β",
    "tokens/pass", "same text",
)  # fmt: skip
_INTRO = """Each recipe and the autoregressive baseline continue every prompt in shuffled order. One warm-up run per
recipe is not timed. Speed-ups are medians per class of prompts, with 95 % intervals from five prompts. The remaining
options are taken from the settings. Top-p, top-k and the edge-cloud link are disabled."""
_FILES = {"bench.md": "text/markdown", "bench.jsonl": "application/jsonl"}
_SAVE_JS = """(text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "%s"}));
    link.download = "%s";
    link.click();
    URL.revokeObjectURL(link.href);
}"""


def sweep_cells(rows: Sequence[BenchRow]) -> list[list[str]]:
    return [
        [
            row.kind,
            visible_recipe(row.lane),
            "baseline" if row.speedup is None else f"{row.speedup:.2f}×" + (" slower" if row.speedup < 1 else ""),
            NOTHING if row.interval is None else "{:.2f} to {:.2f}".format(*row.interval),
            NOTHING if row.speedup is None else f"{len(row.slower)} of {row.prompts}",
            number(row.tokens_per_second, 1),
            percent(row.acceptance_rate),
            number(row.alpha, 2),
            number(row.mean_beta, 2),
            number(row.tokens_per_pass, 2),
            NOTHING if row.same_text is None else f"{row.same_text} of {row.prompts}",
        ]
        for row in rows
    ]


PLAIN = "AR decoding"


def speedup_chart(rows: Sequence[BenchRow]) -> str:
    """Draw a bar for the baseline, then a bar per recipe and class."""
    compared = [row for row in rows if row.speedup is not None]
    temperatures = {row.lane.rpartition(" ")[2] for row in rows}

    def name(row: BenchRow) -> str:
        lane = row.lane if len(temperatures) > 1 else row.lane.rpartition(" ")[0]
        return f"{visible_recipe(lane).replace('gamma=', 'γ ')}, {row.kind}"

    by_class: dict[str, list[tuple[float, float]]] = {PLAIN: [(0, 1.0)]}
    for i, row in enumerate(compared, 1):
        by_class.setdefault(row.kind, []).append((i, row.speedup or 0.0))
    series = [
        Series("bar", colour, points, kind)
        for (kind, points), colour in zip(by_class.items(), cycle(CATEGORIES), strict=False)
    ]
    return chart("Speed-up over the baseline", "", "speed-up", series, [PLAIN, *map(name, compared)])


def acceptance_chart(rows: Sequence[BenchRow]) -> str:
    """Draw the acceptance by position, over all classes."""
    lanes = {
        visible_recipe(name).replace("gamma=", "γ "): lane for name, lane in acceptance(rows).items() if lane.position
    }
    series = [
        Series("line", colour, [(position, count.share) for position, count in lane.position.items()], name)
        for (name, lane), colour in zip(lanes.items(), cycle(CATEGORIES), strict=False)
    ]
    return chart("Acceptance", "position in the draft", "accepted / tested", series)


def bench_tab(service: Service, controls: Mapping[str, gr.components.Component], defaults: Recipe, tab: gr.Tab) -> None:
    """Lay out the tab. `controls` of the sidebar are keyed by recipe field."""
    prompts = [*load_prompts(chat=defaults.chat), *load_prompts(chat=not defaults.chat)]
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    gr.Markdown(_INTRO)
    selection = grid_controls(kinds, defaults, service.limits.max_gamma)
    size = gr.Markdown(elem_id="bench-size")
    parts, results = PanelParts.laid_out("bench")
    with results:
        table = gr.Dataframe(headers=list(SWEEP_TABLE_HEAD), interactive=False, elem_id="bench-table")
        plot = chart_view("bench-plot")
        notes = gr.Markdown(elem_id="bench-notes")
        positions = chart_view("bench-positions")
        with gr.Accordion("Acceptance by position, length of the text and confidence", open=False):
            acceptance_tables = gr.Markdown(elem_id="bench-acceptance", elem_classes="figures")
        files = _save_buttons()

    def make_sweep(session: str, values: tuple[Any, ...]) -> Sweep:
        chosen = dict(zip(selection, values, strict=False))
        overrides = {"max_tokens": chosen.pop("max_tokens"), "mode": OFF}
        settings = dict(zip(controls, values[len(selection) :], strict=True)) | overrides
        chosen |= {"external": settings.pop("external", None), "latest": service.runs.latest(session)}
        return sweep(lambda varied: recipe_of({**settings, **varied}, defaults.device), **chosen)

    def make_result(session: str, values: tuple[Any, ...]) -> SweepResult:
        return SweepResult(make_sweep(session, values))

    def describe_size(request: gr.Request, *values: Any) -> str:
        session = request.session_hash or ""
        try:
            return f"{make_sweep(session, values).describe(service.runs.latest(session))}."
        except UserError as error:
            return f"**{html.escape(with_method_names(str(error)))}.**"

    def show_rows(result: SweepResult, rows: list[BenchRow]) -> dict[Any, Any]:
        return {
            table: sweep_cells(rows),
            plot: speedup_chart(rows),
            notes: result.notes(rows),
            positions: acceptance_chart(rows),
            acceptance_tables: "\n\n".join(filter(None, (acceptance_markdown(rows), repetition_table(rows)))),
            **dict(zip(files, result.files(rows), strict=True)),
        }

    inputs = [*selection.values(), *controls.values()]
    triggers = [tab.select, *(control.change for control in selection.values())]
    # The default mode depends on the first trigger and would drop quick changes.
    gr.on(triggers, describe_size, inputs, size, queue=False, trigger_mode="always_last", **UNPROCESSED)
    panel = MeasurementPanel(service, parts)
    outputs = [table, plot, notes, positions, acceptance_tables, *files]
    panel.connect(inputs, outputs, make_result, SweepResult.rows, show_rows)
    pairs_section(service, selection, controls, defaults)


def _save_buttons() -> list[gr.Textbox]:
    texts = [gr.Textbox(visible=False) for _ in _FILES]
    with gr.Row():
        for text, (name, kind) in zip(texts, _FILES.items(), strict=True):
            save = gr.Button(f"Save {name}", size="sm", scale=0, elem_id=name.replace(".", "-"))
            save.click(None, text, None, js=_SAVE_JS % (kind, name), api_visibility="private")
    return texts
