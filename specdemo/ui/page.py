"""The page and the API: with its theme, the only room that knows gradio.

`build` lays out the page; `launch_options` says how to serve it; nothing happens at import. Handlers drain streams of
the service, whose one worker queues: gradio's own concurrency limits, which let go of a slot before its work has ended,
are not relied on.
"""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.core.errors import Refused
from specdemo.generate import generate
from specdemo.limits import Limits
from specdemo.models.load import Shelf
from specdemo.models.pairs import ASSETS, PAIRS
from specdemo.recipe import Recipe, known
from specdemo.ui.about import ABOUT
from specdemo.ui.controls import recipe_of, sidebar
from specdemo.ui.frames import Run
from specdemo.ui.health import Health
from specdemo.ui.service import Engine, Service, drain, reason
from specdemo.ui.theme import theme
from specdemo.ui.words import PLAIN, SPEC, told_of
from specdemo.worker import Crew, Worker, WorkerBusy

HERE = Path(__file__).parent
EXAMPLES = ASSETS / "examples.json"

HEADER = """<header><h1>specdemo</h1><p>Speculative decoding, token by token: what was drafted, what the target kept,
and what it bought.</p></header>"""


def cockpit(server_functions: list[Callable]) -> gr.HTML:
    """Lanes, tiles and status, drawn in the browser from JSON strings."""

    def free(method: Callable) -> Callable:  # gradio writes on the functions it is given
        return wraps(method)(lambda asked: method(asked))

    return gr.HTML(
        html_template=(HERE / "cockpit.html").read_text(encoding="utf-8"),
        js_on_load=(HERE / "cockpit.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        server_functions=[free(method) for method in server_functions],
        elem_id="cockpit",
    )


def toast(run: Run) -> None:
    """Say what the status line says where it cannot be missed. gradio takes toasts for markup, visitors write text."""
    gr.Warning(html.escape(run.phase[1]))


def address_of(request: gr.Request) -> str:
    """Where a request comes from, as the server sees it; behind a proxy that is what `FORWARDED_ALLOW_IPS` decides."""
    return request.client.host if request.client else ""


def launch_options(page: gr.Blocks | None = None) -> dict[str, Any]:
    """How the page is to be served: look, and nothing that leaves the machine; with `page`, its health at `/health`."""
    return {
        "app_kwargs": {"routes": page.health.routes()} if page is not None and page.health else {},
        "favicon_path": ASSETS / "icon.png",
        "pwa": True,
        "theme": theme(),
        "css": (HERE / "cockpit.css").read_text(encoding="utf-8"),
        "footer_links": ["api", "settings"],
        "run_history": False,
        "enable_monitoring": False,
        "max_file_size": "1mb",
        "quiet": True,
    }


def build(
    shelf: Shelf | None = None,
    pair: str | None = None,
    device: str = "auto",
    examples: Path | None = EXAMPLES,
    engine: Engine = generate,
    limits: Limits | None = None,
    worker: Worker | Crew | None = None,
) -> gr.Blocks:
    """The page, ready to launch. `.worker` on it is what decodes, to be watched or closed; `.health` looks after it."""
    limits = limits if limits is not None else Limits()
    pair = pair if pair is not None else limits.pairs[0]
    known("pair", pair, limits.pairs)
    service = Service(shelf if shelf is not None else Shelf(), engine, limits, worker)
    usual = limits.fit(replace(Recipe(pair=pair, device=device), gamma=PAIRS[pair].gamma))

    async def show(request: gr.Request, prompt: str, compare: bool, *values: Any) -> AsyncIterator[str]:
        settings = dict(zip(controls, values, strict=True))
        plan = (PLAIN,) if settings["method"] == "ar" else (SPEC, PLAIN) if compare else (SPEC,)
        run = service.runs.new(request.session_hash or "", plan)
        shown = run.frame(0)
        yield shown
        try:
            recipe = recipe_of(settings, device)
            lanes = [(lane, replace(recipe, method="ar") if lane == PLAIN else recipe) for lane in plan]
            stream = service.start(lanes, prompt, request.session_hash or "", address_of(request))
        except (Refused, WorkerBusy) as error:
            run.finish(reason(error))
            toast(run)
            yield run.frame(0)
            return
        run.stop = stream.stop
        at = 0
        try:
            async with aclosing(drain(stream)) as batches:
                async for batch in batches:
                    at = len(run.records)
                    for lane, event in batch:
                        run.absorb(lane, event)
                    if not stream.started and (ahead := service.worker.ahead(stream)):
                        run.phase = ("queued", f"{ahead} ahead")
                    now = run.frame(at)
                    if now != shown:
                        yield now
                        shown = now
            run.finish(reason(stream.error) if stream.error else None)
            if run.phase[0] == "failed":
                toast(run)
            yield run.frame(len(run.records))
        finally:
            run.finish()  # a tab that has gone leaves its run unfinished

    async def api(
        request: gr.Request,
        prompt: str,
        pair: str = usual.pair or pair,
        method: str = usual.method,
        gamma: int = usual.gamma,
        temperature: float = usual.temperature,
        top_p: float = usual.top_p,
        top_k: int = usual.top_k,
        seed: int = usual.seed,
        max_tokens: int = usual.max_tokens,
        rule: str = usual.rule,
        quantization: str = usual.quantization,
        drafter_quantization: str = usual.drafter_quantization,
        ngram: int = usual.ngram,
        filler_top_k: int = usual.filler_top_k,
        policy: str = usual.policy,
    ) -> AsyncIterator[str]:
        """Decode a prompt. Streams the trace, a JSON line per item: a header, the steps, an end."""
        asked = {
            "pair": pair,
            "method": method,
            "gamma": gamma,
            "policy": policy,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "max_tokens": max_tokens,
            "rule": rule,
            "quantization": quantization,
            "drafter_quantization": drafter_quantization,
            "ngram": ngram,
            "filler_top_k": filler_top_k,
        }
        try:
            stream = service.start([(SPEC, recipe_of(asked, device))], prompt, address=address_of(request))
        except (Refused, WorkerBusy) as error:
            raise gr.Error(reason(error), print_exception=False) from None
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for _, event in batch:
                    if "phase" not in event:
                        yield json.dumps(event)
        if stream.error:
            raise gr.Error(reason(stream.error), print_exception=False)

    async def estimate(request: gr.Request, prompt: str, *values: Any) -> AsyncIterator[str]:
        yield "*Preflight: reading a few texts and timing a few passes …*"
        try:
            recipe = recipe_of(dict(zip(controls, values, strict=True)), device)
            text = prompt if isinstance(prompt, str) else ""
            yield told_of(await service.preflight(recipe, text, address_of(request)))
        except Exception as error:  # whatever it was, the page goes on and says so
            yield f"**Preflight:** {html.escape(reason(error))}"

    async def preflight_api(
        request: gr.Request,
        pair: str = usual.pair or pair,
        method: str = usual.method,
        temperature: float = usual.temperature,
    ) -> dict[str, Any]:
        """What speed-up is to be expected of a pair and a method, without generating anything."""
        try:
            asked = {"pair": pair, "method": method, "temperature": temperature}
            return (await service.preflight(recipe_of(asked, device), address=address_of(request))).as_dict()
        except (Refused, WorkerBusy) as error:
            raise gr.Error(reason(error), print_exception=False) from None

    def leave(request: gr.Request) -> None:
        service.leave(request.session_hash or "")

    with gr.Blocks(title="specdemo", analytics_enabled=False, fill_width=True) as demo:
        controls = sidebar(usual, limits)
        gr.HTML(HEADER, elem_id="masthead", apply_default_css=False)
        prompt = gr.Textbox(
            label="Prompt",
            lines=4,
            max_lines=8,
            elem_id="prompt",
            placeholder="The beginning of a Python file, a class, a function…",
            autofocus=True,
        )
        with gr.Row(elem_id="examples"):
            for example in json.loads(examples.read_text(encoding="utf-8")) if examples else []:
                chip = gr.Button(example["title"], size="sm", elem_classes="chip")
                choice = json.dumps([example["prompt"], example["method"], example["temperature"]])
                set_by_chip = [prompt, controls["method"], controls["temperature"]]
                chip.click(None, None, set_by_chip, js=f"() => {choice}", api_visibility="private")
        with gr.Row(elem_id="actions"):
            go = gr.Button("Run", variant="primary", elem_id="run", scale=0)
            gr.Button("Stop", variant="secondary", elem_id="stop", scale=0)
            ahead = gr.Button("Preflight", variant="secondary", elem_id="preflight", scale=0)
            compare = gr.Checkbox(label="Compare: run plain decoding afterwards", elem_id="compare", container=False)
        estimated = gr.Markdown(elem_id="estimate")
        drawn = cockpit([service.trace_since, service.trace, service.stop_run])
        method = controls["method"]
        with gr.Tabs(elem_id="tabs"), gr.Tab("The method", id="method"):
            about = gr.Markdown(ABOUT[usual.method], elem_id="about")
        told = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        method.change(lambda name: ABOUT.get(name, ""), method, about, **told)
        pressed = go.click(
            show,
            [prompt, compare, *controls.values()],
            drawn,
            preprocess=False,  # the recipe judges raw values, in its own words
            show_progress="hidden",
            concurrency_limit=None,  # the worker queues
            trigger_mode="multiple",  # the cockpit lets one press at a time through
            api_visibility="private",
        )
        ahead.click(
            estimate,
            [prompt, *controls.values()],
            estimated,
            preprocess=False,
            show_progress="hidden",
            concurrency_limit=None,
            trigger_mode="once",
            api_visibility="private",
        )
        failed = "() => { window.dispatchEvent(new Event('specdemo:failed')) }"  # a full queue, a lost server
        pressed.failure(None, None, None, js=failed, api_visibility="private")
        gr.api(api, api_name="generate", concurrency_limit=None)
        gr.api(preflight_api, api_name="preflight", concurrency_limit=None)
        demo.unload(leave)
    demo.queue(max_size=64)
    demo.worker = service.worker
    probe = replace(usual, method="ar", max_tokens=2)
    demo.health = Health(service, probe) if isinstance(service.worker, Worker) else None  # else a look would cost quota
    return demo
