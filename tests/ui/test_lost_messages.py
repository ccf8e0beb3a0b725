"""Measurements of the page whose last messages are lost: timers show the results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
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

    async def press(self, messages: int, **changed: Any) -> list[dict[Any, Any]]:
        """Press the button with default or changed settings, and receive only the first messages of the event."""
        values = [changed.get(part.elem_id or "", getattr(part, "value", None)) for part in self.pressed.inputs]
        return [message async for message in self.pressed.fn(VISITOR, *values)][:messages]


@pytest.mark.parametrize(
    ("button", "shown", "words"),
    [("preflight", "estimate", "Will it pay off?"), ("gates-calibrate", "gates-thresholds", "draft tokens of 2 texts")],
)
def test_results_do_not_depend_on_the_last_messages(
    page: Page, monkeypatch: pytest.MonkeyPatch, button: str, shown: str, words: str
) -> None:
    monkeypatch.setattr(calibration, "PROMPTS", 2)
    monkeypatch.setattr(calibration, "TOKENS", 24)
    visit = Visit(page, button, shown)
    (first,) = asyncio.run(visit.press(1, **{"max-tokens": 8}))
    assert first[visit.button].interactive is False
    results, repeated, after = (visit.tick(VISITOR) for _ in range(3))
    assert words in results[visit.shown]
    assert repeated[visit.button].interactive is True
    assert not any(isinstance(part, gr.HTML) for part in after)


def test_failures_replace_the_prediction(page: Page) -> None:
    visit = Visit(page, "preflight", "estimate")
    (refused,) = asyncio.run(visit.press(1, temperature=-1))
    assert "**No prediction:** temperature" in refused[visit.shown] and visit.button not in refused
    asyncio.run(visit.press(1, method="beam"))
    failed = visit.tick(VISITOR)
    assert "**No prediction:** preflight supports the methods" in failed[visit.shown]
    assert visit.tick(VISITOR)[visit.button].interactive is True
