"""First visit: a screen without scrolling or layout shifts and with few boxes, sizes, controls and words; the recorded
example, the pace of the display, and the example prompts.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import end, header, step
from playwright.sync_api import Page, expect

from e2e.page_fixtures import (
    CODE,
    IMMEDIATE,
    QUICK,
    STARTED,
    choose_setting,
    complete,
    counted,
    disturbed,
    drawn,
    open_group,
    record_phases,
    recording_shown,
    resize,
    run,
    saved,
    saved_page,
    set_number,
    show,
    spans,
    status,
    stop,
)
from specdemo.models.zoo import ASSETS, PAIR_GROUPS, PAIRS
from specdemo.ui.settings import method_name

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FIRST_VISIT = "localStorage.getItem('specdemo-opened') ?? localStorage.setItem('specdemo-opened', 'play');"
STEP_WORDS = re.compile(r"^Step \d+ of \d+: +\d+ guess(es)?\. Checked at once\. .*\d.*\.\s*$")
SHOWN = ".round:not([hidden]) .tok:not([data-kind=rejected], [data-kind=ignored])"  # committed, not hidden by a replay
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


# Distances of committed tokens in pixels, and edges of the rejected guesses, with those of the lane.
TEXT_OF_LANE = """(lane) => {
    const style = getComputedStyle(lane), frame = lane.getBoundingClientRect();
    const left = frame.left + parseFloat(style.paddingLeft), right = frame.left + lane.clientWidth;
    const boxes = (node) => [...node.getClientRects()];
    const discarded = (token) => ["rejected", "ignored"].includes(token.dataset.kind);
    const tokens = [...lane.querySelectorAll(".tok")], text = tokens.filter((token) => !discarded(token)).map(boxes);
    const gap = ([before, after]) => {
        const last = before.at(-1), first = after[0];
        return first.top < last.bottom - 4 ? first.left - last.right : first.left - left;
    };
    const replacement = (token) => token.parentElement.querySelector("[data-kind=correction]");
    const guesses = tokens.filter((token) => token.dataset.kind === "rejected").map((token) => ({
        box: token.getBoundingClientRect().toJSON(),
        text: boxes(replacement(token)).sort((a, b) => b.width - a.width)[0].toJSON(),
        colour: getComputedStyle(token).color,
    }));
    return {
        gaps: text.slice(1).map((after, i) => gap([text[i], after])), guesses, left, right,
        sideways: lane.scrollWidth - lane.clientWidth,
        red: getComputedStyle(document.querySelector("[data-legend=rejected]")).color,
    };
}"""


def check_text(page: Page, least: float) -> None:
    """Check the distances of the text, and guesses of at least `least` pixels above their replacements."""
    drawn_text = page.locator("#lane-spec").evaluate(TEXT_OF_LANE)
    assert drawn_text["gaps"] and max(map(abs, drawn_text["gaps"])) <= 1
    assert drawn_text["sideways"] <= 0
    guesses = drawn_text["guesses"]
    assert len(guesses) == page.locator("#lane-spec [data-kind=rejected]").count() > 5
    for guess in guesses:
        box, below = guess["box"], guess["text"]
        assert drawn_text["left"] - 1 <= box["left"] and box["right"] <= drawn_text["right"] + 1
        assert box["top"] < below["top"] < box["bottom"] < below["bottom"]
        assert box["width"] >= 4 and box["height"] >= least
    for before, after in pairwise(guess["box"] for guess in guesses):
        assert after["top"] > before["top"] + 12 or after["left"] >= before["right"]
    assert {guess["colour"] for guess in guesses} == {drawn_text["red"]}


def test_the_first_visit_explains_a_recorded_step_and_the_second_races(tab: Any) -> None:
    page = tab(FIRST_VISIT + STAGES + SHIFTS, width=1366, height=768)
    words, cockpit = page.locator("#step-words"), page.locator(".cockpit")
    page.wait_for_function("window.stages?.includes('guessed')")
    plays = page.locator("#play-steps")
    expect(plays).to_have_text(re.compile("Pause"))
    plays.click()
    expect(page.locator(".round[data-stage]")).to_have_count(0)
    expect(words).to_have_text(STEP_WORDS)
    counts = [page.locator(f"#lane-{lane} {SHOWN}").count() for lane in ("spec", "ar")]
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


EXAMPLES = json.loads((ASSETS / "examples.json").read_text("utf-8"))
EXAMPLE = ASSETS / "traces" / "hybrid, short answer.jsonl"


def kept(page: Page, lane: str = "spec") -> int:
    counts = drawn(page, lane)
    return counts.total() - counts["rejected"] - counts["ignored"]


def test_readable_pace_displays_a_finished_run_gradually_and_a_reload_keeps_it(page: Page) -> None:
    first = page.locator("#prompt textarea").input_value()
    assert first
    page.locator("#pace").select_option("readable")
    run(page, "immediate")
    expect(page.locator("#status")).to_have_text(
        re.compile(r"^displaying: at 15 tokens/s, generated at [\d.]+ tokens/s")
    )
    assert kept(page) < IMMEDIATE
    expect(page.locator("#shown")).to_have_text(re.compile(rf"^\d+ of {IMMEDIATE} shown$"))
    expect(page.locator("#show-rest")).to_be_visible()
    speed = page.locator("[data-kpi=tokens_per_second]")
    expect(speed).to_contain_text(re.compile(r"\d+ tokens displayed"))  # figures of the displayed part
    expect(page.locator("[data-kpi=speedup]")).to_contain_text("at the end")
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    before = page.evaluate("document.querySelectorAll('#lane-spec .tok').length")
    page.wait_for_function(f"document.querySelectorAll('#lane-spec .tok').length > {before}")
    page.locator("#stop").evaluate("button => button.click()")
    shown = kept(page)
    status(page, f"stopped: {shown} tokens displayed")
    expect(page.locator("#shown")).to_have_text(f"{shown} of {IMMEDIATE} shown")
    expect(page.locator("#headline")).to_be_empty()
    expect(page.locator("#race")).to_be_visible()
    assert 0 < kept(page) == shown < IMMEDIATE
    usual = page.locator("#gamma input[type=number]").input_value()
    set_number(page, "gamma", 40)  # larger than useful, but allowed
    choose_setting(page, "method", "n-grams:")
    page.locator("#compare input").check()
    page.locator("#keep-lane").click()
    expect(page.locator("#kept-lanes")).to_contain_text("n-grams, up to 40 guesses")
    page.locator("#safe-colours").check()
    page.locator("#prompt textarea").fill("stored prompt")
    page.reload()  # run, pace, settings and added settings are stored
    expect(page.locator("#pace")).to_have_value("readable")
    status(page, f"done: {IMMEDIATE} tokens")
    assert kept(page) == IMMEDIATE
    expect(page.locator("#show-rest")).to_be_hidden()
    expect(page.locator("#gamma input[type=number]")).to_have_value("40")
    expect(page.locator("#method option:checked")).to_have_text(re.compile("^n-grams:"))
    expect(page.locator("#compare input")).to_be_checked()
    expect(page.locator("#prompt textarea")).to_have_value("stored prompt")
    expect(page.locator("#kept-lanes")).to_contain_text("n-grams, up to 40 guesses")
    expect(page.locator("#safe-colours")).to_be_checked()
    page.locator("#reset").click()
    expect(page.locator("#gamma input[type=number]")).to_have_value(usual)
    expect(page.locator("#prompt textarea")).to_have_value(first)


def test_the_rest_of_a_display_is_shown_on_request_or_replaced_by_a_new_run(page: Page) -> None:
    page.locator("#pace").select_option("readable")
    run(page, "endless")
    spans(page, 5)
    page.locator("#stop").evaluate("button => button.click()")
    shown = kept(page)
    expect(page.locator("#show-rest")).to_be_visible()
    assert kept(page) == shown
    page.locator("#show-rest").click()
    status(page, "stopped")
    assert drawn(page) == counted(saved(page)) and kept(page) > shown
    expect(page.locator("#show-rest")).to_be_hidden()
    run(page, "immediate")
    status(page, "displaying")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert drawn(page) == {"plain": 1}
    run(page, "immediate")
    status(page, "displaying")
    page.locator("#pace").select_option("instant")
    status(page, f"done: {IMMEDIATE} tokens")
    assert kept(page) == IMMEDIATE
    assert page.evaluate("localStorage.getItem('specdemo-pace')") == "instant"


HIDE = "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden', configurable: true})"


def test_runs_are_displayed_at_once(page: Page) -> None:
    """If chosen, with reduced motion, and in hidden tabs."""
    expect(page.locator("#pace")).to_have_value("instant")
    record_phases(page)
    for tokens, reason in enumerate(("chosen", "reduced motion", "hidden"), 48):
        if reason != "chosen":
            page.locator("#pace").select_option("readable")
        page.emulate_media(reduced_motion="reduce" if reason == "reduced motion" else "no-preference")
        if reason == "hidden":
            page.evaluate(HIDE)
        complete(page, CODE, tokens=tokens)
        assert "displaying" not in page.evaluate("window.phases"), reason
    page.evaluate("delete document.visibilityState")


def test_the_explained_step_stands_still_with_reduced_motion(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.locator("#play-example").click()
    expect(page.locator("#walk #step-words:visible")).to_have_text(STEP_WORDS)
    expect(page.locator(".round[data-stage]")).to_have_count(0)
    counts = page.evaluate(
        """() => { const step = [...document.querySelectorAll("#lane-spec .round:not([hidden])")].at(-1);
        return [...step.children].map(token => token.dataset.kind); }"""
    )
    guessed, kept_tokens = (int(number) for number in re.findall(r"\d+", page.inner_text("#step-words"))[2:4])
    assert guessed == len([kind for kind in counts if kind in ("accepted", "rejected", "ignored")])
    assert kept_tokens == counts.count("accepted")


# Stops a replay after some steps, in the frame that shows them: its end must not be missed.
STOP_REPLAY = """async () => {
    const shown = () => document.querySelectorAll("#lane-ar .round:not([hidden])").length;
    while (shown() <= 3) await new Promise(requestAnimationFrame);
    const text = document.getElementById("status").textContent;
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    return text;
}"""


@pytest.mark.parametrize(
    ("width", "height"), [(1366, 768), (390, 844), pytest.param(683, 384, marks=pytest.mark.exhaustive)]
)
def test_a_replay_counts_what_it_shows_and_is_completed_with_the_keyboard(page: Page, width: int, height: int) -> None:
    resize(page, width, height)
    with recording_shown(page):
        page.get_by_role("button", name="draft, temperature 0.7").click()
    total = kept(page)
    shown, rest = page.locator("#shown"), page.locator("#show-rest")
    expect(rest).to_be_hidden()
    page.locator("#slow-motion").click()
    assert re.search("^done: .*, replaying$", page.evaluate(STOP_REPLAY))
    counts = [page.locator(f"#lane-{lane} {SHOWN}").count() for lane in ("spec", "ar")]
    expect(shown).to_have_text(f"{counts[0]} and {counts[1]} of {total} shown")
    expect(rest).to_be_visible()
    rest.focus()
    page.keyboard.press("Enter")
    expect(rest).to_be_hidden()
    expect(shown).to_be_empty()
    expect(page.locator(".round[hidden]")).to_have_count(0)
    expect(page.locator("#status")).not_to_contain_text("replaying")
    expect(page.locator("#headline")).to_contain_text("large model")


def test_text_is_readable_and_guesses_can_be_shown_inside(page: Page) -> None:
    page.locator("#show-rejected").check()
    complete(page, CODE, tokens=60)
    before = drawn(page)
    size = "kind => parseFloat(getComputedStyle(document.querySelector(`#lane-spec [data-kind=${kind}]`)).fontSize)"
    assert page.evaluate(size, "rejected") < page.evaluate(size, "accepted") and page.evaluate(size, "ignored") == 0
    more = page.evaluate("[...document.querySelectorAll('#lane-spec [data-more]')].map(token => +token.dataset.more)")
    assert sum(more) == before["ignored"] > 0
    page.locator("#inline-guesses").check()
    assert page.evaluate(size, "rejected") == page.evaluate(size, "ignored") == page.evaluate(size, "accepted")
    assert drawn(page) == before == counted(saved(page))
    page.locator("#inline-guesses").uncheck()


CROWDED = [
    header(prompt="def f(x):\n    "),
    step(0, pieces=["vitamin"]),
    step(1, pieces=[" C"], draft=(" supplementation", " of"), tested=1),
    step(2, pieces=[","], draft=(" internationalization", " in", " a"), tested=1),
    step(3, pieces=["\n"], draft=(" unquestionably",), tested=1),
    step(4, pieces=["so", " on"], draft=("so", " characteristically"), accepted=(0,), tested=2),
    *(step(i, pieces=["."], draft=(" incomprehensible", " or"), tested=1) for i in range(5, 8)),
    *(step(i, pieces=[" word", " next"], draft=(" word", " misunderstanding"), accepted=(0,), tested=2)
      for i in range(8, 40)),
    end(),
]  # fmt: skip


def test_the_text_is_continuous_below_complete_rejected_guesses(page: Page) -> None:
    show(page, *CROWDED)
    for width in (1280, 390):
        resize(page, width)  # guesses follow the text into other lines
        page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        check_text(page, 5)


def test_a_new_pair_brings_its_first_example_unless_a_prompt_was_typed(page: Page) -> None:
    first = next(example for example in EXAMPLES["ready"] if example["pair"] == "bundled")
    prompt = page.locator("#prompt textarea")
    groups = page.locator("#pair optgroup")
    headings = groups.evaluate_all("groups => groups.map((group) => group.label)")
    assert headings == [heading for heading in PAIR_GROUPS if heading in headings]  # each once, in order
    expect(groups.first.locator("option[value=bundled]")).to_have_count(1)

    prompt.fill("my own prompt")
    choose_setting(page, "pair", "SmolLM2 360M")
    choose_setting(page, "pair", "Bundled")
    expect(page.locator("#gamma input[type=number]")).to_have_value(str(PAIRS["bundled"].gamma))
    expect(prompt).to_have_value("my own prompt")
    prompt.fill("")
    choose_setting(page, "pair", "SmolLM2 360M")
    choose_setting(page, "pair", "Bundled")
    expect(prompt).to_have_value(first["prompt"])
    expect(page.locator("#method option:checked")).to_have_text(re.compile(f"^{method_name(first['method'])}:"))


HOLD = f"""
const send = window.fetch;
window.fetch = async (address, options) => {{
    if (String(options?.body).includes({json.dumps(EXAMPLE.stem)}))
        await new Promise((resolve) => (window.released = resolve));
    return send(address, options);
}};"""


def test_the_explained_example_and_the_race_take_turns(page: Page) -> None:
    page.locator("#play-example").click()
    walk, race = page.locator("#play-steps"), page.locator("#race-play")
    expect(walk).to_have_text(re.compile("Pause"))
    page.locator("#race-speed").evaluate("speed => speed.add(new Option('0.01', '0.01', true, true))")  # hardly moves
    race.click()
    expect(walk).to_have_text("▶ Play")
    expect(race).to_have_text(re.compile("Pause"))
    page.locator("#next-step").click()
    expect(race).to_have_text("▶ Race")
    page.locator("#race-speed").evaluate("speed => { speed.lastElementChild.remove(); speed.value = '1'; }")


def test_no_recording_plays_after_run_was_pressed(tab: Any) -> None:
    """The request of the recording is held back in the page: a route of Playwright would disable the cache."""
    page = tab(FIRST_VISIT + HOLD + QUICK)
    for again in (False, True):  # also one that the visitor opened
        if again:
            page.evaluate("delete window.released")
            page.locator("#play-example").click()
        page.wait_for_function("window.released !== undefined")
        run(page, "full")
        status(page, "done: 1 tokens, context full")
        with page.expect_response("**/recordings") as response:
            page.evaluate("window.released()")
        assert "recorded trace" in response.value.text()
        page.evaluate("new Promise(requestAnimationFrame)")
        assert drawn(page) == {"plain": 1}


def test_an_example_sets_all_of_its_settings_and_names_its_effect(page: Page, tmp_path: Path) -> None:
    open_group(page, "Advanced settings", "Chat")
    shown = [example for example in EXAMPLES["ready"] if example["pair"] in PAIRS]
    expect(page.locator("#examples .chip")).to_have_count(len(shown) + 2)
    set_number(page, "temperature", 1.7)
    for example in shown:
        page.get_by_role("button", name=example["title"], exact=True).click()
        expect(page.locator("#prompt textarea")).to_have_value(example["prompt"])
        expect(page.locator("#method option:checked")).to_have_text(re.compile(f"^{method_name(example['method'])}:"))
        expect(page.locator("#pair select")).to_have_value(example["pair"])
        expect(page.locator("#temperature input[type=number]")).to_have_value(f"{example['temperature']:g}")
        expect(page.locator("#example-effect")).to_have_text(example["effect"])
        expect(page.locator("#chat input")).to_be_checked(checked=example["chat"])
    for method, which in (("suffix", "worst"), ("beam", "best")):
        choose_setting(page, "method", f"{method}:")
        page.locator(f"#at-{which}").click()
        expect(page.locator("#example-effect")).to_be_empty()
        expect(page.locator("#prompt textarea")).to_have_value(EXAMPLES["methods"][method][which]["prompt"])
        expect(page.locator("#method option:checked")).to_have_text(re.compile(f"^{method}"))
    page.get_by_role("button", name=shown[-1]["title"], exact=True).click()

    page.locator("#compare input").check()
    complete(page, "gainless")
    expect(page.locator("#headline")).to_contain_text("No clear difference")
    expect(page.locator("#reason")).to_have_text(
        re.compile(r"\b8 of 16 guesses were kept, and checking 3 tokens costs")
    )
    expect(page.locator("#suggestion button")).to_have_text([re.compile("Unit tests"), re.compile("Repeat")])
    with saved_page(page, tmp_path) as offline:  # without the form, whose examples are suggested
        expect(offline.locator("#headline")).to_contain_text("No clear difference")
    page.locator("#suggestion button").first.click()
    repetitive = next(example for example in shown if example["title"] == "Unit tests")
    expect(page.locator("#prompt textarea")).to_have_value(repetitive["prompt"])
