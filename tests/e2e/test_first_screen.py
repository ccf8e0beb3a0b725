"""First screen: visible without scrolling or layout shifts, with few boxes, sizes, controls and words."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from e2e.page_fixtures import (
    CODE,
    FIRST_VISIT,
    QUICK,
    STARTED,
    STEP_WORDS,
    check_text,
    disturbed,
    drawn,
    run,
    status,
    stop,
)

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDE = ("#masthead p", "#examples .chip >> nth=2", "#lane-ar", ".legend")
# Window, prompt lines, lines of text that are visible without scrolling, and other visible parts.
SIZES = (
    pytest.param(1920, 1080, 2, 5, WIDE, marks=pytest.mark.exhaustive),
    (390, 844, 2, 5, ("#masthead p", "#examples .chip >> nth=2", ".legend")),
    (683, 384, 1, 2, (".legend",)),
)
SHIFTS = """window.shift = 0;
    const add = (entry) => { if (!entry.hadRecentInput) window.shift += entry.value; };
    const observer = new PerformanceObserver((list) => list.getEntries().forEach(add));
    observer.observe({type: "layout-shift", buffered: true});"""
LINES = """selector => {
    const lane = document.querySelector(selector), style = getComputedStyle(lane);
    const given = lane.querySelector(".given").getBoundingClientRect();
    const top = Math.max(lane.getBoundingClientRect().top, given.height ? given.bottom : 0);
    return (innerHeight - top) / parseFloat(style.lineHeight);
}"""
# Counts of the first screen. Fields of an option count once.
FIRST_SCREEN = """() => {
    const visible = (node) => {
        const box = node.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
        if (!box.width || !box.height || x < 0 || y < 0 || x > innerWidth || y > innerHeight) return false;
        for (let outer = node.parentElement; outer; outer = outer.parentElement) {
            const frame = outer.getBoundingClientRect();
            if (getComputedStyle(outer).overflowX !== "visible" && (x < frame.left || x > frame.right)) return false;
        }
        return node.checkVisibility({visibilityProperty: true});
    };
    const all = [...document.querySelectorAll("body *")].filter(visible);
    const sides = ["Top", "Right", "Bottom", "Left"];
    const controls = all.filter((node) => node.matches("button, input, textarea, select, summary, a[href]"));
    const written = (node) => [...node.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
    const describe = (node, child) => [child.data.trim(), getComputedStyle(node).fontSize, node.closest(".lane")];
    const texts = all.flatMap((node) => written(node).map((child) => describe(node, child)));
    const colour = (node) => getComputedStyle(node).backgroundColor, primary = colour(document.getElementById("run"));
    const border = (node, side) => parseFloat(getComputedStyle(node)[`border${side}Width`]);
    return {
        boxes: all.filter((node) => sides.every((side) => border(node, side) > 0)).length,
        sizes: new Set(texts.map(([, size]) => size)).size,
        controls: new Set(controls.map((node) => node.closest("#pair, #method, #gamma, #temperature") ?? node)).size,
        words: texts.filter(([, , lane]) => !lane).flatMap(([text]) => text.split(/\\s+/)).length,
        filled: controls.filter((node) => node.matches("button") && colour(node) === primary).length,
    };
}"""


STAGES = """new MutationObserver((changes) => {
    for (const { target } of changes) (window.stages ??= []).push(target.dataset.stage);
}).observe(document, {subtree: true, attributes: true, attributeFilter: ["data-stage"]});"""


def test_the_first_visit_explains_a_recorded_step_and_the_second_races(tab: Any) -> None:
    page = tab(FIRST_VISIT + STAGES + SHIFTS, width=1366, height=768)
    words, cockpit = page.locator("#step-words"), page.locator(".cockpit")
    page.wait_for_function("window.stages?.includes('guessed')")
    plays = page.locator("#play-steps")
    expect(plays).to_have_text(re.compile("Pause"))
    plays.click()
    expect(page.locator(".round[data-stage]")).to_have_count(0)
    expect(words).to_have_text(STEP_WORDS)
    kinds = ".tok:not([data-kind=rejected], [data-kind=ignored])"
    counts = [page.locator(f"#lane-{lane} .round:not([hidden]) {kinds}").count() for lane in ("spec", "ar")]
    expect(page.locator("#shown")).to_have_text(re.compile(rf"^{counts[0]} and {counts[1]} of \d+ shown$"))
    visible = "document.querySelectorAll('#lane-spec .round:not([hidden])').length"
    step = page.evaluate(visible)
    assert 0 < step < page.locator("#lane-spec .round").count() and counts[0]
    expect(page.locator("#headline")).to_have_text(
        re.compile(r"^Example: .*The large model ran \d+ times instead of \d+\.$")
    )
    expect(page.locator("#run")).to_have_text("Run live")
    page.locator("#next-step").click()
    page.wait_for_function(f"{visible} === {step + 1}")
    page.evaluate(QUICK)
    plays.click()  # to the end of both runs
    expect(plays).to_have_text(re.compile("Play again"))
    expect(page.locator(".round[hidden]")).to_have_count(0)
    ends = [page.locator(f"#lane-{lane} .round").count() - 1 for lane in ("spec", "ar")]
    expect(words).to_have_text("The end.")
    check_text(page, 10)
    expect(page.locator("#headline")).to_contain_text(f"ran {ends[0]} times instead of {ends[1]}.")
    expect(page.locator("#reason")).to_contain_text("Slower with more wrong guesses: below")
    shows_the_idea_without_scrolling(page, 1366, 768, 2, 5, WIDE)
    page.reload()  # a second visit plays nothing
    expect(page.locator("#recorded button").first).to_be_visible()
    status(page, "ready")
    assert not drawn(page)
    expect(cockpit).to_have_attribute("data-phase", "ready")
    races_a_comparison_once(page)


def races_a_comparison_once(page: Page) -> None:
    pace = page.locator("#pace")
    assert pace.evaluate("pace => pace.options[0].value") == "replay"  # the default
    pace.select_option("replay")
    page.evaluate(
        """() => new MutationObserver(() => (window.lines ??= []).push(document.getElementById("headline").textContent))
        .observe(document.getElementById("headline"), {childList: true, characterData: true, subtree: true})"""
    )
    page.locator("#compare input").check()
    top = "document.querySelector('.legend').getBoundingClientRect().top + scrollY"
    page.locator("#play-example").click()
    expect(page.locator("#step-words")).to_have_text(STEP_WORDS)
    explained = page.evaluate(top)
    run(page, CODE, tokens=40)
    page.wait_for_function(STARTED)
    assert abs(page.evaluate(top) - explained) <= 16  # the text hardly moves
    status(page, "done: 40 tokens")
    if not disturbed(page):
        page.wait_for_function("window.lines.some(line => /^Race/.test(line))")
    expect(page.locator("#headline")).to_have_text(re.compile("40|large model"))
    assert page.locator(".round[hidden]").count() == 0
    expect(page.locator("#suggestion button").last).to_be_visible()
    expect(page.locator("#lane-ar")).to_be_visible()


@pytest.mark.parametrize(("width", "height", "rows", "lines", "parts"), SIZES)
def test_first_screen_shows_the_idea_without_scrolling(
    tab: Any, width: int, height: int, rows: int, lines: int, parts: tuple[str, ...]
) -> None:
    page = tab(FIRST_VISIT + SHIFTS, width=width, height=height)
    page.evaluate(QUICK)
    expect(page.locator("#play-steps")).to_have_text(re.compile("Play again"))
    expect(page.locator(".round[data-stage]")).to_have_count(0)
    shows_the_idea_without_scrolling(page, width, height, rows, lines, parts)
    if width == 390:
        replaces_the_example(page)


def shows_the_idea_without_scrolling(
    page: Page, width: int, height: int, rows: int, lines: int, parts: tuple[str, ...]
) -> None:
    for part in ("h1", "#prompt textarea", "#run", "#headline", "#lane-spec", *parts):
        box = page.locator(part).bounding_box()
        assert box, part
        visible = box["y"] + (0 if "lane" in part else box["height"])
        assert 0 <= visible <= height and 0 <= box["x"] and box["x"] + box["width"] <= width, part
    assert page.evaluate(LINES, "#lane-spec") >= lines
    expect(page.locator("#max-tokens")).to_be_hidden()
    expect(page.locator("#max-tokens")).to_be_attached()
    counts = page.evaluate(FIRST_SCREEN)
    limits = {"boxes": 10, "sizes": 5, "controls": 12, "words": 120, "filled": 1}
    if width == 1366:
        assert {name: counts[name] for name in limits if counts[name] > limits[name]} == {}
        heights = "boxes => boxes.map((box) => box.clientHeight)"  # a long choice has several lines
        assert min(page.locator("#pair select, #method select").evaluate_all(heights)) >= 40
    textarea = page.locator("#prompt textarea").bounding_box()
    assert textarea and textarea["height"] >= 24 * rows
    assert page.evaluate("scrollY") == 0 and page.evaluate("window.shift") < 0.1
    expect(page.locator("#masthead")).to_contain_text("large model")
    for part in ("#examples .chip >> nth=0", "#show-rejected"):  # elsewhere in small windows
        page.locator(part).scroll_into_view_if_needed()
        expect(page.locator(part)).to_be_in_viewport()


def replaces_the_example(page: Page) -> None:
    run(page, "endless")
    expect(page.locator("#lane-spec .given")).to_have_text("endless")
    box = "selector => document.querySelector(selector).getBoundingClientRect().top"
    below = f"() => ({box})('#headline') - ({box})('#run')"  # the field of the prompt adapts its height later
    running = page.evaluate(below)
    stop(page)
    assert page.evaluate(below) == running  # nothing moves
    page.locator("#play-example").click()
    expect(page.locator("#step-words")).to_have_text(STEP_WORDS)
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert drawn(page) == {"plain": 1}
    expect(page.locator("#lane-ar")).to_be_hidden()
    expect(page.locator("#walk")).to_be_hidden()
