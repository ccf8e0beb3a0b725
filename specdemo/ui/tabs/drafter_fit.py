"""Table of drafters for the target of the settings; the form has its button, in *Models and devices*."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gradio as gr

from specdemo.bench.table import markdown_table
from specdemo.fit import COLUMNS, FitRow, advice, ranked, short_name
from specdemo.ui.markdown import escape_markdown
from specdemo.ui.measurements import fit_job
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement


def drafter_fit(service: Service, form: SettingsForm, device: str) -> None:
    """Lay out and wire the table."""
    with gr.Column(elem_id="fit"):
        panel, results = MeasurementPanel.laid_out(service, "fit", "Which drafter fits?")
        with results:
            table = gr.Markdown(elem_id="fit-table")

    def prepare(session: str, values: Sequence[Any]) -> PanelMeasurement:
        job = fit_job(service, recipe_of(form.complete(values[-1]), device))
        return PanelMeasurement(job, lambda rows: {table: describe_fit(rows)} if rows else {}, _count, "candidates")

    panel.connect([form.values], [table], prepare)


def _count(rows: Sequence[FitRow]) -> tuple[int, int]:
    able = [row for row in rows if row.recipe is not None]
    return sum(row.prediction is not None for row in able), max(1, len(able))


def describe_fit(rows: Iterable[FitRow]) -> str:
    """Return advice, table, reasons and commands in Markdown."""
    rows = ranked(rows)
    recommendation = advice(rows)
    parts = [f"**{escape_markdown(recommendation[0].upper() + recommendation[1:])}.**", ""]
    parts += [markdown_table(COLUMNS, [list(map(escape_markdown, row.cells)) for row in rows]), ""]
    for row in rows:
        words = [escape_markdown(text) for text in (short_name(row.candidate), row.reason) if text]
        command = row.command.replace("`", "'")
        parts.append(f"- {': '.join(words)}" + (f"  \n  `{command}`" if command else ""))
    return "\n".join(parts)
