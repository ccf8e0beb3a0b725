"""Tabs below the lanes. Each tab is updated when it is selected."""

from __future__ import annotations

import gradio as gr

from specdemo.drafters import METHODS
from specdemo.recipe import Recipe
from specdemo.ui.documents import document_link
from specdemo.ui.service import Service
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.bench import bench_tab
from specdemo.ui.tabs.components import RunViews, link_papers
from specdemo.ui.tabs.edge import edge_tab
from specdemo.ui.tabs.explain import explain_tab
from specdemo.ui.tabs.memory import memory_tab
from specdemo.ui.tabs.theory import theory_tab


def build_tabs(service: Service, form: SettingsForm, defaults: Recipe, device: str, cockpit: gr.HTML) -> gr.Markdown:
    """Lay out all tabs; return the description of the method."""
    with gr.Tabs(elem_id="tabs"):
        with gr.Tab("Method", id="method"):
            about = gr.Markdown(link_papers(METHODS[defaults.method].notes), elem_id="about")
            document_link("policies")
        with gr.Tab("Theory", id="theory", render_children=True) as tab:
            theory_tab(tab, RunViews(service.runs, tab, cockpit))
            document_link("preflight")
        with gr.Tab("Edge-cloud", id="edge", render_children=True) as tab:
            edge_tab(service, form, device, RunViews(service.runs, tab, cockpit))
            document_link("edge-cloud")
        with gr.Tab("Bench", id="bench", render_children=True) as tab:
            bench_tab(service, form, defaults, tab)
            document_link("performance")
        with gr.Tab("Explain logs", id="explain", render_children=True):
            explain_tab()
            document_link("other-engines")
        with gr.Tab("Memory", id="memory", render_children=True) as tab:
            memory_tab(device, RunViews(service.runs, tab, cockpit))
            document_link("models")
    return about
