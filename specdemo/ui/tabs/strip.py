"""The strip of tabs below the lanes."""

from __future__ import annotations

from collections.abc import Mapping

import gradio as gr

from specdemo.recipe import METHODS, Recipe
from specdemo.ui.service import Service
from specdemo.ui.tabs.bench import bench_tab
from specdemo.ui.tabs.edge import edge_tab
from specdemo.ui.tabs.memory import memory_tab
from specdemo.ui.tabs.theory import theory_tab


def strip(service: Service, controls: Mapping[str, gr.components.Component], usual: Recipe, device: str) -> gr.Markdown:
    """All tabs; what comes back is the text about the method, which follows the choice of one."""
    with gr.Tabs(elem_id="tabs"):
        with gr.Tab("The method", id="method"):
            about = gr.Markdown(METHODS[usual.method].notes, elem_id="about")
        with gr.Tab("Theory", id="theory") as looked_at:
            theory_tab(service.runs.latest, looked_at)
        with gr.Tab("Edge-cloud", id="edge") as looked_at:
            edge_tab(service, controls, device, looked_at)
        with gr.Tab("Bench", id="bench") as looked_at:
            bench_tab(service, controls, usual, looked_at)
        with gr.Tab("Memory", id="memory") as looked_at:
            memory_tab(service, device, looked_at)
    return about
