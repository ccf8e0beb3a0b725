"""Bench tab: a small selection of recipes on the bundled prompts, with one or more pairs of models."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import gradio as gr

from specdemo.bench.measure import grid
from specdemo.bench.pairs import PairBench, pair_bench, pairs_table, skipped_lines
from specdemo.bench.published_tables import leviathan_tables, repetition_table
from specdemo.bench.table import (
    MAP_LEGEND,
    BenchRow,
    acceptance,
    acceptance_markdown,
    as_json,
    disturbed,
    report,
    slower,
    speedup_map,
    speedup_text,
    table,
)
from specdemo.core.errors import UserError, check_name
from specdemo.core.formats import NOTHING, number, percent
from specdemo.core.policies import POLICIES
from specdemo.drafters import METHODS
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.service import Service, bench_job, pairs_bench_job
from specdemo.ui.settings import OFF, method_name, recipe_of, visible_recipe, with_method_names
from specdemo.ui.settings_form import SEND_JS, SettingsForm
from specdemo.ui.tabs.components import UNPROCESSED, by_category, chart, chart_view, escape_markdown
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement, duration
from specdemo.ui.theme import CATEGORIES

Selection = dict[str, gr.CheckboxGroup | gr.Slider]  # of recipes and prompts
ASSUMED = 100.0  # tokens per second, assumed before the first run
MOST_RUNS, MOST_TOKENS = 240, 24_000
_LISTS = {  # names of the lists of a selection
    "methods": "method",
    "gammas": "draft length",
    "policies": "draft-length policy",
    "temperatures": "temperature",
    "kinds": "class of prompts",
}
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
AR_TITLE = "AR decoding"
_PAIRS_INTRO = """### Compare pairs
Each pair continues the prompts selected above with the recipes selected above. Pairs that cannot run are listed with
the reason."""


@dataclass(frozen=True)
class Sweep:
    """Measurement of every recipe on every prompt. The first recipe is AR decoding, the baseline."""

    recipes: tuple[Recipe, ...]
    prompts: tuple[Prompt, ...]

    @property
    def runs(self) -> int:
        return len(self.recipes) * len(self.prompts)

    @property
    def tokens(self) -> int:
        return self.runs * self.recipes[0].max_tokens

    def describe(self, latest: Run | None) -> str:
        """Describe size and estimated time, from the slowest lane of the latest run."""
        speeds = [lane.metrics.tokens_per_second for lane in latest.lanes.values()] if latest else []
        measured = min(filter(None, speeds), default=None)
        basis = f"an assumed {ASSUMED:.0f} tokens per second"
        if measured:
            basis = f"the {measured:.0f} tokens per second of your latest run"
        return (
            f"{len(self.recipes)} recipes × {len(self.prompts)} prompts = {self.runs} runs of at most "
            f"{self.recipes[0].max_tokens} tokens, about {duration(self.tokens / (measured or ASSUMED))} at {basis}"
        )

    def within_limits(self, latest: Run | None) -> Sweep:
        """Return the sweep. Raises `UserError` if it exceeds the limits of the page."""
        if self.runs > MOST_RUNS or self.tokens > MOST_TOKENS:
            raise UserError(
                f"{self.describe(latest)}: the page measures at most {MOST_RUNS} runs and {MOST_TOKENS:,} "
                "tokens. Reduce the selection, or use the terminal's bench"
            )
        return self

    def measurement(self, service: Service, show: Callable[[list[dict[str, Any]]], Outputs]) -> PanelMeasurement:
        """`show` returns the outputs of a panel for records of prompts."""
        return PanelMeasurement(
            job=bench_job(service, self.recipes, self.prompts),
            show=lambda records: show(records) if records else {},
            count=lambda records: (len(records), len(self.prompts)),
            unit="prompts",
        )


def selected(chosen: Mapping[str, Any], external: Any = None) -> tuple[list[dict[str, Any]], tuple[Prompt, ...]]:
    """Convert values from the browser to settings of `bench.grid` and prompts. Raises `UserError` if invalid.

    `chosen`: lists, and `each`, the prompts per class, which alternate; `external`: servers of other engines,
    separated by spaces.
    """
    for key, name in _LISTS.items():
        if not isinstance(chosen[key], list) or not chosen[key]:
            raise UserError(f"choose at least one {name}")
    each = chosen["each"]
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise UserError(f"prompts per class must be an integer from 1, not {each!r}")
    methods, gammas, policies, temperatures, kinds = (chosen[key] for key in _LISTS)
    servers = str(external or "").split()
    varied = list(islice(grid(methods, gammas, policies, temperatures, servers), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise UserError(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    prompts = (prompt for kind in kinds for prompt in load_prompts([str(kind)]))
    return varied, tuple(alternate_classes(prompts, each))


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


def speedup_chart(rows: Sequence[BenchRow]) -> str:
    compared = [row for row in rows if row.speedup is not None]
    temperatures = {row.lane.rpartition(" ")[2] for row in rows}

    def name(row: BenchRow) -> str:
        lane = row.lane if len(temperatures) > 1 else row.lane.rpartition(" ")[0]
        return f"{visible_recipe(lane).replace('gamma=', 'γ ')}, {row.kind}, n {row.prompts}"

    by_class: dict[str, list[tuple[float, float]]] = {AR_TITLE: [(0, 1.0)]}
    for i, row in enumerate(compared, 1):
        by_class.setdefault(row.kind, []).append((i, row.speedup or 0.0))
    names = [AR_TITLE, *map(name, compared)]
    axis = "recipe and class (n: prompts)"
    return chart("Speed-up over the baseline", axis, "speed-up", by_category("bar", by_class), names, "bench-plot")


def speedup_map_table(rows: Sequence[BenchRow]) -> str:
    """Return the speed-ups by recipe and class or draft length as a coloured table; empty without several of both."""
    speedups = speedup_map(rows)
    if speedups is None:
        return ""
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in speedups.columns)
    lines = [f"<tr><th>recipe, {speedups.across}</th>{heads}</tr>"]
    for recipe, of_recipe in speedups.recipes.items():
        name = html.escape(visible_recipe(recipe).replace("gamma=", "γ "))
        lines.append(
            f"<tr><th>{name}</th>{''.join(_map_cell(of_recipe.get(column)) for column in speedups.columns)}</tr>"
        )
    return f'<table id="bench-map"><caption>Speed-up ({MAP_LEGEND})</caption>{"".join(lines)}</table>'


def _map_cell(row: BenchRow | None) -> str:
    """Return a cell in the colour of its side of 1, deepest at twice or half the speed."""
    if row is None or row.speedup is None:
        return "<td></td>"
    interval = "no interval" if row.interval is None else "95 % {:.2f} to {:.2f}".format(*row.interval)
    share = 10 + 45 * min(1.0, abs(math.log2(max(row.speedup, 0.01))))
    colour = f"color-mix(in srgb, {CATEGORIES[6 if row.speedup < 1 else 1]} {share:.0f}%, transparent)"
    return f'<td title="{interval}, n {row.prompts}" style="background: {colour}">{speedup_text(row)}</td>'


def acceptance_chart(rows: Sequence[BenchRow]) -> str:
    lanes = {}
    for name, lane in acceptance(rows).items():
        if lane.position:
            tested = sum(count.tested for count in lane.position.values())
            label = f"{visible_recipe(name).replace('gamma=', 'γ ')}, n {tested}"
            lanes[label] = [(position, count.share) for position, count in lane.position.items()]
    series = by_category("line", lanes)
    axis = "position of the guess (n: number checked)"
    return chart("Guesses kept, by position", axis, "kept / checked", series, elem_id="bench-positions")


def notes(rows: Sequence[BenchRow], records: Sequence[dict[str, Any]]) -> str:
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
    gr.Markdown(_INTRO)
    selection = _selection(defaults, service.limits.max_gamma)
    size = gr.Markdown(elem_id="bench-size")
    panel, results = MeasurementPanel.create(service, "bench")
    with results:
        results_table = gr.Dataframe(headers=list(SWEEP_TABLE_HEAD), interactive=False, elem_id="bench-table")
        charts = chart_view("bench-charts", "bench-map", "bench-plot", "bench-positions")
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
            results_table: sweep_cells(rows),
            charts: speedup_map_table(rows) + speedup_chart(rows) + acceptance_chart(rows),
            slower_on: notes(rows, records),
            acceptance_tables: "\n\n".join(filter(None, (acceptance_markdown(rows), repetition_table(rows)))),
            saved: file_links(dict(zip(_FILES, texts, strict=True))),
        }

    inputs = [*selection.values(), form.values]
    triggers = [tab.select, *(control.change for control in selection.values())]
    # The default mode depends on the first trigger and would drop quick changes.
    gr.on(triggers, describe_size, inputs, size, js=SEND_JS, queue=False, trigger_mode="always_last", **UNPROCESSED)
    panel.connect(inputs, [results_table, charts, slower_on, acceptance_tables, saved], prepare)
    pairs_section(service, selection, form, defaults)


def _selection(defaults: Recipe, max_gamma: int | None) -> Selection:

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


def selected_pairs(
    settings: Mapping[str, Any], device: str, names: Any, offered: Sequence[str], chosen: Mapping[str, Any]
) -> tuple[list[PairBench], tuple[Prompt, ...]]:
    """Convert values from the browser to pairs and prompts. Raises `UserError` if invalid, or if no pair can run.

    `offered`: pairs of the host; `chosen`: argument of `selected`.
    """
    if not isinstance(names, list) or not names:
        raise UserError("choose at least one pair")
    for name in ("target", "external"):
        if settings.get(name):
            raise UserError(f"{name} replaces the models of pairs: leave it empty to compare pairs")
    varied, prompts = selected(chosen)
    benches = []
    for name in dict.fromkeys(map(str, names)):
        check_name("pair", name, offered)
        own = {**settings, "chat": name == CHAT_PAIR, "mode": OFF}
        benches.append(pair_bench(name, lambda own=own, **varied: recipe_of({**own, **varied}, device), varied))
    recipes = tuple(recipe for bench in benches for recipe in bench.recipes)
    if not recipes:
        raise UserError(f"no pair can run: {'; '.join(skipped_lines(benches))}")
    Sweep(recipes, prompts).within_limits(None)
    return benches, prompts


def count_measured(benches: Sequence[PairBench], prompts: Sequence[Prompt]) -> tuple[int, int]:
    return sum(len(bench.records) == len(prompts) for bench in benches), len(benches)


def describe_pairs(benches: Sequence[PairBench]) -> str:
    """Return the table of the pairs, the skipped pairs and methods, and the published tables."""
    skipped = "\n".join(f"- {escape_markdown(line)}" for line in skipped_lines(benches))
    measured = with_method_names("\n\n".join(filter(None, (pairs_table(benches), skipped))))
    return f"{measured}\n\n{leviathan_tables()}"


def pairs_section(service: Service, selection: Selection, form: SettingsForm, defaults: Recipe) -> None:
    """Lay out the section. `selection`: recipes and prompts of the tab."""
    gr.Markdown(_PAIRS_INTRO)
    offered = [(title, name) for name, title in form.pairs.items()]
    initial = [defaults.pair] if defaults.pair else []
    names = gr.Dropdown(offered, value=initial, multiselect=True, label="Pairs", elem_id="bench-pairs")
    panel, results = MeasurementPanel.create(service, "bench-pairs")
    with results:
        table = gr.Markdown(elem_id="bench-pairs-table", elem_classes="figures")

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        chosen = dict(zip(selection, values[1:], strict=False))
        settings = {**form.complete(values[-1]), "max_tokens": chosen["max_tokens"]}
        benches, prompts = selected_pairs(settings, defaults.device, values[0], service.limits.pairs, chosen)

        def show(_: list[Any]) -> dict[Any, Any]:
            begun = any(bench.records or bench.skipped for bench in benches)
            return {table: describe_pairs(benches)} if begun else {}

        job = pairs_bench_job(service, benches, prompts)
        return PanelMeasurement(job, show, lambda _: count_measured(benches, prompts))

    panel.connect([names, *selection.values(), form.values], [table], prepare)
