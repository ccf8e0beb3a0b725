"""External settings are applied as far as they form a valid recipe."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
from contracts.traces import golden_traces

from specdemo.core import trace
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.remote.config import CloudConfig
from specdemo.ui.settings import (
    OPTIONS,
    from_link,
    link_problems,
    recipe_of,
    recorded_settings,
    restored,
    setting_of,
    stored_lanes,
)

USUAL = {
    "pair": "bundled", "method": "draft", "gamma": 3, "temperature": 0.5, "seed": 0, "skip_layers": "",
    "ngram_keep": False, "exit_layer": 0, "prompt": "", "compare": False,
}  # fmt: skip


def test_the_pair_of_a_link_sets_its_own_settings() -> None:
    usual = USUAL | {"pair": CHAT_PAIR, "top_p": 1.0} | PAIRS[CHAT_PAIR].settings
    for name, pair in PAIRS.items():
        settings, refused = restored(from_link({"pair": name}, usual), usual, "cpu")
        assert not refused and settings == usual | {"pair": name} | pair.settings
        other = from_link({"seed": "7"}, usual | {"pair": name, "temperature": 1.9})
        assert other["temperature"] == 1.9 and from_link({}, usual) == {}
        named = from_link({"pair": name, "gamma": "2"}, usual)
        assert named["gamma"] == 2 and named["method"] == pair.method


def test_the_defaults_of_the_page_fill_the_gaps_of_a_link() -> None:
    chat = PAIRS[CHAT_PAIR].settings | {"temperature": 0.0}
    usual = USUAL | chat | {"pair": CHAT_PAIR, "prompt": "a question", "compare": True}
    examples = [{"pair": "bundled", "prompt": text, "temperature": 0.9} for text in ("def f", "second")]

    def linked(**query: str) -> dict[str, Any]:
        settings, refused = restored(from_link(query, usual, examples), usual, "cpu")
        assert not refused
        return settings

    assert linked(temperature="0.7") == usual | {"temperature": 0.7}
    assert linked(pair=CHAT_PAIR) == usual and linked(method="nasd") == usual | {"method": "nasd"}
    code = linked(method="draft")  # which the chat pair has no drafter for
    assert code["pair"] == "bundled" and code["prompt"] == "def f" and code["compare"]
    assert linked(pair="bundled") == code | {"temperature": 0.9}
    assert linked(pair="bundled", prompt="own")["prompt"] == "own"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"method": "magic"}, "unknown method"),
        ({"gamma": "1e9"}, "gamma must be"),
        ({"gamma": "99"}, "gamma must be from 1 to 64, not 99"),
        ({"gamma": "NaN"}, "gamma must be"),
        ({"gamma": "[[[["}, "gamma must be a number"),
        ({"temperature": "{}"}, "temperature must be"),
        ({"pair": "../../etc/passwd"}, "unknown pair"),
        ({"compare": "maybe"}, "compare must be"),
        ({"skip_layers": "one"}, "skip_layers must be"),
    ],
)
def test_invalid_link_values_are_reported_and_the_rest_applied(query: dict[str, str], words: str) -> None:
    settings, refused = restored(from_link({**query, "seed": "7"}, USUAL), USUAL, "cpu")
    assert len(refused) == 1 and words in refused[0] and "method ar" not in refused[0]
    assert settings == USUAL | {"seed": 7}


CUSTOM = {"target": "org/large", "drafter": "org/small"}


@pytest.mark.parametrize("models", [CUSTOM, dict(reversed(CUSTOM.items())), {"target": "org/large", "method": "nasd"}])
def test_custom_models_survive_an_invalid_value(models: dict[str, str]) -> None:
    usual = USUAL | {"target": "", "drafter": ""}
    settings, refused = restored({**models, "gamma": 10**9, "temperature": -1}, usual, "cpu")
    assert settings == usual | models
    assert sorted(message.partition(" ignored: ")[0] for message in refused) == ["gamma", "temperature"]


@pytest.mark.parametrize(
    ("values", "dropped", "words"),
    [
        ({"method": "ar", "gamma": 5, "rule": "match"}, {"gamma", "rule"}, "has no effect with method ar"),
        ({"method": "nasd", "policy": "svip"}, {"policy"}, "svip has no effect with method nasd"),
        ({"tree_nodes": 5}, {"tree_nodes"}, "has no effect with method draft: choose tree"),
        ({"mode": "speculative", "remote": "http://a:1", "gate_nll": 2.0}, {"gate_nll"}, "without gate nll"),
    ],
)
def test_values_without_effect_are_dropped_with_a_message(
    values: dict[str, Any], dropped: set[str], words: str
) -> None:
    usual = USUAL | {name: setting_of(OPTIONS[name], OPTIONS[name].default) for name in values.keys() - USUAL.keys()}
    settings, messages = restored(values, usual, "cpu")
    assert settings == usual | {name: value for name, value in values.items() if name not in dropped}
    assert {message.partition(" ignored: ")[0] for message in messages} == dropped
    assert all(words in message for message in messages)


def test_the_page_runs_controls_without_effect_and_keeps_stored_lanes() -> None:
    """A control always has a value."""
    usual = USUAL | {"rule": "rejection"}
    lane = usual | {"method": "ar", "gamma": 5, "rule": "match"}
    assert recipe_of(lane, "cpu").gamma == 5
    ((_, recipe),) = stored_lanes([lane], usual, "cpu", 2)
    assert (recipe.method, recipe.gamma) == ("ar", 5)


EVERY = {name: setting_of(option, option.default) for name, option in OPTIONS.items()} | USUAL


@pytest.mark.parametrize("value", [{"x": 1}, "magic"])
def test_work_for_invalid_settings_is_bounded(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = Mock(side_effect=recipe_of)
    monkeypatch.setattr("specdemo.ui.settings.recipe_of", converted)
    invalid = dict.fromkeys(EVERY, value)
    assert stored_lanes([invalid] * 1000, EVERY, "cpu", 2) == [] and converted.call_count <= 2
    settings, messages = restored(invalid, EVERY, "cpu")
    assert settings["method"] == EVERY["method"] and len(messages) < 20
    assert converted.call_count < 2 * len(EVERY)


def test_unknown_and_removed_names_in_a_link_are_reported() -> None:
    query = {"gamma": "5", "gama": "5", "x" * 100: "1", "__theme": "dark"}
    assert link_problems(query, USUAL) == [f"Unknown settings in the link ignored: gama, {'x' * 40}"]
    (problem,) = link_problems({"gamma": "5", "jitter_ms": "3"}, EVERY)
    assert problem.startswith("jitter_ms ignored: ") and "removed" in problem and "tc netem" in problem
    settings, (message,) = restored(EVERY | {"quantization": "fp4", "gamma": 5}, EVERY, "cpu")
    assert settings == EVERY | {"gamma": 5} and message.startswith("quantization ignored: ") and "nf4" in message


def test_a_trace_with_removed_options_opens_and_its_settings_are_applicable() -> None:
    header, *steps = golden_traces()["draft"].splitlines(keepends=True)
    line = json.loads(header)
    link = {"remote": "http://a:1", "rtt_ms": 30.0, "jitter_ms": 2.0, "up_mbit": 5.0, "down_mbit": 5.0}
    line["recipe"] |= {"quantization": "nf4-single", "drafter_quantization": "fp4", "cloud": link}
    (opened,) = trace.read("".join([json.dumps(line) + "\n", *steps]))
    settings = recorded_settings(opened.header, compare=True)
    assert (settings["quantization"], settings["drafter_quantization"], settings["rtt_ms"]) == ("none", "none", 30.0)
    assert recipe_of(settings, "cpu").cloud == CloudConfig("http://a:1", rtt_ms=30.0)
