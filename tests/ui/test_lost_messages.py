"""Measurements of the page: timers show the results, also after a lost response."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.ui.page import Page, build
from specdemo.ui.tabs import calibration

pytestmark = pytest.mark.slow

PATIENCE = 60.0
VISITOR = SimpleNamespace(session_hash="visitor", client=None)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    page = build(pair="bundled")
    yield page
    page.worker.close()
    page.clouds.close()


class Visit:
    """A button of the page and the timer that shows its results in a component; names are element ids."""

    def __init__(self, page: Page, button: str, shown: str) -> None:
        components = {block.elem_id: block for block in page.blocks.blocks.values()}
        self.button, self.shown = components[button], components[shown]
        functions = page.blocks.fns.values()
        (self.pressed,) = [fn for fn in functions if fn.targets[:1] == [(self.button._id, "click")]]
        (timer,) = [fn for fn in functions if self.shown in fn.outputs and fn.targets[0][1] == "tick"]
        self.tick: Any = timer.fn

    def press(self, **changed: Any) -> dict[Any, Any]:
        """Press the button with default or changed settings."""
        assert len(self.pressed.inputs) == 1
        return self.pressed.fn(VISITOR, changed)

    def results(self) -> dict[Any, Any]:
        """Request results until the timer is told to stop."""
        shown: dict[Any, Any] = {}
        while self.button not in shown:
            shown = self.tick(VISITOR)
        return shown


@pytest.mark.parametrize(
    ("button", "shown", "words"),
    [("preflight", "estimate", "Will it pay off?"), ("gates-calibrate", "gates-thresholds", "draft tokens of 2 texts")],
)
def test_results_are_repeated_until_they_arrive(
    page: Page, monkeypatch: pytest.MonkeyPatch, button: str, shown: str, words: str
) -> None:
    monkeypatch.setattr(calibration, "PROMPTS", 2)
    monkeypatch.setattr(calibration, "TOKENS", 24)
    visit = Visit(page, button, shown)
    assert visit.press(max_tokens=8)[visit.button].interactive is False
    results, repeated = visit.results(), visit.tick(VISITOR)
    assert words in results[visit.shown] and results[visit.button].interactive is True
    assert repeated[visit.shown] == results[visit.shown]


def test_failures_replace_the_prediction(page: Page) -> None:
    visit = Visit(page, "preflight", "estimate")
    refused = visit.press(temperature=-1)
    assert "**No prediction:** temperature" in refused[visit.shown] and visit.button not in refused
    visit.press(method="beam")
    failed = visit.results()
    assert "**No prediction:** preflight supports the methods" in failed[visit.shown]
    assert failed[visit.button].interactive is True
