"""The page of the lessons: questions, players and figures of recorded runs. The documents of the program."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.shown_figures import Claim, RunFigures, claim
from fakes.traces import read_lines
from playwright.sync_api import BrowserContext, Page, expect

from e2e.page_fixtures import PATIENCE, RULES, expect_fit, explained, grave
from specdemo.core.theory import expected_tokens
from specdemo.core.theory import speedup as predicted_speedup
from specdemo.ui.lessons import GREEDY, SAMPLED, lesson_data

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def lessons(served: Any, chromium: BrowserContext, errors: list[str]) -> Iterator[Page]:
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.on("pageerror", lambda error: errors.append(error.stack))
    page.set_viewport_size({"width": 1366, "height": 768})
    page.goto(f"{served.url}lessons")
    expect(page.locator("#lesson-curve svg")).to_be_attached()
    hidden = page.locator(".gradio-container").evaluate("page => getComputedStyle(page).animationName")
    assert hidden == "none"  # only the first screen waits until its parts are mounted
    yield page
    page.evaluate("localStorage.clear()")  # shared with other files
    page.close()


def test_lessons_ask_before_they_show_and_count_right_answers(lessons: Page) -> None:
    """With the keyboard. The second choice is wrong or right, whatever the lesson; the first choice counts."""
    right = 0
    sections, score = lessons.locator("section.lesson"), lessons.locator("#lesson-score")
    expect(sections).to_have_count(5)
    assert not grave(lessons)
    for number, section in enumerate(sections.all(), 1):
        assert section.locator(".question").inner_text().endswith("?")
        expect(section.locator(".answer")).to_be_hidden()
        choices = section.get_by_role("group", name=section.locator(".question").inner_text()).get_by_role("button")
        texts, rights = choices.all_inner_texts(), choices.evaluate_all("all => all.map(one => 'right' in one.dataset)")
        assert len(set(texts)) == 3 and rights.count(True) == 1
        choices.first.focus()
        lessons.keyboard.press("Tab")
        lessons.keyboard.press("Enter")
        choices.last.dispatch_event("click")
        assert choices.evaluate_all("all => all.map(one => one.ariaPressed)") == ["false", "true", "false"]
        expect(section.locator(".answer")).to_be_visible()
        answer = rights.index(True)
        right += answer == 1
        words = "Right." if answer == 1 else f"Not so. The answer is: {texts[answer]}."
        expect(section.locator(".reply")).to_have_text(words)
        expect(choices.nth(answer)).to_have_attribute("data-state", "right")
        left = 5 - number
        total = f"{right} of {number} right"
        expect(score).to_have_text(f"{total}, {left} to go." if left else f"Your score: {total}.")
    assert 0 < right < 5
    assert not grave(lessons)


def answer_all(page: Page) -> None:
    page.locator(".choice:first-child").evaluate_all("all => all.forEach((choice) => choice.click())")


def test_figures_are_those_of_the_recorded_runs(lessons: Page) -> None:
    """The times of the passes and of the race; the other answers: `tests/ui/test_lessons_text.py`."""
    sampled, greedy = (RunFigures.of(read_lines(path)) for path in (SAMPLED, GREEDY))
    assert sampled.pass_times and greedy.plain and greedy.first.tokens == greedy.plain.tokens  # as lesson 2 states
    rows, single, several = sampled.pass_times
    passes = [greedy.first.passes, greedy.plain.passes]
    ends = [(len(lane.steps) - 1, lane.at[-1]) for lane in greedy.lanes.values()]
    known = {
        "lesson-1": [
            claim("{}. Checking", 1),
            Claim("{} ms", [(1000 * time,) for time in (single, several, rows * single)]),
            claim("over {} tokens is {} times as fast as {} passes", rows, rows * single / several, rows),
            claim("{} passes over {}", rows, 1),
            Claim("{} pass over {}", [(1, 1), (1, rows)]),
            Claim("over {}", [(rows,), (1,)]),
            claim("or for {}", rows),
        ],
        "lesson-2": [
            claim("{}. Same", 2),
            claim("the same {} tokens", len(greedy.first.tokens)),
            Claim("{} steps in {} s", ends),
            Claim("{} s", [(end,) for _, end in ends]),
            Claim("{} passes", [(count,) for count in (*passes, sum(passes) // 2)]),
        ],
    }
    answer_all(lessons)
    for lesson, claims in known.items():
        assert explained(lessons, f"#{lesson}", lambda _, claims=claims: claims)
    bars = [box.evaluate("b => b.getBoundingClientRect().width") for box in lessons.locator("#lesson-passes .p").all()]
    assert [width / bars[0] for width in bars] == pytest.approx([1, several / single, rows], rel=0.02)


def test_players_show_the_recorded_outcome_and_can_be_restarted(lessons: Page) -> None:
    answer_all(lessons)
    for name in ("survive", "copied"):
        player, record = lessons.locator(f"#lesson-{name}"), lesson_data()[name][-1]
        states = "rows => rows.map(row => row.dataset.state)"
        assert player.locator(".row").evaluate_all(states) == [node["state"] for node in record["nodes"]]
        player.focus()
        lessons.keyboard.press("Home")
        assert set(player.locator(".row").evaluate_all(states)) == {"guess"}
    copied = lessons.locator("#lesson-source mark.copied").inner_text()
    assert copied and "".join(record["step"]["draft_text"]).replace("\n", "⏎").startswith(copied)
    expect(lessons.locator("#lesson-source mark.context")).not_to_be_empty()


def test_the_prediction_follows_the_sliders(lessons: Page) -> None:
    costs = lesson_data()["costs"]
    answer_all(lessons)
    values = {"alpha": 0.3, "gamma": 6, "c": 0.4}
    for slider, value in zip(lessons.locator("#lesson-sliders input").all(), values.values(), strict=True):
        slider.fill(str(value))
    speedup = predicted_speedup(expected_tokens(0.3, 6), 6, 0.4, costs["v"], costs["o"])
    expect(lessons.locator("#lesson-prediction")).to_contain_text(
        f"At 30 %, with 6 guesses of 0.40 passes each: {speedup:.2f}×, slower."
    )


def test_links_lead_to_a_lesson(lessons: Page, served: Any) -> None:
    lessons.goto(f"{served.url}?lesson=4")
    expect(lessons).to_have_url(re.compile(r"/lessons\?lesson=4$"))
    expect(lessons.locator("#lesson-4 .question")).to_be_in_viewport()
    answer_all(lessons)
    lessons.get_by_role("navigation", name="Lessons").get_by_role("link").nth(1).click()
    expect(lessons.locator("#lesson-2")).to_be_focused()
    expect(lessons.locator("#lesson-2 .answer")).to_be_in_viewport()


def test_printed_lessons_contain_all_answers(lessons: Page) -> None:
    lessons.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    lessons.emulate_media(media="print")
    for answer in lessons.locator(".answer").all():
        expect(answer).to_be_visible()
    expect(lessons.locator(".answer > details p").last).to_be_visible()
    expect(lessons.locator(".choice[data-state=right]")).to_have_count(5)
    expect(lessons.locator("#lesson-survive .controls")).to_be_hidden()
    assert lessons.locator("#lesson-survive .row").first.get_attribute("data-state") != "guess"
    lessons.emulate_media(media="screen")


@pytest.mark.exhaustive
def test_documents_are_opened_from_the_page_and_accessible(page: Page, served: Any) -> None:
    with page.expect_popup() as opened:  # the page keeps its run
        page.locator("#page-links a", has_text="Documentation").click()
    page = opened.value
    expect(page.locator("h1")).to_have_text("specdemo")
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)
        assert not grave(page, schemes=["light"], rules=rules), scheme
    page.locator("nav a[href='edge-cloud']").click()
    page.wait_for_url(f"{served.url}documentation/edge-cloud")  # loaded
    page.set_viewport_size({"width": 390, "height": 844})
    expect_fit(page)
    page.emulate_media(color_scheme="light")
    page.locator("nav a", has_text="← specdemo").click()
    expect(page.locator("body")).to_have_attribute("data-shown", "yes")
    expect(page.locator("#run")).to_be_visible()
    page.close()
