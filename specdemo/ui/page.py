"""Build the page: layout, event handlers and everything served with it.

The single worker of the service queues all runs; gradio's limits release a slot before its work has ended.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
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
from specdemo.recipe import Recipe
from specdemo.remote.connections import ConnectionLimits, limit_connections
from specdemo.remote.local_service import LocalServices
from specdemo.ui.api import endpoints
from specdemo.ui.cockpit import cockpit, script
from specdemo.ui.controls import (
    PAIR_SETTINGS,
    Controls,
    available_examples,
    connect_pair,
    examples_row,
    sidebar,
)
from specdemo.ui.documents import document_route, page_links
from specdemo.ui.event_requests import PageBlocks
from specdemo.ui.gateway import TRACES, gateway
from specdemo.ui.health import Health
from specdemo.ui.lane import (
    EXTRA,
    describe_stored_lanes,
)
from specdemo.ui.lessons import lessons_page
from specdemo.ui.limits import HostLimits
from specdemo.ui.markdown import link_papers
from specdemo.ui.method_names import with_method_names
from specdemo.ui.page_files import file_route
from specdemo.ui.page_head import picture_route
from specdemo.ui.runs import REPEATS, Runs, run_route
from specdemo.ui.service import Generate, Service
from specdemo.ui.settings import (
    OFF,
    Examples,
    Settings,
    first_example,
    from_link,
    link_problems,
    recipe_of,
    recipe_settings,
    restored,
    stored_recipes,
)
from specdemo.ui.streams import frame_routes, reason, trace_route
from specdemo.ui.tabs import build_tabs
from specdemo.ui.tabs.measurement_panel import PanelParts
from specdemo.ui.tabs.prediction import SpeedupPrediction, connect_prediction
from specdemo.ui.theme import launch_options
from specdemo.ui.visitors import shown_messages
from specdemo.worker import Worker, WorkerGroup

EXAMPLES = ASSETS / "examples.json"
IDLE_POLL_S = 0.02
_EVENTS = ConnectionLimits.total  # others wait for runs
RECORDED_TOP = 5  # tokens recorded per distribution, for the inspector

_HEADER = """<header><h1>specdemo</h1><p>A drafter guesses tokens, the large model (target) checks them in one pass.
The text stays the same.</p></header>"""
_EFFECT = '<p id="example-effect" aria-live="polite"></p>'
_QUEUED: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
_IMMEDIATE: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_TO_OTHER_TABS = "(...values) => window.specdemoTabs.postMessage(JSON.stringify(values))"


@dataclass(frozen=True)
class Page:
    """The Gradio blocks of the page with everything that is served, started or closed with them."""

    blocks: gr.Blocks
    worker: Worker | WorkerGroup  # decodes; closed by the caller
    clouds: LocalServices  # processes of verification services; closed by the caller
    routes: list[Any]  # Starlette routes, served with the page
    middleware: list[Any]  # Starlette middleware
    connections: ConnectionLimits
    hosts: set[str] | None  # accepted values of the Host header; None: all
    health: Health | None  # None: probes would cost ZeroGPU quota
    preload: Callable[[], object] | None  # loads the first models; None: not on this machine

    def launch(self, **options: Any) -> tuple[Any, str, str | None]:
        """Serve the page in a background thread. Return the application, the local and the public address."""
        served = {**launch_options(self.routes, self.middleware), "max_threads": _EVENTS}
        launched: tuple[Any, str, str | None] = self.blocks.launch(prevent_thread_lock=True, **served, **options)
        limit_connections(self.blocks.server.config, self.connections)  # `launch` has no option for it
        return launched

    @property
    def url(self) -> str:
        """Local address of the launched page, with a final slash."""
        return str(self.blocks.local_url)


def build(
    pool: ModelPool | None = None,
    pair: str | None = None,
    device: str = "auto",
    examples: Path | None = EXAMPLES,
    engine: Generate = generate,
    limits: HostLimits | None = None,
    worker: Worker | WorkerGroup | None = None,
    compare: bool | None = None,
) -> Page:
    """Return the page. `compare`: run the AR baseline by default. Raise `UserError` for an unknown pair."""
    limits = limits if limits is not None else HostLimits()
    scripted = first_with_drafter(limits.pairs) if pair is None else pair
    pair = pair if pair is not None else first_installed(limits.pairs)
    check_name("pair", pair, limits.pairs)
    service = Service(pool if pool is not None else ModelPool(hub=limits.hub), engine, limits, worker)
    shown_examples = _read_examples(examples, limits)
    own = {**PAIRS[pair].settings, **_temperature(first_example(shown_examples["ready"], pair))}
    initial = limits.fit(Recipe(pair=pair, device=device, top=RECORDED_TOP, **own))
    of_api = limits.fit(Recipe(pair=scripted, device=device, **PAIRS[scripted].settings))
    with PageBlocks(title="specdemo", analytics_enabled=False, fill_width=True) as demo:
        parts = _layout(service, initial, device, shown_examples, not limits.public if compare is None else compare)
        handlers = _Handlers(service, device, parts.defaults, shown_examples["ready"])
        _connect_runs(parts, handlers)
        _connect_lanes(parts, handlers)
        _connect_settings(demo, parts, handlers)
        runs = Runs(service, device, parts.defaults)
        for name, function in endpoints(service, of_api, device).items():
            api(function, api_name=name, concurrency_limit=None)
        demo.unload(handlers.leave)
    lessons_page(demo)
    demo.queue(max_size=64)
    demo._queue.sleep_when_free = IDLE_POLL_S  # Gradio polls its queue 1,000 times per second
    permanent = isinstance(service.worker, Worker)
    health = Health(service, replace(initial, method="ar", max_tokens=2)) if permanent else None
    installed = permanent and Path(PAIRS[pair].target).exists()
    middleware, hosts = gateway(limits, os.environ)
    return Page(
        demo,
        service.worker,
        service.clouds,
        routes=_routes(runs, service, health),
        middleware=middleware,
        connections=limits.of_connections,
        hosts=hosts,
        health=health,
        preload=partial(service.probe, replace(initial, max_tokens=2)) if installed else None,
    )


def _read_examples(path: Path | None, limits: HostLimits) -> dict[str, Any]:
    texts = json.loads(path.read_text(encoding="utf-8")) if path else {"ready": [], "methods": {}}
    return available_examples(texts, [name for name in limits.pairs if not PAIRS[name].missing])


def _temperature(example: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in example.items() if name == "temperature"}


def _routes(runs: Runs, service: Service, health: Health | None) -> list[Any]:
    return [
        run_route(runs),
        *frame_routes(service.runs),
        trace_route(TRACES, service.runs),
        file_route(),
        picture_route(),
        document_route(),
        *([health.route()] if health else []),
    ]


@dataclass(frozen=True)
class _Parts:
    controls: Controls
    prompt: gr.Textbox
    compare: gr.Checkbox
    buttons: dict[str, gr.Button]  # keys are element ids
    stored_lanes: gr.Markdown
    progress: gr.HTML  # progress bar of the estimate
    estimate: gr.Markdown
    cockpit: gr.HTML
    conversation: gr.Chatbot  # mounted after the first answer
    about: gr.Markdown
    saved: gr.BrowserState  # settings of the last visit
    stored: gr.BrowserState  # settings of the stored lanes

    @property
    def settings(self) -> Controls:
        return {**self.controls, "prompt": self.prompt, "compare": self.compare}

    @property
    def defaults(self) -> Settings:
        return {name: component.value for name, component in self.settings.items()}


def _layout(service: Service, initial: Recipe, device: str, examples: dict[str, Any], compared: bool) -> _Parts:
    def forget(request: gr.Request) -> None:
        service.visitors.find(request.session_hash or "").end_conversation()

    controls = sidebar(initial, service.limits, service.unload)
    gr.HTML(_HEADER, elem_id="masthead", apply_default_css=False)
    prompt = gr.Textbox(
        first_example(examples["ready"], initial.pair).get("prompt", ""),
        label="Prompt",
        lines=2,
        max_lines=8,
        elem_id="prompt",
        placeholder="A message, or the beginning of a text or program…",
        render=False,
    )
    with gr.Column(elem_id="all-examples"):
        examples_row(examples, prompt, controls, forget)
    connect_pair(controls, prompt, examples["ready"])
    with gr.Row(elem_id="ask"):
        prompt.render()  # type: ignore[no-untyped-call]
        with gr.Column(elem_id="actions", scale=0, min_width=130):
            buttons = {"run": gr.Button("Run", variant="primary", elem_id="run", scale=0)}
            buttons["continue-chat"] = gr.Button("Continue chat", elem_id="continue-chat", scale=0, visible="hidden")
            buttons["stop"] = gr.Button("Stop", elem_id="stop", scale=0)
    gr.HTML(_EFFECT, elem_id="effect", apply_default_css=False)
    drawn = cockpit(service.runs.queries, service.limits.max_trace or MAX_CHARACTERS)
    conversation = _conversation_view()
    compare, progress, estimate, stored_lanes = _actions(buttons, compared)
    if CHAT_PAIR in service.limits.pairs and (command := PAIRS[CHAT_PAIR].missing):
        gr.Markdown(f"The chat model SmolLM2 is not installed (93 MB): `{command}`, then restart.", elem_id="notice")
    about = build_tabs(service, controls, initial, device)
    page_links(os.environ)
    return _Parts(
        controls,
        prompt,
        compare,
        buttons,
        stored_lanes,
        progress,
        estimate,
        cockpit=drawn,
        conversation=conversation,
        about=about,
        saved=gr.BrowserState(storage_key="specdemo-settings", secret="specdemo"),
        stored=gr.BrowserState(storage_key="specdemo-lanes", secret="specdemo"),
    )


def _conversation_view() -> gr.Chatbot:
    return gr.Chatbot(
        visible=False,
        label="Conversation",
        show_label=False,
        elem_id="conversation",
        height=420,
        buttons=["copy"],
    )


def _actions(buttons: dict[str, gr.Button], compared: bool) -> tuple[gr.Checkbox, gr.HTML, gr.Markdown, gr.Markdown]:
    with gr.Row(elem_id="more-measurements"):
        compare = gr.Checkbox(
            compared, label="Compare with autoregressive decoding", elem_id="compare", container=False
        )
        buttons["repeat"] = gr.Button(f"Repeat ×{REPEATS}", size="sm", elem_id="repeat", scale=0)
        buttons["preflight"] = gr.Button("Predict the speed-up", size="sm", elem_id="preflight", scale=0)
        buttons["use"] = gr.Button("Use", elem_id="use-recorded", visible="hidden")
        buttons["lanes-of-tab"] = gr.Button("Use", elem_id="lanes-of-tab", visible="hidden")
    progress = gr.HTML(elem_id="estimate-progress")
    estimate = gr.Markdown(elem_id="estimate")
    with gr.Row(elem_id="outdated-estimate"):
        gr.Markdown("Settings or prompt have changed.")
        buttons["update-estimate"] = gr.Button("Update", size="sm", elem_id="update-estimate", scale=0)
    stored_lanes = gr.Markdown(elem_id="kept-lanes")
    with gr.Accordion("More actions", open=False, elem_id="more-actions"), gr.Row():
        for name, title in _MORE_ACTIONS.items():
            buttons[name] = gr.Button(title, size="sm", elem_id=name, scale=0)
    return compare, progress, estimate, stored_lanes


_MORE_ACTIONS = {
    "keep-lane": "Add these settings to comparisons",
    "keep-copy": "Add the quantised model to comparisons",
    "drop-lanes": "Remove added settings",
    "link": "Link to these settings",
    "new-talk": "New conversation",
    "reset": "Reset",
}


def _connect_runs(parts: _Parts, handlers: _Handlers) -> None:
    settings = list(parts.settings.values())
    names = list(parts.settings)
    for name, turn in (("run", "new"), ("continue-chat", "next"), ("repeat", "repeat")):
        parts.buttons[name].click(
            None,
            [parts.stored, *settings],
            js=script("press_run", {"names": names, "turn": turn}),
            trigger_mode="multiple",  # the cockpit passes clicks one by one
            **_PRIVATE,
        )
    parts.cockpit.submit(handlers.ended, None, parts.conversation, trigger_mode="multiple", **_QUEUED)
    parts.buttons["continue-chat"].click(None, None, parts.prompt, js="() => ''", **_PRIVATE)  # the run has read it
    _connect_estimate(parts, handlers)
    method = parts.controls["method"]
    notes = {name: link_papers(method.notes) for name, method in METHODS.items()}
    method.change(lambda name: notes.get(str(name), ""), method, parts.about, preprocess=False, **_IMMEDIATE)


def _connect_estimate(parts: _Parts, handlers: _Handlers) -> None:
    buttons = tuple(parts.buttons[name] for name in ("preflight", "update-estimate"))
    settings = list(parts.settings.values())
    connect_prediction(
        handlers.service, PanelParts(buttons, parts.progress), parts.estimate, settings, handlers.prediction
    )


def _connect_lanes(parts: _Parts, handlers: _Handlers) -> None:
    buttons = parts.buttons
    stored, stored_lanes = parts.stored, parts.stored_lanes
    inputs = [stored, *parts.controls.values()]
    shown = [stored, stored_lanes]
    changes = (
        buttons["keep-lane"].click(handlers.keep, inputs, shown, preprocess=False, **_QUEUED),
        buttons["keep-copy"].click(handlers.keep_copy, inputs, shown, preprocess=False, **_QUEUED),
        buttons["drop-lanes"].click(None, None, shown, js="() => [[], '']", **_PRIVATE),  # null would not be stored
    )
    for change in changes:
        change.success(None, shown, None, js=_TO_OTHER_TABS, **_PRIVATE)
    buttons["lanes-of-tab"].click(None, None, shown, js="() => window.specdemoLanes", **_PRIVATE)
    buttons["new-talk"].click(handlers.forget, None, parts.conversation, **_QUEUED)


def _connect_settings(demo: gr.Blocks, parts: _Parts, handlers: _Handlers) -> None:
    settings, defaults = list(parts.settings.values()), parts.defaults
    data = {"names": list(parts.settings), "defaults": list(defaults.values())}
    changes = [component.change for component in settings]
    gr.on(changes, None, settings, parts.saved, js=script("save_settings", data), **_IMMEDIATE)
    parts.buttons["link"].click(
        None, settings, None, js=script("copy_link", {**data, "pairSettings": PAIR_SETTINGS}), **_PRIVATE
    )
    recorded = "(name) => window.specdemoRecorded?.[name] ?? undefined"  # undefined: unchanged
    use = f"() => {json.dumps(data['names'])}.map({recorded})"
    parts.buttons["use"].click(None, None, settings, js=use, **_PRIVATE)
    initial = json.dumps([*defaults.values(), "", ""])
    parts.buttons["reset"].click(
        None, None, [*settings, parts.estimate, parts.progress], js=f"() => {initial}", **_PRIVATE
    )
    restorable = gr.Textbox(visible=False)
    demo.load(
        handlers.find, [parts.saved, parts.stored], [restorable, parts.stored_lanes], preprocess=False, **_QUEUED
    ).then(None, [restorable, *settings], settings, js=script("restore_settings", data), **_PRIVATE)


class _Handlers:
    def __init__(self, service: Service, device: str, defaults: Settings, examples: Examples = ()) -> None:
        self.service = service
        self._device, self._defaults = device, defaults
        self._examples = examples

    def ended(self, event: gr.EventData, request: gr.Request) -> Any:
        """Show the conversation after a run, and why it failed."""
        run = self.service.runs.get(event.run)
        if run is not None and run.phase[0] == "failed":
            gr.Warning(html.escape(run.phase[1]))
        return self._conversation(run.visitor if run is not None else request.session_hash or "")

    def _conversation(self, visitor: str) -> Any:
        known = self.service.visitors.find(visitor)
        messages = shown_messages(known.messages, known.footers)
        return gr.Chatbot(value=messages, visible=bool(messages))

    def prediction(self, _: str, values: tuple[Any, ...]) -> SpeedupPrediction:
        settings = dict(zip(self._defaults, values, strict=True))
        prompt = settings["prompt"] if isinstance(settings["prompt"], str) else ""
        return SpeedupPrediction(replace(self._recipe(settings), external=None), prompt)

    def keep(self, stored: Any, *values: Any) -> tuple[Any, str]:
        return self._keep(stored, values, lambda settings: settings)

    def keep_copy(self, stored: Any, *values: Any) -> tuple[Any, str]:
        return self._keep(stored, values, self._copy_settings)

    def _copy_settings(self, settings: Settings) -> Settings:
        if settings["drafter"] != SAME:
            settings |= {"drafter": SAME, "drafter_quantization": "none"}
        form = recipe_of({**settings, "method": "draft"}, self._device).drafter_quantization
        return {**settings, "method": "ar", "quantization": form, "drafter": ""}

    def _keep(self, stored: Any, values: Sequence[Any], select: Callable[[Settings], Settings]) -> tuple[Any, str]:
        lanes = self._lanes(stored)
        try:
            if not isinstance(stored, (list, type(None))):
                raise UserError("the added settings must be a list: remove them first")
            wanted = select(recipe_settings(dict(zip(self._defaults, values, strict=False))))
            recipe = recipe_of(wanted, self._device)
            if len(lanes) == len(EXTRA):
                raise UserError(f"{len(EXTRA)} settings are added already: remove them first")
        except UserError as error:
            gr.Warning(html.escape(reason(error)))
            return gr.skip(), describe_stored_lanes(lanes)
        valid = [lane for lane in (stored or [])[: len(EXTRA)] if self._lanes([lane])]
        return [*valid, wanted], describe_stored_lanes([*lanes, recipe])

    def find(self, saved: Any, stored: Any, request: gr.Request) -> tuple[str, str]:
        link = from_link(dict(request.query_params), self._defaults, self._examples)
        settings, errors = restored(link or saved, self._defaults, self._device, effective=bool(link))
        for error in errors:
            gr.Warning(html.escape(with_method_names(error)))
        for problem in link_problems(dict(request.query_params), self._defaults):
            gr.Warning(html.escape(problem))
        remote = settings["remote"] if settings.get("mode", OFF) != OFF else ""
        for address in filter(None, (remote, settings.get("external"))) if link else ():
            gr.Warning(html.escape(f"This link has prompts sent to {address}: run it only if you trust it."))
        changed = {name: value for name, value in settings.items() if value != self._defaults[name]}
        return json.dumps(changed), describe_stored_lanes(self._lanes(stored))

    def forget(self, request: gr.Request) -> Any:
        self.service.visitors.find(request.session_hash or "").end_conversation()
        gr.Info("The next prompt begins a new conversation.")
        return self._conversation(request.session_hash or "")

    def leave(self, request: gr.Request) -> None:
        self.service.visitors.leave(request.session_hash or "")

    def _recipe(self, settings: Settings) -> Recipe:
        return recipe_of(recipe_settings(settings), self._device)

    def _lanes(self, stored: Any) -> list[Recipe]:
        return stored_recipes(stored, self._defaults, self._device, len(EXTRA))
