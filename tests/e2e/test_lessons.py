"""The page of the lessons: questions, players and figures of recorded runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.shown_claims import READ
from fakes.shown_claims import lessons as lesson_claims
from fakes.shown_figures import RunFigures, unexplained
from playwright.sync_api import BrowserContext, Page, expect

from e2e.page_fixtures import PATIENCE, grave
from specdemo.core.theory import expected_tokens
from specdemo.core.theory import speedup as predicted_speedup
from specdemo.ui.lessons import GREEDY, SAMPLED, lesson_data

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def lessons(served: Any, chromium: BrowserContext) -> Iterator[Page]:
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error.stack))
    page.set_viewport_size({"width": 1366, "height": 768})
    page.goto(f"{served.url}lessons")
    expect(page.locator("#lesson-curve svg")).to_be_attached()
    hidden = page.locator(".gradio-container").evaluate("page => getComputedStyle(page).animationName")
    assert hidden == "none"  # only the first screen waits until its parts are mounted
    yield page
    page.evaluate("localStorage.clear()")  # shared with other files
    page.close()
    assert not errors


def test_every_lesson_begins_with_a_question_and_hides_its_answer(lessons: Page) -> None:
    sections = lessons.locator("section.lesson")
    expect(sections).to_have_count(5)
    for section in sections.all():
        assert section.locator(".question").inner_text().endswith("?")
        expect(section.locator("> details p").first).to_be_hidden()
    assert not grave(lessons)


def test_figures_are_those_of_the_recorded_runs(lessons: Page) -> None:
    recorded = {"sampled": SAMPLED, "greedy": GREEDY}
    lines = {name: [*map(json.loads, path.read_text("utf-8").splitlines())] for name, path in recorded.items()}
    greedy, sampled = RunFigures.of(lines["greedy"]), RunFigures.of(lines["sampled"])
    assert greedy.plain and greedy.first.tokens == greedy.plain.tokens  # as lesson 2 states
    answers = "open => document.querySelectorAll('.lesson > details').forEach(answer => { answer.open = open; })"
    lessons.evaluate(answers, True)
    for lesson, claims in lesson_claims(lines).items():
        texts = lessons.evaluate(READ, [f"#{lesson}"])
        assert texts
        for part, text in texts:
            assert not re.search(r"\d", unexplained(text, claims)), f"unknown figure in {part}: {text}"
    lessons.evaluate(answers, False)
    bars = [box.evaluate("b => b.getBoundingClientRect().width") for box in lessons.locator("#lesson-passes .p").all()]
    assert sampled.pass_times
    assert bars[1] / bars[0] == pytest.approx(sampled.pass_times[2] / sampled.pass_times[1], rel=0.02)


def test_players_start_with_the_guesses_and_end_with_the_recorded_outcome(lessons: Page) -> None:
    for name in ("survive", "copied"):
        player, record = lessons.locator(f"#lesson-{name}"), lesson_data()[name][-1]
        states = "rows => rows.map(row => row.dataset.state)"
        assert set(player.locator(".row").evaluate_all(states)) == {"guess"}
        player.focus()
        lessons.keyboard.press("End")
        assert player.locator(".row").evaluate_all(states) == [node["state"] for node in record["nodes"]]
        lessons.keyboard.press("Home")
    lessons.locator("#lesson-4 > details > summary").click()
    copied = lessons.locator("#lesson-source mark.copied").inner_text()
    assert copied and "".join(record["step"]["draft_text"]).replace("\n", "⏎").startswith(copied)
    expect(lessons.locator("#lesson-source mark.context")).not_to_be_empty()


def test_the_prediction_follows_the_sliders(lessons: Page) -> None:
    costs = lesson_data()["costs"]
    values = {"alpha": 0.3, "gamma": 6, "c": 0.4}
    for slider, value in zip(lessons.locator("#lesson-sliders input").all(), values.values(), strict=True):
        slider.fill(str(value))
    speedup = predicted_speedup(expected_tokens(0.3, 6), 6, 0.4, costs["v"], costs["o"])
    expect(lessons.locator("#lesson-prediction")).to_contain_text(f"α 0.30, γ 6, c 0.40: {speedup:.2f}×, slower.")


def test_links_lead_to_a_lesson(lessons: Page, served: Any) -> None:
    for path in ("?lesson=4", "lessons?lesson=4"):
        lessons.goto(f"{served.url}{path}")
        expect(lessons).to_have_url(re.compile(r"/lessons\?lesson=4$"))
        expect(lessons.locator("#lesson-4 .question")).to_be_in_viewport()


def test_printed_lessons_contain_all_answers(lessons: Page) -> None:
    lessons.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    lessons.emulate_media(media="print")
    expect(lessons.locator(".lesson > details p").last).to_be_visible()
    expect(lessons.locator("#lesson-survive .controls")).to_be_hidden()
    assert lessons.locator("#lesson-survive .row").first.get_attribute("data-state") != "guess"
    lessons.emulate_media(media="screen")
