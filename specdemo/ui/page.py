"""Build the page: layout, event handlers and routes.

The single worker of the service queues all runs; gradio's limits release a slot before its work has ended.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.events import api

from specdemo.core.errors import UserError, check_name
from specdemo.core.trace import MAX_CHARACTERS
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SAME
from specdemo.models.zoo import ASSETS, CHAT_PAIR, PAIRS, first_installed, first_with_drafter
from specdemo.option_rules import settings_of_pair
from specdemo.recipe import Recipe
from specdemo.remote.admission import ConnectionLimits, limit_connections
from specdemo.remote.local_service import LocalServices
from specdemo.ui.api import endpoints
from specdemo.ui.documents import document_route, page_links
from specdemo.ui.gateway import gateway
from specdemo.ui.lane import EXTRA, name_lanes
from specdemo.ui.lessons import lessons_page
from specdemo.ui.limits import HostLimits
from specdemo.ui.page_files import CLAIM, file_routes, markup, mount_module
from specdemo.ui.run_store import recordings
from specdemo.ui.runs import REPEATS, Runs
from specdemo.ui.service import Generate, Health, Service, error_sentence
from specdemo.ui.settings import (
    OFF,
    Examples,
    Settings,
    first_example,
    from_link,
    link_problems,
    recipe_of,
    restored,
    stored_lanes,
    with_method_names,
)
from specdemo.ui.settings_form import SettingsForm, settings_form
from specdemo.ui.tabs import build_tabs
from specdemo.ui.tabs.components import link_papers
from specdemo.ui.tabs.measurement_panel import MeasurementPanel
from specdemo.ui.tabs.prediction import connect_fit, connect_prediction, contradicted_prediction
from specdemo.ui.theme import launch_options
from specdemo.ui.visitors import shown_messages
from specdemo.worker import Worker, WorkerBusy

EXAMPLES = ASSETS / "examples.json"
QUEUED_EVENTS = 64
IDLE_POLL_S = 0.02
_EVENTS = ConnectionLimits.total  # others wait for runs
RECORDED_TOP = 5  # tokens recorded per distribution, for the inspector

_HEADER = f'<a id="skip" href="#prompt">Skip to the prompt</a><header><h1>specdemo</h1><p>{CLAIM}</p></header>'
_QUEUED: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
_IMMEDIATE: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_STORED_JS = """() => {
  const stored = (key) => { try { return JSON.parse(localStorage.getItem(key)); } catch { return null; } };
  return [{ settings: stored("specdemo-settings"), lanes: stored("specdemo-lanes")?.lanes }];
}"""
_RESTORE_JS = """(restored) => {
  window.specdemoRestored = restored;
  window.dispatchEvent(new Event("specdemo:restored")); // or read when the page is mounted
}"""
_COMPARISON_JS = "() => [{ settings: window.specdemo.settings(), lanes: window.specdemo.lanes() }]"


@dataclass(frozen=True)
class Page:
    """Gradio blocks, routes and life of the page."""

    blocks: gr.Blocks
    worker: Worker  # decodes; closed by the caller
    clouds: LocalServices  # processes of verification services; closed by the caller
    routes: list[Any]  # Starlette routes, served with the page
    middleware: list[Any]  # Starlette middleware
    connections: ConnectionLimits
    hosts: set[str] | None  # accepted values of the Host header; None: all
    health: Health | None  # None: probes would cost ZeroGPU quota
    preload: Callable[[], object] | None  # loads the first models; None: not on this machine

    def launch(self, **options: Any) -> tuple[Any, str, str | None]:
        """Serve the page in a background thread. Return the application, the local and the public address."""
        served = {**launch_options(self.routes, self.middleware), "max_threads": _EVENTS, "prevent_thread_lock": True}
        # Without Gradio's own request to the page, which fails on a busy machine or behind a proxy for localhost.
        launched: tuple[Any, str, str | None] = self.blocks.launch(_frontend=False, **served, **options)
        limit_connections(self.blocks.server.config, self.connections)  # `launch` has no option for it
        return launched

    @property
    def url(self) -> str:
        """Local address of the launched page, with a final slash."""
        return str(self.blocks.local_url)


class PageBlocks(gr.Blocks):
    """Gradio blocks that answer every malformed event with a sentence; logs quote no visitor."""

    async def process_api(self, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            return await super().process_api(*args, **options)
        except gr.Error as error:
            raise gr.Error(error.message, title=error.title, print_exception=False) from None
        except (UserError, WorkerBusy, OSError) as error:
            raise gr.Error(error_sentence(error), print_exception=False) from None
        except Exception as error:
            error_sentence(error)  # logs it
            raise gr.Error("the page cannot use these values: reload it", print_exception=False) from None


def build(
    pool: ModelPool | None = None,
    pair: str | None = None,
    device: str = "auto",
    examples: Path | None = EXAMPLES,
    engine: Generate = generate,
    limits: HostLimits | None = None,
    worker: Worker | None = None,
    compare: bool | None = None,
    permanent: bool = True,
) -> Page:
    """Return the page. Raise `UserError` for an unknown pair.

    `compare`: run the AR baseline by default; `permanent`: see `Service`.
    """
    limits = limits if limits is not None else HostLimits()
    scripted = first_with_drafter(limits.pairs) if pair is None else pair
    pair = pair if pair is not None else first_installed(limits.pairs)
    check_name("pair", pair, limits.pairs)
    service = Service(pool if pool is not None else ModelPool(hub=limits.hub), engine, limits, worker, permanent)
    texts = json.loads(examples.read_text(encoding="utf-8")) if examples else {"ready": [], "methods": {}}
    shown_examples = available_examples(texts, [name for name in limits.pairs if not PAIRS[name].missing])
    own = dict(PAIRS[pair].settings)
    if "temperature" in (example := first_example(shown_examples["ready"], pair)):
        own["temperature"] = example["temperature"]
    initial = limits.clamp(Recipe(pair=pair, device=device, top=RECORDED_TOP, **own))
    of_api = limits.clamp(Recipe(pair=scripted, device=device, **PAIRS[scripted].settings))
    with PageBlocks(title="specdemo", analytics_enabled=False, fill_width=True) as demo:
        handlers = _layout(service, initial, device, shown_examples, not limits.public if compare is None else compare)
        values = handlers.form.values
        loaded = demo.load(handlers.restore_settings, values, values, js=_STORED_JS, **_QUEUED)
        loaded.then(None, values, None, js=_RESTORE_JS, **_PRIVATE)
        runs = Runs(service, device, handlers.defaults)
        for name, function in endpoints(service, of_api, device).items():
            api(function, api_name=name, concurrency_limit=None)
    lessons_page(demo)
    demo._queue.max_size = QUEUED_EVENTS  # `demo.queue` would create the routes again
    demo._queue.sleep_when_free = IDLE_POLL_S  # Gradio polls its queue 1,000 times per second
    health = Health(service, replace(initial, method="ar", max_tokens=2)) if permanent else None
    installed = permanent and Path(PAIRS[pair].target).exists()
    middleware, hosts = gateway(limits, os.environ)
    routes = [*runs.routes, *file_routes(), document_route(), *([health.route] if health else [])]
    return Page(
        demo,
        service.worker,
        service.clouds,
        routes=routes,
        middleware=middleware,
        connections=limits.of_connections,
        hosts=hosts,
        health=health,
        preload=partial(service.probe, replace(initial, max_tokens=2)) if installed else None,
    )


def available_examples(examples: Mapping[str, Any], pairs: Container[str]) -> dict[str, Any]:
    """Return the examples of `pairs` with all of their settings; methods have some for the bundled pair."""
    code = {"pair": "bundled", "chat": False, "title": "", "effect": ""}
    methods = examples["methods"] if code["pair"] in pairs else {}
    return {
        "ready": [_complete(example) for example in examples["ready"] if example["pair"] in pairs],
        **{
            which: {method: _complete({**code, "method": method, **made[which]}) for method, made in methods.items()}
            for which in ("best", "worst")
        },
    }


def _complete(example: Mapping[str, Any]) -> dict[str, Any]:
    own = settings_of_pair(PAIRS[example["pair"]], {"method": example["method"]})
    return {"target": "", "drafter": "", **own, **example}


def _examples_row(shown: Mapping[str, Any]) -> None:
    titles = [(example["title"], f'data-example="{i}"') for i, example in enumerate(shown["ready"])]
    titles += [(f"Method at its {which}", f'id="at-{which}"') for which in ("best", "worst") if shown[which]]
    chips = "".join(f'<button type="button" class="chip" {own}>{html.escape(title)}</button>' for title, own in titles)
    examples = html.escape(json.dumps(shown))
    toolbar = f'<div id="examples" role="toolbar" aria-label="Examples" data-examples="{examples}">{chips}</div>'
    gr.HTML(toolbar, elem_id="all-examples", apply_default_css=False)


def _layout(service: Service, initial: Recipe, device: str, examples: dict[str, Any], compared: bool) -> _Handlers:
    """Lay out the page and wire the events that need the server or parts of Gradio; `settings.js` handles others."""
    gr.HTML(_HEADER, elem_id="masthead", apply_default_css=False)  # before the sidebar, for the keyboard
    form = settings_form(initial, service.limits)
    text = first_example(examples["ready"], initial.pair).get("prompt", "")
    handlers = _Handlers(
        service, form, device, {**form.defaults, "prompt": text, "compare": compared}, examples["ready"]
    )
    _examples_row(examples)
    with gr.Row(elem_id="ask"):
        gr.Textbox(
            text,
            label="Prompt",
            lines=2,
            max_lines=8,
            elem_id="prompt",
            interactive=True,
            placeholder="A message, or the beginning of a text or program…",
        )
        with gr.Column(elem_id="actions", scale=0, min_width=130):
            gr.Button("Run", variant="primary", elem_id="run", scale=0)
            gr.Button("Continue chat", elem_id="continue-chat", scale=0, visible="hidden")
            gr.Button("Stop", elem_id="stop", scale=0)
    gr.HTML('<p id="example-effect" aria-live="polite"></p>', elem_id="effect", apply_default_css=False)
    drawn = gr.HTML(  # status, tiles, lanes, replay and step inspector, drawn in the browser from JSON frames
        html_template=markup(),
        js_on_load=mount_module("page"),
        apply_default_css=False,
        elem_id="cockpit",
        max_trace=service.limits.max_trace or MAX_CHARACTERS,
        recordings=recordings(),
    )
    conversation = gr.Chatbot(  # mounted after the first answer
        visible=False,
        label="Conversation",
        show_label=False,
        elem_id="conversation",
        height=420,
        buttons=["copy"],
    )
    estimate = _laboratory(handlers, conversation, drawn, compared)
    connect_fit(service, form, device)
    if CHAT_PAIR in service.limits.pairs and (command := PAIRS[CHAT_PAIR].missing):
        gr.Markdown(f"The chat model SmolLM2 is not installed (93 MB): `{command}`, then restart.", elem_id="notice")
    about = build_tabs(service, form, initial, device, drawn)
    page_links(os.environ)
    drawn.submit(handlers.show_end, None, [conversation, estimate], trigger_mode="multiple", **_QUEUED)
    drawn.clear(handlers.end_conversation, None, conversation, **_QUEUED)
    drawn.delete(handlers.unload, None, None, **_QUEUED)
    drawn.select(describe_method, None, about, trigger_mode="always_last", **_IMMEDIATE)
    for event, is_open in ((drawn.expand, "true"), (drawn.collapse, "false")):
        event(None, None, form.sidebar, js=f"() => ({{ __type__: 'update', open: {is_open} }})", **_PRIVATE)
    return handlers


def _laboratory(handlers: _Handlers, conversation: gr.Chatbot, drawn: gr.HTML, compared: bool) -> gr.Markdown:
    """Lay out comparison, prediction and further actions; return the estimate."""
    gr.HTML("<h2>Laboratory</h2>", elem_id="laboratory", apply_default_css=False)
    with gr.Row(elem_id="more-measurements"):
        gr.Checkbox(
            compared,
            label="Compare with autoregressive decoding",
            elem_id="compare",
            container=False,
            interactive=True,
        )
        _button("repeat", f"Repeat ×{REPEATS}")
        predict = [_button("preflight", "Predict the speed-up")]
    progress = gr.HTML(elem_id="estimate-progress")
    estimate = gr.Markdown(elem_id="estimate")
    with gr.Row(elem_id="outdated-estimate"):
        gr.Markdown("Settings or prompt have changed.")
        predict.append(_button("update-estimate", "Update"))
    gr.HTML('<p id="kept-lanes" aria-live="polite"></p>', elem_id="added-lanes", apply_default_css=False)
    values = handlers.form.values
    with gr.Row(elem_id="more-actions"):
        adding = [_button("keep-lane", "Add these settings to comparisons").click, drawn.edit]
        copying = [_button("keep-copy", "Add the quantised model to comparisons").click]
        _button("drop-lanes", "Remove added settings")
        _button("link", "Link to these settings")
        forgetting = _button("new-talk", "New conversation")
        forgetting.click(handlers.end_conversation, None, conversation, **_QUEUED)
        reset = _button("reset", "Reset")
        reset.click(None, None, [estimate, progress], js="() => ['', '']", **_PRIVATE)
    for triggers, copied in ((adding, False), (copying, True)):
        added = gr.on(triggers, partial(handlers.add_lane, copied), values, values, js=_COMPARISON_JS, **_QUEUED)
        added.then(None, values, None, js="(lanes) => window.specdemo.storeLanes(lanes)", **_PRIVATE)
    panel = MeasurementPanel(handlers.service, predict, progress, failures=estimate)
    connect_prediction(handlers.service, handlers.form, handlers.device, panel, estimate)
    return estimate


def _button(name: str, title: str) -> gr.Button:
    return gr.Button(title, size="sm", elem_id=name, scale=0)


def describe_method(event: gr.EventData) -> str:
    """Return the notes of the chosen method."""
    method = METHODS.get(str(event.method))
    return link_papers(method.notes) if method else ""


@dataclass(frozen=True)
class _Handlers:
    service: Service
    form: SettingsForm
    device: str
    defaults: Settings
    examples: Examples

    def show_end(self, event: gr.EventData, request: gr.Request) -> Any:
        """Show the conversation and a contradicted prediction after a run, and why it failed."""
        run = self.service.runs.get(event.run)
        if run is not None and run.phase[0] == "failed":
            gr.Warning(html.escape(run.phase[1]))
        conversation = self._conversation(run.visitor if run is not None else request.session_hash or "")
        return conversation, contradicted_prediction(self.service, run)

    def _conversation(self, visitor: str) -> Any:
        known = self.service.visitors.find(visitor)
        messages = shown_messages(known.messages, known.footers)
        return gr.Chatbot(value=messages, visible=bool(messages))

    def add_lane(self, copied: bool, sent: Any) -> dict[str, Any]:
        """Add the settings, or those of the target's quantised copy, to the stored lanes; return and describe all."""
        known = sent if isinstance(sent, dict) else {}
        lanes = self._stored(known)
        try:
            wanted = self.form.complete(known.get("settings"))
            wanted = self._copy_settings(wanted) if copied else wanted
            recipe = recipe_of(wanted, self.device)
            if len(lanes) == len(EXTRA):
                raise UserError(f"{len(EXTRA)} settings are added already: remove them first")
            lanes.append((wanted, recipe))
        except UserError as error:
            gr.Warning(html.escape(error_sentence(error)))
        return _described(lanes)

    def _copy_settings(self, settings: Settings) -> Settings:
        if settings["drafter"] != SAME:
            settings |= {"drafter": SAME, "drafter_quantization": "none"}
        quantization = recipe_of({**settings, "method": "draft"}, self.device).drafter_quantization
        return {**settings, "method": "ar", "quantization": quantization, "drafter": ""}

    def restore_settings(self, sent: Any, request: gr.Request) -> dict[str, Any]:
        """Return the settings of the link or of the last visit, as far as they are valid, and the stored lanes."""
        known = sent if isinstance(sent, dict) else {}
        query = dict(request.query_params)
        link = from_link(query, self.defaults, self.examples)
        wanted = link or known.get("settings")
        settings, errors = restored(wanted, self.defaults, self.device, effective=bool(link))
        for text in [*map(with_method_names, errors), *link_problems(query, self.defaults)]:
            gr.Warning(html.escape(text))
        remote = settings["remote"] if settings.get("mode", OFF) != OFF else ""
        for address in filter(None, (remote, settings.get("external"))) if link else ():
            gr.Warning(html.escape(f"This link has prompts sent to {address}: run it only if you trust it."))
        changed = {name: value for name, value in settings.items() if value != self.defaults[name]}
        return {"settings": changed, "lanes": _described(self._stored(known))}

    def end_conversation(self, request: gr.Request) -> Any:
        self.service.visitors.find(request.session_hash or "").end_conversation()
        return self._conversation(request.session_hash or "")

    async def unload(self) -> None:
        gr.Info(html.escape(await self.service.unload()))

    def _stored(self, sent: Mapping[str, Any]) -> list[tuple[Settings, Recipe]]:
        return stored_lanes(sent.get("lanes"), self.defaults, self.device, len(EXTRA))


def _described(lanes: Sequence[tuple[Settings, Recipe]]) -> dict[str, Any]:
    recipes = [recipe for _, recipe in lanes]
    text = f"Also compared, with the same target: {name_lanes(recipes)}." if recipes else ""
    return {"lanes": [settings for settings, _ in lanes], "text": text}
