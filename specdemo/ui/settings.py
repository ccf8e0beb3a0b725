"""Settings of the page, from links, browser storage and the API.

Settings are a flat mapping by option name, plus `prompt` and `compare`. A missing value is 0 or "". Tuples are written
as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.events import Header
from specdemo.core.options import Option, removal
from specdemo.drafters import METHODS
from specdemo.models.zoo import PAIRS
from specdemo.option_rules import can_draft, ineffective, settings_of_pair
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES, CloudConfig

Settings = dict[str, Any]
Examples = Sequence[Mapping[str, Any]]
OFF = "off"
MODES_WITH_OFF = {OFF: "the target runs on this machine"} | MODES
OPTIONS: dict[str, Option] = {**Recipe.OPTIONS, **CloudConfig.OPTIONS}
_NAME_CHARACTERS = 300  # enough for a local directory
_GRADIO = ("view", "deep_link", "logs")
_MOST_MESSAGES = 16
_LABELS = {name: method.label for name, method in METHODS.items() if method.label}
_IDENTIFIER = re.compile(rf"(?<![\w/-])({'|'.join(_LABELS)})(?![\w/-])")  # not in paths
_MODEL_NAMES = ("pair", "target", "drafter", "head", "method")


def setting_of(option: Option, value: Any) -> Any:
    if option.name == "mode":
        return OFF
    if value is None:
        return "" if option.type is str else 0
    if option.many and option.choices is None:
        return (", " if option.item_type is int else "\n").join(map(str, value))
    return list(value) if option.many else value


def first_example(ready: Examples, pair: Any) -> Mapping[str, Any]:
    """Return the first example of a pair, or an empty mapping."""
    return next((example for example in ready if example["pair"] == pair), {})


def from_link(query: Mapping[str, str], defaults: Settings, ready: Examples = ()) -> Settings:
    """Return the settings of a link's query, with the types of `defaults`, completed for its pair and method.

    A pair that is not the default brings its first example, like a pair chosen on the page.
    """
    settings: Settings = {}
    for name, text in query.items():
        if name in defaults:
            settings[name] = text
            with suppress(ValueError, RecursionError):  # rejected by `restored`
                settings[name] = text if isinstance(defaults[name], str) else json.loads(text)
    method = METHODS.get(str(settings.get("method")))
    default = defaults["pair"]
    suits = method is None or default not in PAIRS or can_draft(PAIRS[default], method)
    pair = settings.get("pair", default if suits else "bundled")
    if not settings or pair not in PAIRS or "target" in settings:
        return settings
    own = defaults if pair == default else first_example(ready, pair)
    names = {*PAIRS[pair].settings, "prompt"} & defaults.keys() - {"policy"}
    given = {name: own[name] for name in names if name in own}
    return {"pair": pair, **settings_of_pair(PAIRS[pair], given | settings)}


def link_problems(query: Mapping[str, str], defaults: Settings) -> list[str]:
    """Return messages about names in a link's query that are neither settings nor Gradio's."""
    removed = CloudConfig.REMOVED
    problems = [f"{name} ignored: {removal(name, removed[name])}" for name in query if name in removed]
    known = {*defaults, *removed, *_GRADIO}
    unknown = [name[:40] for name in query if name not in known and not name.startswith("_")]
    return [*problems, f"Unknown settings in the link ignored: {', '.join(unknown)}"] if unknown else problems


def recorded_settings(header: Header, compare: bool) -> Settings:
    """Return the valid settings of a run without settings of the machine."""
    recipe: Mapping[str, Any] = header.recipe
    values = {**recipe, **(recipe.get("cloud") or {})}
    options = {name: option for name, option in OPTIONS.items() if not option.host}
    plain = {name: setting_of(option, option.default) for name, option in options.items()}
    wanted = {name: setting_of(options[name], value) for name, value in values.items() if name in options}
    if recipe.get("cloud"):
        wanted["mode"] = recipe["cloud"].get("mode", OFF)
    if recipe.get("chat"):  # the recorded prompt contains the template
        wanted |= {"chat": False, "template_options": plain["template_options"]}
    settings, _ = _valid(_changed(wanted, plain), plain, "auto")
    return {**plain, **settings, "prompt": header.prompt, "compare": compare}


def restored(wanted: Any, defaults: Settings, device: str, *, effective: bool = True) -> tuple[Settings, list[str]]:
    """Update `defaults` with the values that are valid together and effective; return messages about the others.

    With `effective` False, values without effect remain: a visitor's own settings return as they were.
    """
    changed, dropped = _valid(_changed(wanted, defaults), defaults, device)
    chosen = recipe_of({**defaults, **changed}, device)
    for name, problem in ineffective(chosen, [*changed] if effective else []):
        dropped[problem] = [name]
        del changed[name]
    errors = [f"{' and '.join(names)} ignored: {error}" for error, names in dropped.items()]
    return {**defaults, **changed}, errors[:_MOST_MESSAGES]


def _changed(wanted: Any, defaults: Settings) -> Settings:
    known = wanted if isinstance(wanted, Mapping) else {}
    return {name: value for name, value in known.items() if name in defaults and value != defaults[name]}


def _valid(changed: Settings, defaults: Settings, device: str) -> tuple[Settings, dict[str, list[str]]]:
    """Return values that are valid together, first those of models, and the names of the others by error message."""
    if not _problem({**defaults, **changed}, device):
        return changed, {}
    valid = {name: value for name, value in changed.items() if name in _MODEL_NAMES}
    if _problem({**defaults, **valid}, device):
        valid = {}
    dropped: dict[str, list[str]] = {}  # error message -> names
    for name in [name for name in defaults if name in changed.keys() - valid.keys()]:
        if error := _problem({**defaults, **valid, name: changed[name]}, device):
            dropped.setdefault(error, []).append(name)
        else:
            valid[name] = changed[name]
    return valid, dropped


def _problem(settings: Settings, device: str) -> str:
    prompt, compare = settings.get("prompt", ""), settings.get("compare", False)
    if not isinstance(prompt, str):
        return "the prompt must be a text"
    if not isinstance(compare, bool):
        return f"compare must be true or false, not {compare!r}"
    try:
        if settings.keys() & CloudConfig.OPTIONS.keys():
            cloud_of(settings)
        recipe_of(settings, device)
    except UserError as error:
        return str(error)
    return ""


def stored_lanes(stored: Any, defaults: Settings, device: str, most: int) -> list[tuple[Settings, Recipe]]:
    """Return the valid lanes among the first `most` stored ones, with their recipes."""
    lanes = []
    for wanted in stored[:most] if isinstance(stored, list) else ():
        settings = {**defaults, **_changed(wanted, defaults)}
        if isinstance(wanted, Mapping) and not _problem(settings, device):
            lanes.append((dict(wanted), recipe_of(settings, device)))
    return lanes


def complete_settings(sent: Any, defaults: Settings) -> Settings:
    """Return all settings of an event or a run. Raises `UserError`."""
    if not isinstance(sent, dict) or sent.keys() - defaults.keys() - {"prompt", "compare"}:
        raise UserError("the page cannot use these values: reload it")
    return {name: sent.get(name, value) for name, value in defaults.items()}


def recipe_of(settings: Mapping[str, Any], device: str) -> Recipe:
    """Convert raw settings; `device` is the default device. Raises `UserError`."""
    values = {"device": device, **_values(Recipe.OPTIONS, settings)}
    if values.get("target"):
        values.pop("pair", None)  # model names replace a ready pair
    if settings.get("mode", OFF) != OFF:
        values["cloud"] = cloud_of(settings)
    return replace(Recipe(), **values)


def cloud_of(settings: Mapping[str, Any]) -> CloudConfig:
    """Return the connection settings, even if mode is off. Raises `UserError`."""
    values = _values(CloudConfig.OPTIONS, settings)
    if values.get("mode") == OFF:
        del values["mode"]
    return replace(CloudConfig(), **values)


def _values(table: Mapping[str, Option], settings: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, option in table.items():
        if name not in settings:
            continue
        value = settings[name]
        limit = 10 * _NAME_CHARACTERS if option.many else _NAME_CHARACTERS
        if isinstance(value, str) and len(value) > limit:
            raise UserError(f"{name} may have {limit} characters at most, not {len(value):,}")
        if value in (None, 0, "") and value is not False and (option.default is None or name == "device"):
            continue
        values[name] = _converted(option, value)
    return values


def _converted(option: Option, value: Any) -> Any:
    if option.many:
        if isinstance(value, str) and option.choices is None:
            if option.item_type is not int:
                return tuple(filter(None, map(str.strip, value.splitlines())))
            words = value.replace(",", " ").split()
            if not all(word.isdecimal() for word in words):
                raise UserError(f"{option.name} must be numbers like 5, 7, not {value[:_NAME_CHARACTERS]!r}")
            return tuple(map(int, words))
        return tuple(value) if isinstance(value, list) else value
    if option.type is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value


def method_name(method: str) -> str:
    """Return the visible name of a method."""
    return _LABELS.get(method, method)


def with_method_names(text: str) -> str:
    """Add visible names to a message."""
    return _IDENTIFIER.sub(lambda match: f"{_LABELS[match[1]]} ({match[1]})", text)


def visible_recipe(label: str) -> str:
    """Replace the method of a recipe's label."""
    name, space, options = label.partition(" ")
    return method_name(name) + space + options
