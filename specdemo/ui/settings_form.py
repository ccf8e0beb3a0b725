"""Form of the settings, generated from the schema of options."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from specdemo.core.options import Option
from specdemo.core.policies import POLICIES
from specdemo.drafters import METHODS, option_classes
from specdemo.models.quantization import unavailable
from specdemo.models.spec import COPY_FORMS, SAME, find_device
from specdemo.models.zoo import PAIRS, offers
from specdemo.option_rules import can_draft, has_effect
from specdemo.recipe import PRESETS, Recipe, RunOptions
from specdemo.remote.config import CloudConfig
from specdemo.ui.limits import HostLimits
from specdemo.ui.settings import MODES_WITH_OFF, Settings, complete_settings, method_name, setting_of

FIRST = ("pair", "method", "gamma", "temperature")  # always visible
_LINK = "Edge and cloud"
_OF_THIS_MACHINE = ("replicas", "rtt_ms", "loss")
_PLACEHOLDERS = {"skip_layers": "5, 7", "remote": "http://host:8300; empty: a local service"}
_COPY = "the pair's own"
# The last input of an event is replaced by the settings of the form.
SEND_JS = "(...values) => [...values.slice(0, -1), window.specdemo.settings()]"


@dataclass(frozen=True)
class SettingsForm:
    """Form of the sidebar. `SEND_JS` sends its settings, prompt and comparison as `values`."""

    defaults: Settings  # of the fields
    pairs: Mapping[str, str]  # names and titles of the offered pairs
    values: gr.JSON
    sidebar: gr.Sidebar

    def complete(self, sent: Any) -> Settings:
        """Return all settings of an event. Raises `UserError`."""
        return complete_settings(sent, self.defaults)


def settings_form(initial: Recipe, limits: HostLimits) -> SettingsForm:
    """Lay out the sidebar, without options that the host fixes or forbids."""
    fields = _Fields(initial, limits)
    values = gr.JSON(visible=False)
    with gr.Sidebar(width=310, elem_id="settings") as sidebar:
        text = _form(fields, limits)
        tables = html.escape(json.dumps(_tables(fields.defaults)))
        form = f'<form id="settings-form" autocomplete="off" data-tables="{tables}">{text}</form>'
        gr.HTML(form, elem_id="settings-fields", apply_default_css=False)
    return SettingsForm(fields.defaults, fields.pairs, values, sidebar)


def _form(fields: _Fields, limits: HostLimits) -> str:
    shown = [option for option in RunOptions.OPTIONS.values() if not (option.host and limits.public)]
    first = (option for option in shown if option.name in FIRST)
    more = (option for option in shown if option.basic and option.name not in FIRST)
    always = fields.markup(first)
    copies = "".join(f'<option value="{form}">this model in {form}</option>' for form in COPY_FORMS)
    options = f'<option value="">{_COPY}</option>{copies}<option value="other" hidden></option>'
    select = f"<label><span>Draft model</span><select>{options}</select></label>"
    draft_model = f'<div class="field" id="draft-model">{select}</div>'
    parts = [draft_model, fields.markup(more), *_method_groups(fields), _advanced(fields, shown, limits)]
    return always + _group("More settings", "".join(parts), "more-settings")


def _advanced(fields: _Fields, shown: list[Option], limits: HostLimits) -> str:
    parts = [
        _button(f'id="preset-{name}" data-preset="{name}"', f"Use {preset.title.partition(':')[0]}")
        for name, preset in PRESETS.items()
    ]
    for group in dict.fromkeys(option.group for option in shown if not option.basic):
        if group == RunOptions.OPTIONS["external"].group and limits.engines == ():
            continue
        text = fields.markup(option for option in shown if option.group == group and not option.basic)
        if group == RunOptions.OPTIONS["device"].group and not limits.public:
            text += _button('id="find-drafter"', "Which drafter fits?") + _button('id="unload"', "Unload models")
        parts.append(_group(group, text))
    if limits.remote != ():
        link = (
            option
            for option in CloudConfig.OPTIONS.values()
            if (limits.remote is None or option.name not in _OF_THIS_MACHINE) and not (option.host and limits.public)
        )
        parts.append(_group(_LINK, fields.markup(link), "edge-cloud"))
    return _group("Advanced settings", "".join(parts), "advanced")


def _method_groups(fields: _Fields) -> Iterable[str]:
    for group in option_classes():
        methods = [name for name, method in METHODS.items() if group in method.options]
        hidden = "" if fields.defaults["method"] in methods else " hidden"
        title = next(iter(group.OPTIONS.values())).group
        attributes = f' data-methods="{" ".join(methods)}"{hidden}'
        yield _group(title, fields.markup(group.OPTIONS.values()), attributes=attributes)


def _group(title: str, text: str, element: str = "", attributes: str = "") -> str:
    own = f' id="{element}"' if element else ""
    return f"<details{own}{attributes}><summary>{html.escape(title)}</summary>{text}</details>"


def _button(own: str, title: str) -> str:
    return f'<button type="button" class="small" {own}>{title}</button>'


def _tables(defaults: Settings) -> dict[str, Any]:
    """Return the values of settings that depend on others, for the script."""
    return {
        "defaults": defaults,
        "same": SAME,
        "pairs": {name: {"settings": pair.settings, "policy": pair.policy} for name, pair in PAIRS.items()},
        "methods": {
            name: {
                "pairs": [pair for pair in PAIRS if can_draft(PAIRS[pair], method)],
                "uses_model": method.uses_model,
                "policies": [policy for policy in POLICIES if has_effect(policy, name)],
            }
            for name, method in METHODS.items()
        },
        "presets": {name: {"values": preset.values, "link": preset.link} for name, preset in PRESETS.items()},
    }


class _Fields:
    """Fields by option, with their first values."""

    def __init__(self, initial: Recipe, limits: HostLimits) -> None:
        self.defaults: Settings = {}
        offered = [offer for offer in offers(initial.device) if offer.name in limits.pairs]
        self.pairs = {offer.name: offer.label for offer in offered}
        self._pair_groups = {offer.name: offer.group for offer in offered}
        self._initial, self._limits = initial, limits
        self._device = find_device(initial.device)

    def markup(self, options: Iterable[Option]) -> str:
        return "".join(map(self._field, options))

    def _field(self, option: Option) -> str:
        owner = self._initial if option.name in Recipe.OPTIONS else None
        value = setting_of(option, getattr(owner, option.name) if owner else option.default)
        choices = self._choices(option)
        if option.name == "remote" and self._limits.remote:
            value = self._limits.remote[0]
        self.defaults[option.name] = value
        label = html.escape(option.label + (" (lossy)" if option.lossy else ""))
        if choices and option.many:
            boxes = "".join(
                f'<label class="switch"><input type="checkbox" value="{name}"{" checked" if name in value else ""}>'
                f"<span>{html.escape(title)}</span></label>"
                for name, title in choices.items()
            )
            text = f'<fieldset data-setting="{option.name}"><legend>{label}</legend>{_note(option)}{boxes}</fieldset>'
        elif option.type is bool:
            box = f'<input type="checkbox" data-setting="{option.name}"{" checked" if value else ""}>'
            text = f'<label class="switch">{box}<span>{label}</span></label>{_note(option)}'
        else:
            text = self._labelled(option, choices, value, label)
        if option.name == "pair":
            text += "<p></p>"  # set by the script
        return f'<div class="field" id="{option.element}">{text}</div>'

    def _labelled(self, option: Option, choices: Mapping[str, str], value: Any, label: str) -> str:
        named = f'data-setting="{option.name}"'
        shown = html.escape(f"{value:g}" if isinstance(value, float) else str(value))
        slider = ""
        if choices:
            groups = self._pair_groups if option.name == "pair" else {}
            control = f"<select {named}>{_options(choices, value, groups)}</select>"
        elif option.slider:
            low, high, step = option.slider
            limit = self._limits.bounds().get(option.name)
            bounds = (
                f'min="{low:g}" max="{high if limit is None else min(high, limit):g}" step="{step:g}" value="{shown}"'
            )
            control = f'<input type="number" {named} {bounds}>'
            slider = f'<input type="range" tabindex="-1" aria-label="{label}" {bounds}>'
        elif option.type in (int, float):
            precision = "any" if option.type is float else "1"
            control = f'<input type="number" {named} step="{precision}" value="{shown}">'
        elif option.many and option.item_type is str:
            control = f'<textarea {named} rows="2" placeholder="one per line">{shown}</textarea>'
        else:
            hint = html.escape(_PLACEHOLDERS.get(option.name, option.help))
            control = f'<input type="text" {named} value="{shown}" placeholder="{hint}" spellcheck="false">'
        kind = ' class="slider"' if slider else ""
        return f"<label{kind}><span>{label}</span>{control}</label>{slider}"

    def _choices(self, option: Option) -> Mapping[str, str]:
        """Return titles by choice; empty if any value is valid."""
        if option.name == "pair":
            return self.pairs
        if option.name == "external" and self._limits.engines:
            return {"": "none", **{server: server for server in self._limits.engines}}
        if option.name == "remote" and self._limits.remote:
            return {service: service for service in (*self._limits.remote, " ".join(self._limits.remote))}
        titles = MODES_WITH_OFF if option.name == "mode" else option.titles()
        if option.name in ("quantization", "drafter_quantization"):
            titles = {name: unavailable(name, self._device) or title for name, title in titles.items()}
        visible = method_name if option.name == "method" else str
        return {name: name if option.many else f"{visible(name)}: {title}" for name, title in titles.items()}


def _options(choices: Mapping[str, str], value: Any, groups: Mapping[str, str]) -> str:
    """Return the options below their headings, `groups`."""
    options: dict[str, str] = dict.fromkeys(groups.values(), "")  # by heading
    for name, title in choices.items():
        chosen = " selected" if name == value else ""
        heading = groups.get(name, "")
        text = f'<option value="{html.escape(name)}"{chosen}>{html.escape(title)}</option>'
        options[heading] = options.get(heading, "") + text
    return "".join(
        f'<optgroup label="{heading}">{text}</optgroup>' if heading else text for heading, text in options.items()
    )


def _note(option: Option) -> str:
    sentence = option.help[0].upper() + option.help[1:]
    return "" if sentence == option.label else f"<p>{html.escape(sentence)}.</p>"
