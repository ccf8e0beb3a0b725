"""Readable pace, the recorded example at the first visit, and the example prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model
from playwright.sync_api import Page, Route, expect

from e2e.page_fixtures import CODE, drawn, open_group, run, set_number, spans, status, written
from specdemo.models.zoo import ASSETS, PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.browser]

EXAMPLE = ASSETS / "traces" / "nasd, short answer.jsonl"
PACED = "localStorage.setItem('specdemo-pace', 'readable');"
FIRST_VISIT = "localStorage.getItem('specdemo-opened') ?? localStorage.setItem('specdemo-opened', 'play');"
PLAYING = re.compile(r"^displaying: recorded example at \d+ tokens/s, generated at [\d.]+ and [\d.]+ tokens/s$")
# Records the number of committed tokens of both lanes after every change.
COUNTS = """new MutationObserver(() => {
    const committed = ".tok:not([data-kind=rejected], [data-kind=ignored])";
    const lanes = ["spec", "ar"].map(name => document.getElementById(`lane-${name}`));
    if (lanes[0]) (window.counts ??= []).push(lanes.map(lane => lane.querySelectorAll(committed).length));
}).observe(document, {childList: true, subtree: true});"""
LONG_MS = 20_000  # display of the example at a readable pace
PHASES = """() => {
    const cockpit = document.querySelector(".cockpit");
    new MutationObserver(() => (window.phases ??= []).push(cockpit.dataset.phase)).observe(cockpit, {attributes: true});
}"""


def kept(page: Page, lane: str = "spec") -> int:
    counts = drawn(page, lane)
    return counts.total() - counts["rejected"] - counts["ignored"]


def test_readable_pace_displays_a_finished_run_gradually(tab: Any) -> None:
    page = tab(PACED)
    expect(page.locator("#pace")).to_have_value("readable")
    run(page, CODE, tokens=240)
    expect(page.locator("#status")).to_have_text(
        re.compile(r"^displaying: at 15 tokens/s, generated at [\d.]+ tokens/s")
    )
    assert kept(page) < 240
    speed = page.locator("[data-kpi=tokens_per_second]")
    expect(speed).to_contain_text("240 tokens")  # figures of the complete run
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    before = page.evaluate("document.querySelectorAll('#lane-spec .tok').length")
    page.wait_for_function(f"document.querySelectorAll('#lane-spec .tok').length > {before}")
    page.locator("#stop").evaluate("button => button.click()")  # the display may have ended on a busy machine
    status(page, "done: 240 tokens")
    assert kept(page) == 240
    expect(page.locator("#race")).to_be_visible()


def test_the_faster_lane_leads(tab: Any) -> None:
    page = tab(PACED + COUNTS, clock=True)
    page.locator("#play-example").click()
    expect(page.locator("#status")).to_have_text(PLAYING)
    page.clock.run_for(LONG_MS)
    ends = [json.loads(line) for line in EXAMPLE.read_text("utf-8").splitlines() if line.startswith('{"end"')]
    tokens = ends[0]["metrics"]["tokens"]
    status(page, f"done: recorded trace, {tokens} and {tokens} tokens")
    counts = [tuple(count) for count in page.evaluate("window.counts")]
    assert len({spec for spec, _ in counts}) > 10 and counts[-1] == (tokens, tokens)
    assert all(spec >= ar for spec, ar in counts)
    ratio = ends[1]["metrics"]["tokens_per_second"] / ends[0]["metrics"]["tokens_per_second"]
    assert next(ar for spec, ar in counts if spec == tokens) < tokens * (1 + ratio) / 2


def test_full_speed_can_be_chosen_during_a_run(tab: Any) -> None:
    page = tab(PACED)
    run(page, CODE, tokens=120)
    status(page, "displaying")
    page.locator("#pace").select_option("instant")
    status(page, "done: 120 tokens")
    assert kept(page) == 120
    assert page.evaluate("localStorage.getItem('specdemo-pace')") == "instant"


def test_a_new_run_replaces_the_display_of_the_last(tab: Any) -> None:
    page = tab(PACED)
    run(page, CODE, tokens=120)
    status(page, "displaying")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert drawn(page) == {"plain": 1}


HIDE = "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'})"


def test_runs_are_displayed_at_once(tab: Any) -> None:
    """In automated browsers by default, with reduced motion, and in hidden tabs."""
    page = tab()
    expect(page.locator("#pace")).to_have_value("instant")
    page.evaluate(PHASES)
    for tokens, reason in enumerate(("automation", "reduced motion", "hidden"), 48):
        if reason != "automation":
            page.locator("#pace").select_option("readable")
        page.emulate_media(reduced_motion="reduce" if reason == "reduced motion" else "no-preference")
        if reason == "hidden":
            page.evaluate(HIDE)
        run(page, CODE, tokens=tokens)
        status(page, f"done: {tokens} tokens")
        assert "displaying" not in page.evaluate("window.phases"), reason


def test_the_first_visit_plays_a_recording(tab: Any) -> None:
    page = tab(PACED + FIRST_VISIT, clock=True)
    expect(page.locator("#status")).to_have_text(PLAYING)
    expect(page.locator("#run")).not_to_have_attribute("aria-disabled", "true")
    spans(page, 12)
    page.clock.run_for(LONG_MS)
    status(page, "done: recorded trace")
    assert {"accepted", "rejected", "correction"} <= set(drawn(page))
    page.reload()
    expect(page.locator("#recorded button").first).to_be_visible()
    status(page, "ready")
    assert not drawn(page)
    page.locator("#play-example").click()
    expect(page.locator("#status")).to_have_text(PLAYING)
    page.keyboard.press("Escape")
    status(page, "done: recorded trace")


def test_defaults_of_a_browser_that_is_not_automated(tab: Any) -> None:
    page = tab("Object.defineProperty(Navigator.prototype, 'webdriver', {get: () => false});")
    expect(page.locator("#status")).to_have_text(PLAYING)
    expect(page.locator("#pace")).to_have_value("readable")
    assert page.evaluate("localStorage.getItem('specdemo-pace')") is None


def test_run_replaces_the_recording(tab: Any) -> None:
    page = tab(PACED + FIRST_VISIT)
    expect(page.locator("#status")).to_have_text(PLAYING)
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert drawn(page) == {"plain": 1}
    expect(page.locator("#lane-ar")).to_be_hidden()


def test_no_recording_plays_after_run_was_pressed(tab: Any) -> None:
    page, held = tab(), []
    page.evaluate("localStorage.setItem('specdemo-opened', 'play')")

    def hold(route: Route) -> None:
        held.append(route) if EXAMPLE.stem in (route.request.post_data or "") else route.continue_()

    page.route("**/component_server/", hold)
    with page.expect_request(lambda request: EXAMPLE.stem in (request.post_data or "")):
        page.reload()
    run(page, "full")
    status(page, "done: 1 tokens, context full")
    assert len(held) == 1
    with page.expect_response("**/component_server/") as response:
        held[0].continue_()
    assert "recorded trace" in response.value.text()
    page.evaluate("new Promise(requestAnimationFrame)")
    assert drawn(page) == {"plain": 1}


def test_a_link_with_settings_plays_no_recording(tab: Any) -> None:
    page = tab(FIRST_VISIT, query="?gamma=5")
    expect(page.locator("#recorded button").first).to_be_visible()
    expect(page.locator("#gamma input[type=number]")).to_have_value("5")
    status(page, "ready")
    assert not drawn(page)


def test_an_example_sets_all_of_its_settings_and_names_its_effect(page: Page) -> None:
    open_group(page, "Examples")
    open_group(page, "Advanced settings", "Chat")
    ready = json.loads((ASSETS / "examples.json").read_text("utf-8"))["ready"]
    shown = [example for example in ready if example["pair"] in PAIRS]
    expect(page.locator("#examples .chip")).to_have_count(len(shown) + 2)
    set_number(page, "temperature", 1.7)
    for example in shown:
        page.get_by_role("button", name=example["title"], exact=True).click()
        expect(page.locator("#prompt textarea")).to_have_value(example["prompt"])
        expect(page.locator("#method input")).to_have_value(re.compile(f"^{example['method']}:"))
        expect(page.locator("#pair input")).to_have_value(re.compile(f"^{re.escape(PAIRS[example['pair']].title)}"))
        expect(page.locator("#temperature input[type=number]")).to_have_value(f"{example['temperature']:g}")
        expect(page.locator("#example-effect")).to_have_text(example["effect"])
        expect(page.locator("#chat input")).to_be_checked(checked=example["chat"])
    page.locator("#at-best").click()
    expect(page.locator("#example-effect")).to_be_empty()


def test_an_example_ends_the_conversation(page: Page, short_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = save_model(short_path, tokenizer)
    open_group(page, "Examples")
    open_group(page, "Advanced settings", "Models and devices", "Chat")
    for prompt in ("Hello", "New"):
        page.get_by_role("button", name="Unit tests", exact=True).click()
        expect(page.locator("#target input, #target textarea")).to_have_value("")
        written(page, "target", str(folder))
        page.locator("#chat input").check()
        run(page, prompt, tokens=6)
        status(page, "done")
        expect(page.locator("#lane-spec .given")).to_have_text(f"<user>{prompt}\n<assistant>")
