"""Section of the Bench tab that measures several pairs of models, next to published tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gradio as gr

from specdemo.bench.pairs import PairBench, pair_bench, pairs_table, skipped_lines
from specdemo.bench.published_tables import leviathan_tables
from specdemo.core.errors import UserError, check_name
from specdemo.models.zoo import CHAT_PAIR
from specdemo.recipe import Recipe
from specdemo.ui.controls import Controls
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.method_names import with_method_names
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.tabs.bench_grid import selected, within_limits
from specdemo.ui.tabs.components import progress_bar
from specdemo.ui.tabs.measurement_panel import ANNOUNCED, MeasurementPanel, PanelParts
from specdemo.ui.tabs.sweep import Sweep, SweepResult
from specdemo.worker import Stream

_INTRO = """### Compare pairs
Each pair continues the prompts selected above with the recipes selected above. Pairs that cannot run are listed with
the reason."""


@dataclass
class PairsResult(SweepResult):
    """Records of several pairs so far; `sweep` contains the recipes of all pairs."""

    benches: list[PairBench] = field(default_factory=list)

    def start(self, service: Service, session: str, address: str) -> Stream[Any]:
        return service.measurements.bench_pairs(self.benches, self.sweep.prompts, session, address)

    @property
    def is_empty(self) -> bool:
        return not any(bench.records or bench.skipped for bench in self.benches)

    def ending(self, error: str = "") -> str:
        measured = [bench for bench in self.benches if len(bench.records) == len(self.sweep.prompts)]
        runnable = sum(bool(bench.recipes) for bench in self.benches)
        words = f"{len(measured)} of {len(self.benches)} pairs are measured"
        if error:
            words = f"failed: {error}; {words}"
        else:
            words = f"done: {words}" if len(measured) == runnable else f"stopped: partial, {words}"
        return progress_bar(len(measured), len(self.benches), words, ANNOUNCED)

    def report(self) -> str:
        """Return the table of the pairs, the skipped pairs and methods, and the published tables."""
        skipped = "\n".join(f"- {escape_markdown(line)}" for line in skipped_lines(self.benches))
        measured = with_method_names("\n\n".join(filter(None, (pairs_table(self.benches), skipped))))
        return f"{measured}\n\n{leviathan_tables()}"


def pairs_result(
    settings: Mapping[str, Any], device: str, names: Any, offered: tuple[str, ...], **chosen: Any
) -> PairsResult:
    """Convert values from the browser. Raises `UserError` if they are invalid or exceed the page's limits.

    `offered`: pairs of the host; `chosen`: arguments of `selected`.
    """
    if not isinstance(names, list) or not names:
        raise UserError("choose at least one pair")
    for name in ("target", "external"):
        if settings.get(name):
            raise UserError(f"{name} replaces the models of pairs: leave it empty to compare pairs")
    varied, prompts = selected(**chosen)
    benches = []
    for name in dict.fromkeys(map(str, names)):
        check_name("pair", name, offered)
        make = partial(_recipe, {**settings, "chat": name == CHAT_PAIR, "mode": OFF}, device)
        benches.append(pair_bench(name, make, varied))
    recipes = tuple(recipe for bench in benches for recipe in bench.recipes)
    if not recipes:
        raise UserError(f"no pair can run: {'; '.join(skipped_lines(benches))}")
    sweep = within_limits(Sweep(recipes, prompts), None)
    return PairsResult(sweep, benches=benches)


def _recipe(settings: Mapping[str, Any], device: str, **varied: Any) -> Recipe:
    return recipe_of({**settings, **varied}, device)


def pairs_section(
    service: Service, selection: Controls, controls: Mapping[str, gr.components.Component], defaults: Recipe
) -> None:
    """Lay out the section. `selection`: recipes and prompts of the tab."""
    gr.Markdown(_INTRO)
    pair: Any = controls["pair"]
    initial = [defaults.pair] if defaults.pair else []
    names = gr.Dropdown(pair.choices, value=initial, multiselect=True, label="Pairs", elem_id="bench-pairs")
    parts, results = PanelParts.laid_out("bench-pairs")
    with results:
        report = gr.Markdown(elem_id="bench-pairs-table", elem_classes="figures")

    def make_result(session: str, values: tuple[Any, ...]) -> PairsResult:
        chosen = dict(zip(selection, values[1:], strict=False))
        settings = dict(zip(controls, values[1 + len(selection) :], strict=True))
        settings["max_tokens"] = chosen.pop("max_tokens")
        return pairs_result(settings, defaults.device, values[0], service.limits.pairs, **chosen)

    inputs = [names, *selection.values(), *controls.values()]
    panel = MeasurementPanel(service, parts)
    panel.connect(inputs, [report], make_result, PairsResult.report, lambda result, text: {report: text})
