"""The page: what stands where, and what happens when it is pressed.

`build` lays out the page; `launch_options` says how to serve it; nothing happens at import. Handlers drain streams of
the service, whose one worker queues: gradio's own concurrency limits, which let go of a slot before its work has ended,
are not relied on.
"""

from __future__ import annotations

import html
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.recipe import Recipe, check_name
from specdemo.ui.api import address_of, endpoints
from specdemo.ui.cockpit import cockpit, script
from specdemo.ui.controls import examples_row, sidebar
from specdemo.ui.frames import Run
from specdemo.ui.health import Health
from specdemo.ui.labels import told_of
from specdemo.ui.lane import EXTRA, lanes_of, plan_of, told_of_lanes
from specdemo.ui.limits import HostLimits
from specdemo.ui.live_updates import played
from specdemo.ui.method_notes import ABOUT
from specdemo.ui.run_queries import Archive
from specdemo.ui.service import Engine, Service
from specdemo.ui.settings import OFF, from_link, kept_recipes, recipe_of, recipe_settings, restored
from specdemo.ui.streams import reason
from specdemo.ui.tabs import build_tabs
from specdemo.ui.theme import launch_options
from specdemo.ui.websocket import Sockets
from specdemo.worker import Worker, WorkerBusy, WorkerGroup

__all__ = ["build", "launch_options"]

EXAMPLES = ASSETS / "examples.json"
RECORDED_TOP = 5  # tokens of every law that a run on the page records, for the inspector

HEADER = """<header><h1>specdemo</h1><p>Speculative decoding, token by token: what was drafted, what the target kept,
and what it bought.</p></header>"""


def toast(run: Run) -> None:
    """Say what the status line says where it cannot be missed. gradio takes toasts for markup, visitors write text."""
    gr.Warning(html.escape(run.phase[1]))


def build(
    pool: ModelPool | None = None,
    pair: str | None = None,
    device: str = "auto",
    examples: Path | None = EXAMPLES,
    engine: Engine = generate,
    limits: HostLimits | None = None,
    worker: Worker | WorkerGroup | None = None,
) -> gr.Blocks:
    """The page, ready to launch. On it, `.worker` decodes, `.clouds` are processes beside it; `.health` looks after it.

    `.routes` are to be served with it.

    Worker and clouds may be watched or closed.
    """
    limits = limits if limits is not None else HostLimits()
    pair = pair if pair is not None else limits.pairs[0]
    check_name("pair", pair, limits.pairs)
    service = Service(pool if pool is not None else ModelPool(), engine, limits, worker)
    sockets = Sockets(service.runs)
    shown_examples = json.loads(examples.read_text(encoding="utf-8")) if examples else {"ready": [], "methods": {}}
    usual = limits.fit(replace(Recipe(pair=pair, device=device), gamma=PAIRS[pair].gamma, top=RECORDED_TOP))

    def settings_of(values: Any) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    async def show(request: gr.Request, pressed_with: Any) -> AsyncIterator[str]:
        try:
            kept, *values = json.loads(pressed_with)
            settings = settings_of(values)
        except (TypeError, ValueError):  # only a script presses so
            raise gr.Error("a run takes one JSON list, of the kept lanes and every setting of the page") from None
        prompt, compare = settings["prompt"], settings["compare"]
        beside = others(kept)
        run = service.runs.new(request.session_hash or "", plan_of(settings, compare, len(beside)))
        try:
            shown = run.frame(0)
            yield shown
            recipe = recipe_of(recipe_settings(settings), device)
            lanes = lanes_of(recipe, beside, run.plan)
            random.shuffle(lanes)  # nobody always has the cold or the warm machine
            stream = service.start(lanes, prompt, request.session_hash or "", address_of(request))
            run.stop = stream.stop
            async with aclosing(played(run, stream, service.worker, shown)) as frames:
                async for frame in frames:
                    if not sockets.tell(run):
                        yield frame
            if run.phase[0] == "failed":
                toast(run)
            service.heard(request.session_hash or "", prompt, run)
            yield run.frame(len(run.records))
        except (UserError, WorkerBusy) as error:
            run.finish(reason(error))
            toast(run)
            yield run.frame(0)
        finally:
            run.finish()  # a tab that has gone leaves its run unfinished
            sockets.tell(run)

    async def estimate(request: gr.Request, *values: Any) -> AsyncIterator[str]:
        yield "*Preflight: reading a few texts and timing a few passes …*"
        settings = settings_of(values)
        prompt = settings["prompt"]
        try:
            recipe = recipe_of(recipe_settings(settings), device)
            text = prompt if isinstance(prompt, str) else ""
            yield told_of(await service.preflight(recipe, text, address_of(request)))
        except Exception as error:  # whatever it was, the page goes on and says so
            yield f"**Preflight:** {html.escape(reason(error))}"

    def keep(kept: Any, *values: Any) -> tuple[Any, str]:
        wanted = dict(zip(controls, values, strict=True))
        try:
            lanes = [*others(kept), recipe_of(wanted, device)]
        except UserError as error:
            gr.Warning(html.escape(str(error)))
            return gr.skip(), told_of_lanes(others(kept))
        if len(lanes) > len(EXTRA):
            gr.Warning(f"{len(EXTRA)} lanes are kept already: drop them first")
            return gr.skip(), told_of_lanes(lanes[:-1])
        return [*(kept or []), wanted], told_of_lanes(lanes)

    def others(kept: Any) -> list[Recipe]:
        return kept_recipes(kept, usual_settings, device)[: len(EXTRA)]

    def find(saved: Any, kept: Any, request: gr.Request) -> tuple[str, str]:
        link = from_link(dict(request.query_params), usual_settings)
        settings, refused = restored(link or saved, usual_settings, device)
        for sentence in refused:
            gr.Warning(html.escape(f"A setting was left as it is usual: {sentence}"))
        if link and settings.get("mode", OFF) != OFF and settings["remote"]:
            gr.Warning(html.escape(f"This link has prompts sent to {settings['remote']}: run it only if you know it."))
        changed = {name: value for name, value in settings.items() if value != usual_settings[name]}
        return json.dumps(changed), told_of_lanes(others(kept))

    def forget(request: gr.Request) -> None:
        service.talks.pop(request.session_hash or "", None)
        gr.Info("The next prompt begins a new conversation.")

    def leave(request: gr.Request) -> None:
        service.leave(request.session_hash or "")

    with gr.Blocks(title="specdemo", analytics_enabled=False, fill_width=True) as demo:
        controls = sidebar(usual, limits, service.unload)
        gr.HTML(HEADER, elem_id="masthead", apply_default_css=False)
        ready = shown_examples["ready"]
        prompt = gr.Textbox(
            ready[0]["prompt"] if ready else "",  # something to press Run on
            label="Prompt",
            lines=3,
            max_lines=8,
            elem_id="prompt",
            placeholder="The beginning of a Python file, a class, a function…",
            autofocus=True,
        )
        examples_row(shown_examples, prompt, controls)
        with gr.Row(elem_id="actions"):
            go = gr.Button("Run", variant="primary", elem_id="run", scale=0)
            gr.Button("Stop", variant="secondary", elem_id="stop", scale=0)
            ahead = gr.Button("Preflight", variant="secondary", elem_id="preflight", scale=0)
            compare = gr.Checkbox(label="Compare with plain decoding", elem_id="compare", container=False)
            more = gr.Button("Keep as a lane", size="sm", elem_id="keep-lane", scale=0)
            fewer = gr.Button("Drop kept lanes", size="sm", elem_id="drop-lanes", scale=0)
            link = gr.Button("Link to these settings", size="sm", elem_id="link", scale=0)
            anew = gr.Button("New conversation", size="sm", elem_id="new-talk", scale=0)
            usually = gr.Button("Reset", size="sm", elem_id="reset", scale=0)
        kept_lanes = gr.Markdown(elem_id="kept-lanes")
        estimated = gr.Markdown(elem_id="estimate")
        drawn = cockpit(Archive(service.runs).answers)
        settable = [*controls.values(), prompt, compare]
        names = [*controls, "prompt", "compare"]
        usual_settings = dict(zip(names, (one.value for one in settable), strict=True))
        usual_settings["compare"] = False
        saved = gr.BrowserState(storage_key="specdemo-settings", secret="specdemo")
        kept = gr.BrowserState(storage_key="specdemo-lanes", secret="specdemo")
        method = controls["method"]
        about = build_tabs(service, controls, usual, device)
        queued = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        told = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        method.change(lambda name: ABOUT.get(name, ""), method, about, **told)
        # One input that holds them all: gradio goes over every input of an event with every frame that the event gives.
        taken = gr.Textbox(visible=False)
        pressed = go.click(
            None,
            [kept, *settable],
            taken,
            js="(...values) => JSON.stringify(values)",
            trigger_mode="multiple",
            api_visibility="private",
        ).then(
            show,
            taken,
            drawn,
            preprocess=False,  # the recipe judges raw values, in its own words
            show_progress="hidden",
            concurrency_limit=None,  # the worker queues
            trigger_mode="multiple",  # the cockpit lets one press at a time through
            api_visibility="private",
        )
        ahead.click(
            estimate,
            settable,
            estimated,
            preprocess=False,
            show_progress="hidden",
            concurrency_limit=None,
            trigger_mode="once",
            api_visibility="private",
        )
        failed = "() => { window.dispatchEvent(new Event('specdemo:failed')) }"  # a full queue, a lost server
        pressed.failure(None, None, None, js=failed, api_visibility="private")
        for name, function in endpoints(service, usual, device).items():
            gr.api(function, api_name=name, concurrency_limit=None)
        anew.click(forget, None, None, **queued)
        more.click(keep, [kept, *controls.values()], [kept, kept_lanes], preprocess=False, **queued)
        fewer.click(None, None, [kept, kept_lanes], js="() => [null, '']", api_visibility="private")
        facts = {"NAMES": json.dumps(names), "USUAL": json.dumps(list(usual_settings.values()))}
        gr.on([one.change for one in settable], None, settable, saved, js=script("save_settings", facts), **told)
        link.click(None, settable, None, js=script("copy_link", facts), api_visibility="private")
        usually.click(None, None, settable, js=f"() => {facts['USUAL']}", api_visibility="private")
        found = gr.Textbox(visible=False)  # what is to be restored
        demo.load(find, [saved, kept], [found, kept_lanes], preprocess=False, **queued).then(
            None, [found, *settable], settable, js=script("restore_settings", facts), api_visibility="private"
        )
        demo.unload(leave)
    demo.queue(max_size=64)
    demo.worker, demo.clouds = service.worker, service.clouds
    probe = replace(usual, method="ar", max_tokens=2)
    demo.health = Health(service, probe) if isinstance(service.worker, Worker) else None  # else a look would cost quota
    demo.routes = [*sockets.routes(), *(demo.health.routes() if demo.health else ())]
    return demo
