"""External settings are applied as far as they form a valid recipe."""

from __future__ import annotations

from typing import Any

import pytest

from specdemo.ui.settings import from_link, restored

USUAL = {
    "pair": "bundled", "method": "draft", "gamma": 3, "temperature": 0.5, "seed": 0, "skip_layers": "",
    "ngram_keep": False, "exit_layer": 0, "prompt": "", "compare": False,
}  # fmt: skip


def test_links_round_trip() -> None:
    query = {"method": "nasd", "gamma": "5", "temperature": "0", "compare": "true", "skip_layers": "5", "prompt": "12"}
    settings, refused = restored(from_link(query, USUAL), USUAL, "cpu")
    assert not refused
    assert settings == USUAL | {
        "method": "nasd", "gamma": 5, "temperature": 0, "compare": True, "skip_layers": "5", "prompt": "12",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"method": "magic"}, "unknown method"),
        ({"gamma": "1e9"}, "gamma must be"),
        ({"gamma": "NaN"}, "gamma must be"),
        ({"gamma": "[[[["}, "gamma must be a number"),
        ({"temperature": "{}"}, "temperature must be"),
        ({"pair": "../../etc/passwd"}, "unknown pair"),
        ({"compare": "maybe"}, "compare must be"),
        ({"prompt": "x" * 200_000}, "the prompt must be"),
        ({"skip_layers": "one"}, "skip_layers must be"),
    ],
)
def test_invalid_link_values_are_reported_and_the_rest_applied(query: dict[str, str], words: str) -> None:
    settings, refused = restored(from_link({**query, "seed": "7"}, USUAL), USUAL, "cpu")
    assert len(refused) == 1 and words in refused[0]
    assert settings == USUAL | {"seed": 7}


@pytest.mark.parametrize("saved", [None, 7, [], "x", {}, {"__class__": 1, "no such": 2}])
def test_invalid_stored_settings_are_ignored(saved: Any) -> None:
    assert restored(saved, USUAL, "cpu") == (USUAL, [])
