"""The Bench tab: a small grid of recipes on the bundled prompts, measured in the same queue as every other run."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.api import address_of
from specdemo.ui.live_updates import followed
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.streams import reason
from specdemo.ui.sweep import COLOURS, DRAFTING, HEADERS, PLAIN, Sweep, SweepResult, bars, cells, sweep
from specdemo.worker import WorkerBusy

INTRO = """Every recipe continues every prompt, one right after the other in a shuffled order, after each has run once
to warm up; plain decoding always takes part. A speed-up is a median over the prompts of a class, with an interval of
95 %. Models, and whatever is not chosen here, are as in the settings; top-p and top-k are off, and both models are
here."""
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
LOOK = """progress { width: 100%; height: 8px; border-radius: 4px; overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--ink) }
progress::-moz-progress-bar { background: var(--ink) }
p { margin: 4px 0 }"""
FILES = {"bench.md": "text/markdown", "bench.jsonl": "application/jsonl"}
SAVE = """(text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "%s"}));
    link.download = "%s";
    link.click();
    URL.revokeObjectURL(link.href);
}"""


def bench_tab(
    service: Service, controls: Mapping[str, gr.components.Component], usual: Recipe, looked_at: gr.Tab
) -> None:
    """Lay out the tab and wire it. `controls` are the sidebar's, by the names of the recipe's fields."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in load_prompts()))
    gr.Markdown(INTRO)
    chosen: dict[str, gr.components.Component] = {}
    with gr.Row():
        chosen["methods"] = gr.CheckboxGroup(
            DRAFTING,
            value=["draft", "nasd"],
            label="Methods, against plain decoding",
            min_width=280,
            elem_id="bench-methods",
        )
        chosen["kinds"] = gr.CheckboxGroup(
            kinds, value=kinds, label="Classes of prompts", min_width=280, elem_id="bench-kinds"
        )
    with gr.Row():
        chosen["policies"] = gr.CheckboxGroup(
            list(POLICIES), value=["fixed"], label="Draft-length policies", min_width=280, elem_id="bench-policies"
        )
        chosen["gammas"] = gr.CheckboxGroup(
            list(range(1, 9)), value=[usual.gamma], label="Draft lengths γ", min_width=280, elem_id="bench-gammas"
        )
    with gr.Row():
        chosen["temperatures"] = gr.CheckboxGroup(
            [(f"{t:g}", t) for t in TEMPERATURES],
            value=[0.0],
            label="Temperatures",
            min_width=280,
            elem_id="bench-temperatures",
        )
        chosen["each"] = gr.Slider(1, 24, 3, step=1, label="Prompts per class", min_width=200, elem_id="bench-each")
        chosen["max_tokens"] = gr.Slider(
            8, 256, 64, step=8, label="Tokens per run", min_width=200, elem_id="bench-max-tokens"
        )
    size = gr.Markdown(elem_id="bench-size")
    with gr.Row():
        go = gr.Button("Measure", variant="primary", elem_id="bench-run", scale=0)
        halt = gr.Button("Stop", interactive=False, elem_id="bench-stop", scale=0)
    status = gr.HTML(elem_id="bench-status", css_template=LOOK)
    with gr.Column(visible=False) as results:
        shown = gr.Dataframe(headers=list(HEADERS), interactive=False, elem_id="bench-table")
        plot = gr.BarPlot(
            x="recipe",
            y="speed-up",
            color="class",
            color_map=dict(zip([PLAIN, *kinds], COLOURS, strict=False)),
            x_title=" ",
            y_title="speed-up over plain decoding",
            y_lim=[0, None],
            x_label_angle=-35,
            height=360,
            buttons=["export"],
            elem_id="bench-plot",
        )
        notes = gr.Markdown(elem_id="bench-notes")
        texts = [gr.Textbox(visible=False) for _ in FILES]
        with gr.Row():
            for text, (name, kind) in zip(texts, FILES.items(), strict=True):
                save = gr.Button(f"Save {name}", size="sm", scale=0, elem_id=name.replace(".", "-"))
                save.click(None, text, None, js=SAVE % (kind, name), api_visibility="private")

    def meant(visitor: str, values: tuple[Any, ...]) -> Sweep:
        mine = dict(zip(chosen, values[: len(chosen)], strict=True))
        here = {"max_tokens": mine.pop("max_tokens"), "mode": OFF}  # links have a tab of their own
        settings = dict(zip(controls, values[len(chosen) :], strict=True)) | here
        latest = service.runs.latest(visitor)
        return sweep(lambda varied: recipe_of({**settings, **varied}, usual.device), latest, **mine)

    def weigh(request: gr.Request, *values: Any) -> str:
        visitor = request.session_hash or ""
        try:
            return f"{meant(visitor, values).told(service.runs.latest(visitor))}."
        except UserError as error:
            return f"**{html.escape(str(error))}.**"

    async def measured(request: gr.Request, *values: Any) -> AsyncIterator[dict[Any, Any]]:
        visitor = request.session_hash or ""
        ready = {go: gr.Button(interactive=True), halt: gr.Button(interactive=False)}
        try:
            outcome = SweepResult(meant(visitor, values))
            stream = service.bench(outcome.sweep.recipes, outcome.sweep.prompts, visitor, address_of(request))
        except (UserError, WorkerBusy) as error:
            yield {status: f"<p role='status'>{html.escape(reason(error))}</p>", results: gr.Column(visible=False)}
            return
        yield {
            go: gr.Button(interactive=False),
            halt: gr.Button(interactive=True),
            results: gr.Column(visible=False),
        }
        async with aclosing(followed(outcome, stream, service.worker)) as sentences:
            async for now in sentences:
                yield {status: now}
        if not outcome.records:
            yield ready
            return
        # Not before all is measured: drawing a thousand samples of each row would be in the way of what is timed.
        rows = await asyncio.to_thread(outcome.rows)
        yield ready | {
            shown: cells(rows),
            plot: gr.BarPlot(value=bars(rows), sort=[bar[0] for bar in bars(rows)["data"]]),
            notes: outcome.notes(rows),
            results: gr.Column(visible=True),
            **dict(zip(texts, outcome.files(rows), strict=True)),
        }

    def stop(request: gr.Request) -> None:
        service.stop_bench(request.session_hash or "")

    asked = [*chosen.values(), *controls.values()]
    quiet: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on(
        [looked_at.select, *(control.change for control in chosen.values())],
        weigh,
        asked,
        size,
        queue=False,
        trigger_mode="always_last",  # gradio's own choice goes by the first trigger, and would drop a quick change
        **quiet,
    )
    go.click(
        measured,
        asked,
        [go, halt, status, results, shown, plot, notes, *texts],
        concurrency_limit=None,
        trigger_mode="once",
        **quiet,
    )
    halt.click(stop, None, None, queue=False, **quiet)
