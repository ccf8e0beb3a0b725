"""Bench tab, which measures a small selection of recipes on the bundled prompts."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import gradio as gr

from specdemo.bench.acceptance import Acceptance
from specdemo.bench.published_tables import repetition_table
from specdemo.bench.table import (
    BenchRow,
    acceptance,
    acceptance_markdown,
    as_json,
    disturbed,
    report,
    slower,
    table,
)
from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING, number, percent
from specdemo.core.policies import POLICIES
from specdemo.drafters import METHODS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.charts import Series, chart
from specdemo.ui.method_names import method_name, visible_recipe, with_method_names
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.settings_form import SEND_JS, SettingsForm
from specdemo.ui.tabs.components import UNPROCESSED, Selection, chart_view
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement, PanelParts
from specdemo.ui.tabs.pairs import pairs_section
from specdemo.ui.tabs.sweep import Sweep, selected
from specdemo.ui.theme import CATEGORIES

SWEEP_TABLE_HEAD = (
    "class", "recipe", "speed-up", "95 %", "slower on", "tokens/s", "accepted", "α", "mean overlap β",
    "tokens/pass", "same text",
)  # fmt: skip
_INTRO = """Each recipe and the autoregressive baseline continue every prompt in shuffled order. One warm-up run per
recipe is not timed. Speed-ups are medians per class of prompts, with 95 % intervals from five prompts. The remaining
options are taken from the settings. Top-p, top-k and the edge-cloud link are disabled."""
_FILES = ("bench.md", "bench.jsonl")
_DRAFTING = [(method_name(name), name) for name, method in METHODS.items() if method.drafts]
_TEMPERATURES = [(f"{temperature:g}", temperature) for temperature in (0.0, 0.3, 0.5, 0.7, 1.0)]


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
    names = [PLAIN, *map(name, compared)]
    return chart("Speed-up over the baseline", "recipe and class", "speed-up", series, names, "bench-plot")


def acceptance_chart(rows: Sequence[BenchRow]) -> str:
    """Draw the acceptance by position, over all classes."""
    lanes = {
        visible_recipe(name).replace("gamma=", "γ "): lane for name, lane in acceptance(rows).items() if lane.position
    }
    series = [
        Series(
            "line",
            colour,
            [(position, count.share) for position, count in lane.position.items()],
            f"{name}, n {_tested(lane)}",
        )
        for (name, lane), colour in zip(lanes.items(), cycle(CATEGORIES), strict=False)
    ]
    return chart(
        "Guesses kept, by position",
        "position of the guess (n: number checked)",
        "kept / checked",
        series,
        elem_id="bench-positions",
    )


def _tested(lane: Acceptance) -> int:
    return sum(count.tested for count in lane.position.values())


def notes(rows: Sequence[BenchRow], records: Sequence[dict[str, Any]]) -> str:
    """List the prompts with a slower recipe."""
    lines = slower([replace(row, lane=visible_recipe(row.lane)) for row in rows])
    lines = lines or ["no recipe was slower than AR decoding on any prompt"]
    if count := disturbed(records):
        lines.append(f"other runs interrupted {count} of these, so their figures may be inaccurate")
    return "\n".join(f"- {line}" for line in lines)


def file_links(files: Mapping[str, str]) -> str:
    """Return links to save files, with their contents."""
    links = []
    for name, text in files.items():
        address = f"data:application/octet-stream;base64,{base64.b64encode(text.encode()).decode()}"
        links.append(f'<a id="{name.replace(".", "-")}" download="{name}" href="{address}">Save {name}</a>')
    return f"<p>{' '.join(links)}</p>"


def bench_tab(service: Service, form: SettingsForm, defaults: Recipe, tab: gr.Tab) -> None:
    """Lay out the tab."""
    gr.Markdown(_INTRO)
    selection = _selection(defaults, service.limits.max_gamma)
    size = gr.Markdown(elem_id="bench-size")
    parts, results = PanelParts.laid_out("bench")
    with results:
        grid = gr.Dataframe(headers=list(SWEEP_TABLE_HEAD), interactive=False, elem_id="bench-table")
        charts = chart_view("bench-charts", "bench-plot", "bench-positions")
        slower_on = gr.Markdown(elem_id="bench-notes")
        with gr.Accordion("Acceptance by position, length of the text and confidence", open=False):
            acceptance_tables = gr.Markdown(elem_id="bench-acceptance", elem_classes="figures")
        saved = gr.HTML(file_links(dict.fromkeys(_FILES, "")), elem_id="bench-files", apply_default_css=False)

    def make_sweep(session: str, values: tuple[Any, ...]) -> Sweep:
        chosen = dict(zip(selection, values, strict=False))
        overrides = {"max_tokens": chosen["max_tokens"], "mode": OFF}
        settings = form.complete(values[-1]) | overrides
        varied, prompts = selected(chosen, settings.pop("external", None))
        recipes = tuple(recipe_of({**settings, **own}, defaults.device) for own in varied)
        return Sweep(recipes, prompts).within_limits(service.runs.latest(session))

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        sweep = make_sweep(session, values)
        return sweep.measurement(service, partial(show, sweep))

    def describe_size(request: gr.Request, *values: Any) -> str:
        session = request.session_hash or ""
        try:
            return f"{make_sweep(session, values).describe(service.runs.latest(session))}."
        except UserError as error:
            return f"**{html.escape(with_method_names(str(error)))}.**"

    def show(sweep: Sweep, records: list[dict[str, Any]]) -> Outputs:
        rows = table(sweep.recipes, records)
        texts = report(sweep.recipes, len(sweep.prompts), records, rows), f"{as_json(rows)}\n"
        return {
            grid: sweep_cells(rows),
            charts: speedup_chart(rows) + acceptance_chart(rows),
            slower_on: notes(rows, records),
            acceptance_tables: "\n\n".join(filter(None, (acceptance_markdown(rows), repetition_table(rows)))),
            saved: file_links(dict(zip(_FILES, texts, strict=True))),
        }

    inputs = [*selection.values(), form.values]
    triggers = [tab.select, *(control.change for control in selection.values())]
    # The default mode depends on the first trigger and would drop quick changes.
    gr.on(triggers, describe_size, inputs, size, js=SEND_JS, queue=False, trigger_mode="always_last", **UNPROCESSED)
    MeasurementPanel(parts, inputs, [grid, charts, slower_on, acceptance_tables, saved], prepare, js=SEND_JS)
    pairs_section(service, selection, form, defaults)


def _selection(defaults: Recipe, max_gamma: int | None) -> Selection:
    """Lay out the selection of recipes, with draft lengths up to `max_gamma`, and of prompts."""

    def group(name: str, label: str, choices: list[Any], value: list[Any]) -> gr.CheckboxGroup:
        return gr.CheckboxGroup(choices, value=value, label=label, min_width=280, elem_id=f"bench-{name}")

    def slider(name: str, label: str, value: int, low: int, high: int, step: int) -> gr.Slider:
        return gr.Slider(low, high, value, step=step, label=label, min_width=200, elem_id=f"bench-{name}")

    fitting, others = _kinds(defaults.chat), _kinds(not defaults.chat)
    methods = ["nasd", "suffix"] if defaults.chat else ["draft", "nasd"]
    lengths = list(range(1, min(8, max_gamma or 8) + 1))
    with gr.Row():
        return {
            "methods": group("methods", "Methods (compared with the baseline)", _DRAFTING, methods),
            "kinds": group("kinds", "Classes of prompts", [*fitting, *others], fitting),
            "policies": group("policies", "Draft-length policies", list(POLICIES), ["fixed"]),
            "gammas": group("gammas", "Draft lengths γ (tokens)", lengths, [defaults.gamma]),
            "temperatures": group("temperatures", "Temperatures", _TEMPERATURES, [0.0]),
            "each": slider("each", "Prompts per class", 3, 1, 24, 1),
            "max_tokens": slider("max-tokens", "Tokens per run", 64, 8, 256, 8),
        }


def _kinds(chat: bool) -> list[str]:
    return list(dict.fromkeys(prompt.kind for prompt in load_prompts(chat=chat)))
