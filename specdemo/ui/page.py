"""The page and the API: with its theme, the only room that knows gradio.

`build` lays out the page and makes the worker; `launch_options` says how to serve it; nothing happens at import.
Tokens are decoded in the worker's thread. A handler here only drains a stream, 25 times a second at most, and leaving
it (end, Stop, a closed tab, an error) asks the stream to stop. Everything on the device goes through the one worker,
so gradio's own concurrency limits, which let go of a slot before its work has ended, are not relied on.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.core.errors import Refused
from specdemo.generate import generate
from specdemo.models.load import Shelf
from specdemo.models.pairs import ASSETS, PAIRS
from specdemo.parts import Stores
from specdemo.recipe import Recipe
from specdemo.ui.about import ABOUT
from specdemo.ui.controls import recipe_of, sidebar
from specdemo.ui.frames import Run, Runs
from specdemo.ui.theme import theme
from specdemo.ui.words import PLAIN, SPEC
from specdemo.worker import Stream, Worker, WorkerBusy

HERE = Path(__file__).parent
TICK = 1 / 25  # seconds between frames: as good as immediate to the eye, and no load on the decoding thread
LONGEST_PROMPT = 100_000  # characters; tokenising more than any context holds would only take the worker's time
EXAMPLES = ASSETS / "examples.json"
log = logging.getLogger(__name__)

HEADER = """<header><h1>specdemo</h1><p>Speculative decoding, token by token: what was drafted, what the target kept,
and what it bought.</p></header>"""

Engine = Callable[[Recipe, str, Shelf, Stores], Iterator[dict[str, Any]]]


def cockpit(server_functions: list[Callable]) -> gr.HTML:
    """Lanes, tiles and status, drawn in the browser from JSON strings."""
    return gr.HTML(
        html_template=(HERE / "cockpit.html").read_text(encoding="utf-8"),
        js_on_load=(HERE / "cockpit.js").read_text(encoding="utf-8"),
        apply_default_css=False,
        server_functions=server_functions,
        elem_id="cockpit",
    )


async def drain(stream: Stream) -> AsyncIterator[list]:
    """Whatever is new, again and again until the job is over. Leaving early asks the job to stop."""
    read = 0
    try:
        while True:
            last = stream.done  # before draining, or the tail is lost
            fresh = stream.items[read:]
            read += len(fresh)
            yield fresh
            if last:
                return
            await asyncio.sleep(TICK)
    finally:
        stream.stop()


def reason(error: BaseException) -> str:
    """One sentence about what went wrong, for whoever asked for the run."""
    if isinstance(error, (Refused, WorkerBusy)):
        return str(error)
    log.error("a run failed", exc_info=error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def toast(run: Run) -> None:
    """Say what the status line says where it cannot be missed. gradio takes toasts for markup, visitors write text."""
    gr.Warning(html.escape(run.phase[1]))


def launch_options() -> dict[str, Any]:
    """How the page is to be served: look, and nothing that leaves the machine."""
    return {
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
    pair: str = "bundled",
    device: str = "auto",
    examples: Path | None = EXAMPLES,
    engine: Engine = generate,
) -> gr.Blocks:
    """The page, ready to launch. `.worker` on it is the thread that decodes, to be watched or closed."""
    models = shelf if shelf is not None else Shelf()
    worker, runs = Worker(), Runs()
    usual = Recipe(pair=pair, device=device)
    usual = replace(usual, gamma=PAIRS[pair].gamma)

    stores: dict[str, Stores] = {}  # by visitor: nobody's text may show in another's drafts

    def start(jobs: list[tuple[str, Recipe]], prompt: Any, visitor: str = "") -> Stream[tuple[str, dict[str, Any]]]:
        if not isinstance(prompt, str):
            raise Refused(f"the prompt must be a text, not {type(prompt).__name__}")
        if len(prompt) > LONGEST_PROMPT:
            raise Refused(f"the prompt has {len(prompt):,} characters: shorten it to {LONGEST_PROMPT:,} at most")

        def steps() -> Iterator[tuple[str, dict[str, Any]]]:
            for lane, recipe in jobs:
                event: dict[str, Any] = {}
                for event in engine(recipe, prompt, models, stores.setdefault(visitor, {}) if visitor else {}):
                    yield lane, event
                if event.get("end") == "error":
                    return

        return worker.submit(steps)

    async def show(request: gr.Request, prompt: str, compare: bool, *values: Any) -> AsyncIterator[str]:
        settings = dict(zip(controls, values, strict=True))
        plan = (PLAIN,) if settings["method"] == "ar" else (SPEC, PLAIN) if compare else (SPEC,)
        run = runs.new(request.session_hash or "", plan)
        shown = run.frame(0)
        yield shown
        try:
            recipe = recipe_of(settings, device)
            lanes = [(lane, replace(recipe, method="ar") if lane == PLAIN else recipe) for lane in plan]
            stream = start(lanes, prompt, request.session_hash or "")
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
                    if not stream.started and (ahead := worker.ahead(stream)):
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
            stream = start([(SPEC, recipe_of(asked, device))], prompt)
        except (Refused, WorkerBusy) as error:
            raise gr.Error(reason(error), print_exception=False) from None
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for _, event in batch:
                    if "phase" not in event:
                        yield json.dumps(event)
        if stream.error:
            raise gr.Error(reason(stream.error), print_exception=False)

    def trace_since(asked: Any) -> str | None:
        """For a browser that missed frames: `[run id, how many records it has]`."""
        run_id, have = asked if isinstance(asked, list) and len(asked) == 2 else (None, 0)
        run = runs.get(run_id)
        return run.frame(have) if run and isinstance(have, int) and have >= 0 else None

    def trace(asked: Any) -> str | None:
        """The trace to save: `[run id, lane]`."""
        run_id, lane = asked if isinstance(asked, list) and len(asked) == 2 else (None, "")
        run = runs.get(run_id)
        return run.trace(lane) if run and isinstance(lane, str) else None

    def stop_run(run_id: Any) -> None:
        """Stop, which knows the run by its unguessable id. The frames go on to the end, so the tail is not lost."""
        if run := runs.get(run_id):
            run.stop()

    def leave(request: gr.Request) -> None:
        runs.leave(request.session_hash or "")
        stores.pop(request.session_hash or "", None)

    with gr.Blocks(title="specdemo", analytics_enabled=False, fill_width=True) as demo:
        controls = sidebar(usual)
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
            compare = gr.Checkbox(label="Compare: run plain decoding afterwards", elem_id="compare", container=False)
        drawn = cockpit([trace_since, trace, stop_run])
        method = controls["method"]
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
        failed = "() => { window.dispatchEvent(new Event('specdemo:failed')) }"  # a full queue, a lost server
        pressed.failure(None, None, None, js=failed, api_visibility="private")
        gr.api(api, api_name="generate", concurrency_limit=None)
        demo.unload(leave)
    demo.queue(max_size=64)
    demo.worker = worker
    return demo
