"""First screen: visible without scrolling or layout shifts, with few boxes, sizes, controls and words."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from e2e.page_fixtures import FIRST_VISIT, QUICK, STEP_WORDS, drawn, run, status

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# Window, prompt lines, lines of text that are visible without scrolling, and other visible parts.
SIZES = (
    (1366, 768, 2, 5, ("#masthead p", "#examples .chip >> nth=2", "#lane-ar", ".legend")),
    pytest.param(
        *(1920, 1080, 2, 5, ("#masthead p", "#examples .chip >> nth=2", "#lane-ar", ".legend")),
        marks=pytest.mark.exhaustive,
    ),
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


@pytest.mark.parametrize(("width", "height", "rows", "lines", "parts"), SIZES)
def test_first_screen_shows_the_idea_without_scrolling(
    tab: Any, width: int, height: int, rows: int, lines: int, parts: tuple[str, ...]
) -> None:
    page = tab(FIRST_VISIT + SHIFTS, width=width, height=height)
    page.evaluate(QUICK)
    expect(page.locator("#play-steps")).to_have_text(re.compile("Play again"))
    expect(page.locator(".round[data-stage]")).to_have_count(0)
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
    if width == 390:
        replaces_the_example(page)


def replaces_the_example(page: Page) -> None:
    run(page, "endless")
    expect(page.locator("#lane-spec .given")).to_have_text("endless")
    top = "document.querySelector('#headline').getBoundingClientRect().top + scrollY"
    running = page.evaluate(top)
    page.locator("#stop").click()
    status(page, "stopped")
    assert page.evaluate(top) == running  # nothing moves
    page.locator("#play-example").click()
    expect(page.locator("#step-words")).to_have_text(STEP_WORDS)
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert drawn(page) == {"plain": 1}
    expect(page.locator("#lane-ar")).to_be_hidden()
    expect(page.locator("#walk")).to_be_hidden()
