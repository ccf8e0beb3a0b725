"""Memory tab."""

from __future__ import annotations

import html

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui.memory_tables import of_machine, of_pairs, of_run
from specdemo.ui.service import Service

_TABLE_CSS = """div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 6px 0 6px 16px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { padding-left: 0; text-align: left; font-weight: 500; min-width: 10em; white-space: normal; }
thead th { color: var(--quiet); font-weight: 500; }
p { color: var(--quiet); font-size: 13px; max-width: 80ch; margin: 8px 0 4px; }"""


def memory_tab(service: Service, device: str, tab: gr.Tab) -> None:
    titles = {"run": "Latest run", "machine": "This machine", "pairs": "Memory required per pair"}
    tables = []
    for name, title in titles.items():
        gr.Markdown(f"### {title}")
        tables.append(gr.HTML(elem_id=f"memory-{name}", css_template=_TABLE_CSS, apply_default_css=False))
    refresh = gr.Button("Refresh", size="sm", scale=0, elem_id="memory-refresh")

    def measure(request: gr.Request) -> tuple[str, str, str]:
        try:
            return of_run(service.runs.latest(request.session_hash or "")), of_machine(device), of_pairs(device)
        except UserError as error:
            return html.escape(str(error)), "", ""

    gr.on(
        [tab.select, refresh.click],
        measure,
        None,
        tables,
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
