"""Bench tab: measure a small grid of recipes on the bundled prompts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import gradio as gr

from specdemo.bench import BenchRow
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.sweep import DRAFTING, PLAIN, SWEEP_TABLE_HEAD, Sweep, SweepResult, bars, sweep, sweep_cells
from specdemo.ui.tabs.components import UNPROCESSED, MeasurementPanel
from specdemo.ui.theme import CATEGORIES

_INTRO = """Each recipe and the autoregressive baseline continue every prompt in shuffled order. One warm-up run per
recipe is not timed. Speed-ups are medians per class of prompts, with 95 % intervals. The remaining options are taken
from the settings. Top-p, top-k and the edge-cloud link are disabled."""
_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
_FILES = {"bench.md": "text/markdown", "bench.jsonl": "application/jsonl"}
_SAVE_JS = """(text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "%s"}));
    link.download = "%s";
    link.click();
    URL.revokeObjectURL(link.href);
}"""


def bench_tab(service: Service, controls: Mapping[str, gr.components.Component], defaults: Recipe, tab: gr.Tab) -> None:
    """Lay out the tab. `controls` of the sidebar are keyed by recipe field."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts()))
    gr.Markdown(_INTRO)
    grid = _grid_controls(kinds, defaults.gamma)
    size = gr.Markdown(elem_id="bench-size")
    panel = MeasurementPanel(service, "bench")
    with panel.results:
        table = gr.Dataframe(headers=list(SWEEP_TABLE_HEAD), interactive=False, elem_id="bench-table")
        plot = _speedup_plot(kinds)
        notes = gr.Markdown(elem_id="bench-notes")
        files = _save_buttons()

    def make_sweep(session: str, values: tuple[Any, ...]) -> Sweep:
        chosen = dict(zip(grid, values, strict=False))
        overrides = {"max_tokens": chosen.pop("max_tokens"), "mode": OFF}
        settings = dict(zip(controls, values[len(grid) :], strict=True)) | overrides
        latest = service.runs.latest(session)
        return sweep(lambda varied: recipe_of({**settings, **varied}, defaults.device), latest, **chosen)

    def describe_size(request: gr.Request, *values: Any) -> str:
        session = request.session_hash or ""
        try:
            return f"{make_sweep(session, values).describe(service.runs.latest(session))}."
        except UserError as error:
            return f"**{html.escape(str(error))}.**"

    def show_rows(result: SweepResult, rows: list[BenchRow]) -> dict[Any, Any]:
        speedups = bars(rows)
        return {
            table: sweep_cells(rows),
            plot: gr.BarPlot(value=speedups, sort=[bar[0] for bar in speedups["data"]]),
            notes: result.notes(rows),
            **dict(zip(files, result.files(rows), strict=True)),
        }

    inputs = [*grid.values(), *controls.values()]
    gr.on(
        [tab.select, *(control.change for control in grid.values())],
        describe_size,
        inputs,
        size,
        queue=False,
        trigger_mode="always_last",  # gradio's default depends on the first trigger and would drop quick changes
        **UNPROCESSED,
    )
    panel.connect(inputs, [table, plot, notes, *files], make_sweep, SweepResult.rows, show_rows)


def _grid_controls(kinds: list[str], gamma: int) -> dict[str, gr.components.Component]:
    def group(choices: list[Any], value: list[Any], label: str, name: str) -> gr.CheckboxGroup:
        return gr.CheckboxGroup(choices, value=value, label=label, min_width=280, elem_id=f"bench-{name}")

    grid: dict[str, gr.components.Component] = {}
    with gr.Row():
        grid["methods"] = group(DRAFTING, ["draft", "nasd"], "Methods (compared with the baseline)", "methods")
        grid["kinds"] = group(kinds, kinds, "Classes of prompts", "kinds")
    with gr.Row():
        grid["policies"] = group(list(POLICIES), ["fixed"], "Draft-length policies", "policies")
        grid["gammas"] = group(list(range(1, 9)), [gamma], "Draft lengths γ (tokens)", "gammas")
    with gr.Row():
        temperatures = [(f"{t:g}", t) for t in _TEMPERATURES]
        grid["temperatures"] = group(temperatures, [0.0], "Temperatures", "temperatures")
        grid["each"] = gr.Slider(1, 24, 3, step=1, label="Prompts per class", min_width=200, elem_id="bench-each")
        grid["max_tokens"] = gr.Slider(
            8, 256, 64, step=8, label="Tokens per run", min_width=200, elem_id="bench-max-tokens"
        )
    return grid


def _speedup_plot(kinds: list[str]) -> gr.BarPlot:
    return gr.BarPlot(
        x="recipe",
        y="speed-up",
        color="class",
        color_map=dict(zip([PLAIN, *kinds], CATEGORIES, strict=False)),
        x_title=" ",
        y_title="speed-up over the baseline",
        y_lim=[0, None],
        x_label_angle=-35,
        height=360,
        buttons=["export"],
        elem_id="bench-plot",
    )


def _save_buttons() -> list[gr.Textbox]:
    texts = [gr.Textbox(visible=False) for _ in _FILES]
    with gr.Row():
        for text, (name, kind) in zip(texts, _FILES.items(), strict=True):
            save = gr.Button(f"Save {name}", size="sm", scale=0, elem_id=name.replace(".", "-"))
            save.click(None, text, None, js=_SAVE_JS % (kind, name), api_visibility="private")
    return texts
