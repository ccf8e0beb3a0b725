"""Controls of the page, generated from the schema of options, and buttons for the example prompts."""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby, islice
from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.core.options import Option
from specdemo.drafters import METHODS, option_classes
from specdemo.drafters.method import Method
from specdemo.models.quantization import unavailable
from specdemo.models.spec import COPY_FORMS, SAME, find_device
from specdemo.models.zoo import PAIRS, Pair, offers
from specdemo.option_rules import settings_of_pair
from specdemo.recipe import PRESETS, Recipe, RunOptions
from specdemo.remote.config import CloudConfig
from specdemo.ui.cockpit import script
from specdemo.ui.limits import HostLimits
from specdemo.ui.method_names import method_name, with_method_names
from specdemo.ui.settings import MODES_WITH_OFF, Examples, first_example, recipe_of, setting_of

Control = gr.Checkbox | gr.CheckboxGroup | gr.Dropdown | gr.Number | gr.Slider | gr.Textbox
Controls = dict[str, Control]
_LINK = "Edge and cloud"
_OF_THIS_MACHINE = ("replicas", "rtt_ms", "loss")
_NUMBERS_PER_ROW = 2
FIRST = ("pair", "method", "gamma", "temperature")  # always visible
_EXAMPLE_SETTINGS = ("pair", "target", "drafter", "method", "gamma", "policy", "chat", "temperature")


def sidebar(initial: Recipe, limits: HostLimits, unload: Callable[[], Awaitable[str]]) -> Controls:
    """Build the sidebar and return its controls by option name.

    Four options are visible at first. Options that the host fixes or forbids have no control. `unload` frees memory and
    returns a message.
    """
    make = _Factory(initial, limits)
    shown = [option for option in RunOptions.OPTIONS.values() if not (option.host and limits.public)]
    with gr.Sidebar(width=310, elem_id="settings"):
        make.controls(option for option in shown if option.name in FIRST)
        # The page closes it when it opens: Gradio mounts the parts of a closed accordion later.
        with gr.Accordion("More settings", elem_id="more-settings"):
            source = gr.Dropdown(_DRAFT_SOURCES, value=_OF_PAIR, label="Draft model", elem_id="draft-model")
            make.controls(option for option in shown if option.basic and option.name not in FIRST)
            _method_groups(make, initial)
            presets = _advanced_settings(make, shown, unload)
    for preset, button in presets.items():
        chosen = {name: value for name, value in PRESETS[preset].values.items() if name in make.built}
        remote = {name: value for name, value in PRESETS[preset].link.items() if name in make.built}
        values = f"(mode, ...link) => {json.dumps(list(chosen.values()))}.concat("
        values += f'mode && mode !== "off" ? {json.dumps(list(remote.values()))} : link)'
        inputs = [make.built[name] for name in ("mode", *remote) if name in make.built]
        changed = [make.built[name] for name in (*chosen, *remote)]
        button.click(None, inputs, changed, js=values, api_visibility="private")
    _connect_method(make.built)
    _connect_copy(make.built, source)
    return make.built


def _advanced_settings(
    make: _Factory, shown: Sequence[Option], unload: Callable[[], Awaitable[str]]
) -> dict[str, gr.Button]:
    limits = make.limits
    with gr.Accordion("Advanced settings", open=False, elem_id="advanced"):
        presets = {name: gr.Button(f"Apply preset {name}", size="sm", elem_id=f"preset-{name}") for name in PRESETS}
        groups = dict.fromkeys(option.group for option in shown if not option.basic)
        for group in groups:
            if group == RunOptions.OPTIONS["external"].group and limits.engines == ():
                continue
            with gr.Accordion(group, open=False):
                make.controls(option for option in shown if option.group == group and not option.basic)
                if group == RunOptions.OPTIONS["device"].group and not limits.public:
                    _unload_button(unload)
        if limits.remote != ():
            with gr.Accordion(_LINK, open=False, elem_id="edge-cloud"):
                make.controls(
                    option
                    for option in CloudConfig.OPTIONS.values()
                    if (limits.remote is None or option.name not in _OF_THIS_MACHINE)
                    and not (option.host and limits.public)
                )
    return presets


PAIR_SETTINGS = ("method", "gamma", "policy", "temperature", "top_p", "chat")
_ON_CHANGE: dict[str, Any] = {
    "show_progress": "hidden",
    "queue": False,
    "preprocess": False,
    "api_visibility": "private",
}


_SHOW_REPLACED = """(target) =>
  ({ __type__: "update", info: target ? "Not used: a target is set under Models and devices." : null })"""


def _connect_method(controls: Controls) -> None:
    pair, method = controls["pair"], controls["method"]
    # The event `input` does not fire for examples and links.
    method.input(_pair_of_method, [pair, method, controls["chat"]], [pair, controls["chat"]], **_ON_CHANGE)
    if target := controls.get("target"):
        target.change(None, target, pair, js=_SHOW_REPLACED, **_ON_CHANGE)


def connect_pair(controls: Controls, prompt: gr.Textbox, ready: Examples) -> None:
    """A new pair sets its own settings and the prompt of its first example, unless the visitor typed a prompt."""
    prompts = {example["prompt"] for example in ready}

    def changed(name: Any, method: Any, text: Any) -> Any:
        settings = _settings_of_pair(name, method)
        example = first_example(ready, name)
        typed = not isinstance(text, str) or (text.strip() and text not in prompts)
        if not isinstance(settings, list) or not example or typed:
            return [*(settings if isinstance(settings, list) else [gr.skip()] * len(PAIR_SETTINGS)), gr.skip()]
        own = dict(zip(PAIR_SETTINGS, settings, strict=True))
        return [*(example.get(option, own[option]) for option in PAIR_SETTINGS), example["prompt"]]

    chosen = [controls[name] for name in PAIR_SETTINGS]
    # A closed list reports its value again, without a choice.
    new = "(pair, ...values) => [pair === document.body.dataset.pair ? null : pair, ...values]"
    inputs = [controls["pair"], controls["method"], prompt]
    controls["pair"].input(changed, inputs, [*chosen, prompt], js=new, **_ON_CHANGE)


def _settings_of_pair(name: Any, method: Any) -> Any:
    if not (isinstance(name, str) and name in PAIRS):
        return gr.skip()
    pair = PAIRS[name]
    fits = isinstance(method, str) and method in METHODS and _can_draft(pair, METHODS[method])
    return list(settings_of_pair(pair, {"method": method} if fits else {}).values())


def _pair_of_method(name: Any, method: Any, chat: Any) -> Any:
    if not (isinstance(name, str) and name in PAIRS and isinstance(method, str) and method in METHODS):
        return gr.skip(), gr.skip()
    if _can_draft(PAIRS[name], METHODS[method]) or not _can_draft(PAIRS["bundled"], METHODS[method]):
        return name, chat
    return "bundled", False


def _can_draft(pair: Pair, method: Method) -> bool:
    if method.uses_head and pair.head is not None:
        return True
    return method.drafter is None or (method.uses_model and pair.drafter is not None)


_OF_PAIR = "pair"
_DRAFT_SOURCES = [("the pair's own", _OF_PAIR), *((f"this model in {form}", form) for form in COPY_FORMS)]
_SHOW_SOURCE = f"""(drafter, form) => drafter === "{SAME}" ? (form === "none" ? "{COPY_FORMS[0]}" : form) :
  drafter ? null : "{_OF_PAIR}" """


def _connect_copy(controls: Controls, source: gr.Dropdown) -> None:
    inputs = [controls[name] for name in ("drafter", "drafter_quantization")]
    models = [controls[name] for name in ("method", "pair", "target", "quantization")]
    queued = {**_ON_CHANGE, "queue": True, "concurrency_limit": None}  # shows warnings
    source.input(_settings_of_source, [source, *inputs, *models], [*inputs, models[0], source], **queued)
    gr.on([control.change for control in inputs], None, inputs, source, js=_SHOW_SOURCE, **_ON_CHANGE)


def _settings_of_source(
    source: Any, drafter: Any, form: Any, method: Any, pair: Any, target: Any, quantization: Any
) -> list[Any]:
    chosen = {"pair": pair, "target": target, "quantization": quantization}
    texts = all(isinstance(value, (str, type(None))) for value in (source, method, pair, form))
    if not texts or method not in METHODS or form not in ("none", *COPY_FORMS):
        return [gr.skip()] * 4
    drafting = method in METHODS and METHODS[method].uses_model
    if source not in COPY_FORMS:
        alone = drafting and not target and pair in PAIRS and not _can_draft(PAIRS[pair], METHODS[method])
        return ["", "none", PAIRS[pair].method if alone else method, _OF_PAIR]
    copy = {"drafter": SAME, "drafter_quantization": source, "method": method if drafting else "draft"}
    try:
        recipe_of({**chosen, **copy}, "auto")
    except UserError as error:
        gr.Warning(html.escape(with_method_names(str(error))))
        return [drafter, form, method, form if drafter == SAME else None if drafter else _OF_PAIR]
    return [*copy.values(), source]


def _method_groups(make: _Factory, initial: Recipe) -> None:
    classes = option_classes()

    def visible(method: Any) -> list[bool]:
        used = METHODS[method].options if isinstance(method, str) and method in METHODS else ()
        return [group in used for group in classes]

    groups = []
    for group, shown in zip(classes, visible(initial.method), strict=True):
        title = next(iter(group.OPTIONS.values())).group
        with gr.Accordion(title, open=False, visible=shown or "hidden") as accordion:
            make.controls(group.OPTIONS.values())
        groups.append(accordion)
    make.built["method"].change(
        lambda method: [gr.update(visible=shown or "hidden") for shown in visible(method)],
        make.built["method"],
        groups,
        **_ON_CHANGE,
    )


def _unload_button(unload: Callable[[], Awaitable[str]]) -> None:
    freed = gr.Markdown(elem_id="freed")
    gr.Button("Unload models", size="sm", elem_id="unload").click(
        unload, None, freed, show_progress="hidden", concurrency_limit=None, api_visibility="private"
    )


class _Factory:
    def __init__(self, initial: Recipe, limits: HostLimits) -> None:
        self.built: Controls = {}
        self._initial, self.limits = initial, limits
        self._device = find_device(initial.device)

    def controls(self, options: Iterable[Option]) -> None:
        for numbers, group in groupby(options, _is_number_field):
            while row := list(islice(group, _NUMBERS_PER_ROW)):
                with gr.Row() if numbers else nullcontext():
                    for option in row:
                        self._build(option)

    def _build(self, option: Option) -> None:
        owner = self._initial if option.name in Recipe.OPTIONS else None
        value = setting_of(option, getattr(owner, option.name) if owner else option.default)
        label = option.label + (" (lossy)" if option.lossy else "")
        about = {"value": value, "label": label, "elem_id": option.element}
        self.built[option.name] = self._component(option, about)

    def _component(self, option: Option, about: dict[str, Any]) -> Control:
        choices = self._choices(option)
        if option.name == "external" and self.limits.engines:
            return gr.Dropdown([("none", ""), *((server, server) for server in self.limits.engines)], **about)
        if option.name == "remote" and self.limits.remote:
            services = [*self.limits.remote, " ".join(self.limits.remote)]
            return gr.Dropdown(list(dict.fromkeys(services)), **{**about, "value": services[0]})
        if choices and option.many:
            return gr.CheckboxGroup(choices, info=_sentence(option), **about)
        if choices:
            return gr.Dropdown(choices, **about)
        if option.type is bool:
            return gr.Checkbox(info=_sentence(option), **about)
        if option.slider:
            low, high, step = option.slider
            limit = self.limits.bounds().get(option.name)
            return gr.Slider(low, high if limit is None else min(high, limit), step=step, **about)
        if _is_number_field(option):
            return gr.Number(step=option.step, precision=0 if option.type is int else None, min_width=110, **about)
        placeholder = _PLACEHOLDERS.get(option.name, option.help)
        if option.many and option.item_type is str:
            return gr.Textbox(placeholder="one per line", lines=2, max_lines=4, **about)
        return gr.Textbox(placeholder=placeholder, max_lines=1, **about)

    def _choices(self, option: Option) -> list[tuple[str, str]]:
        if option.name == "pair":
            return [(pair.label, pair.name) for pair in offers(self._initial.device) if pair.name in self.limits.pairs]
        titles = MODES_WITH_OFF if option.name == "mode" else option.titles()
        if option.name in ("quantization", "drafter_quantization"):
            titles = {name: unavailable(name, self._device) or title for name, title in titles.items()}
        visible = method_name if option.name == "method" else str
        return [(name if option.many else f"{visible(name)}: {title}", name) for name, title in titles.items()]


_PLACEHOLDERS = {"skip_layers": "5, 7", "remote": "http://host:8300; empty: a local service"}


def _is_number_field(option: Option) -> bool:
    return option.type in (int, float) and option.slider is None and not option.choices


def _sentence(option: Option) -> str | None:
    sentence = option.help[0].upper() + option.help[1:]
    return None if sentence == option.label else f"{sentence}."


def available_examples(examples: Mapping[str, Any], pairs: Container[str]) -> dict[str, Any]:
    """Return the examples of `pairs`; methods have examples for the bundled pair."""
    code = {"pair": "bundled", "chat": False}
    methods = examples["methods"] if code["pair"] in pairs else {}
    return {
        "ready": [example for example in examples["ready"] if example["pair"] in pairs],
        **{
            which: {method: {**code, "method": method, **made[which]} for method, made in methods.items()}
            for which in ("best", "worst")
        },
    }


def examples_row(
    shown: Mapping[str, Any], prompt: gr.Textbox, controls: Controls, forget: Callable[[gr.Request], None]
) -> None:
    """Build buttons of examples; `forget` ends the conversation."""
    names = [name for name in _EXAMPLE_SETTINGS if name in controls]
    targets = [prompt, *(controls[name] for name in names)]

    def values(example: Mapping[str, Any]) -> list[Any]:
        own = settings_of_pair(PAIRS[example["pair"]], {"method": example["method"]})
        return [example["prompt"], *({**own, **example}.get(name, "") for name in names)]

    with gr.Row(elem_id="examples"):
        for example in shown["ready"]:
            chip = gr.Button(example["title"], size="sm", elem_classes="chip")
            apply = script("apply_example", {"effect": example["effect"], "values": values(example)})
            chip.click(None, None, targets, js=apply, api_visibility="private")
            chip.click(forget, None, None, queue=False, show_progress="hidden", api_visibility="private")
        for which in ("best", "worst"):
            if made := shown[which]:
                chip = gr.Button(f"Method at its {which}", size="sm", elem_classes="chip", elem_id=f"at-{which}")
                by_method = {method: values(example) for method, example in made.items()}
                apply = script("apply_example", {"effect": "", "examples": by_method})
                chip.click(None, [controls["method"], *targets], targets, js=apply, api_visibility="private")
