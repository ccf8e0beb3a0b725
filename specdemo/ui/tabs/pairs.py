"""Section of the Bench tab that measures several pairs of models, next to published tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gradio as gr

from specdemo.bench.pairs import PairBench, pair_bench, pairs_table, skipped_lines
from specdemo.bench.published_tables import leviathan_tables
from specdemo.core.errors import UserError, check_name
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.method_names import with_method_names
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.settings_form import SEND_JS, SettingsForm
from specdemo.ui.tabs.components import Selection
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement, PanelParts
from specdemo.ui.tabs.sweep import Sweep, selected

_INTRO = """### Compare pairs
Each pair continues the prompts selected above with the recipes selected above. Pairs that cannot run are listed with
the reason."""


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
        make = partial(_recipe, {**settings, "chat": name == CHAT_PAIR, "mode": OFF}, device)
        benches.append(pair_bench(name, make, varied))
    recipes = tuple(recipe for bench in benches for recipe in bench.recipes)
    if not recipes:
        raise UserError(f"no pair can run: {'; '.join(skipped_lines(benches))}")
    Sweep(recipes, prompts).within_limits(None)
    return benches, prompts


def _recipe(settings: Mapping[str, Any], device: str, **varied: Any) -> Recipe:
    return recipe_of({**settings, **varied}, device)


def count_measured(benches: Sequence[PairBench], prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Return the number of complete pairs, and of all."""
    return sum(len(bench.records) == len(prompts) for bench in benches), len(benches)


def describe_pairs(benches: Sequence[PairBench]) -> str:
    """Return the table of the pairs, the skipped pairs and methods, and the published tables."""
    skipped = "\n".join(f"- {escape_markdown(line)}" for line in skipped_lines(benches))
    measured = with_method_names("\n\n".join(filter(None, (pairs_table(benches), skipped))))
    return f"{measured}\n\n{leviathan_tables()}"


def pairs_section(service: Service, selection: Selection, form: SettingsForm, defaults: Recipe) -> None:
    """Lay out the section. `selection`: recipes and prompts of the tab."""
    gr.Markdown(_INTRO)
    offered = [(title, name) for name, title in form.pairs.items()]
    initial = [defaults.pair] if defaults.pair else []
    names = gr.Dropdown(offered, value=initial, multiselect=True, label="Pairs", elem_id="bench-pairs")
    parts, results = PanelParts.laid_out("bench-pairs")
    with results:
        table = gr.Markdown(elem_id="bench-pairs-table", elem_classes="figures")

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        chosen = dict(zip(selection, values[1:], strict=False))
        settings = {**form.complete(values[-1]), "max_tokens": chosen["max_tokens"]}
        benches, prompts = selected_pairs(settings, defaults.device, values[0], service.limits.pairs, chosen)

        def show(_: list[Any]) -> dict[Any, Any]:
            begun = any(bench.records or bench.skipped for bench in benches)
            return {table: describe_pairs(benches)} if begun else {}

        return PanelMeasurement(
            start=partial(service.measurements.bench_pairs, benches, prompts),
            show=show,
            count=lambda _: count_measured(benches, prompts),
        )

    MeasurementPanel(parts, [names, *selection.values(), form.values], [table], prepare, js=SEND_JS)
