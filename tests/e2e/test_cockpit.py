"""Inspect, replay, export and import runs; stored settings."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fakes.shown_figures import RunFigures, agrees
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model
from fakes.traces import PREFILL, end, golden, header, jsonl, read_lines, step
from playwright.sync_api import Page, expect

from e2e.page_fixtures import (
    CODE,
    MARKUP,
    PATIENCE,
    RULES,
    STARTED,
    Scripts,
    choose_setting,
    complete,
    counted,
    disturbed,
    drawn,
    expect_for_a_moment,
    exported,
    grave,
    lane_action,
    open_group,
    opened,
    recording_shown,
    resize,
    run,
    saved,
    set_number,
    show,
    spans,
    status,
    stop,
    text_of,
    withheld,
)
from specdemo.models.zoo import ASSETS

pytestmark = [pytest.mark.slow, pytest.mark.browser]

OPAQUE = "parts => [...document.querySelectorAll(parts)].every(part => getComputedStyle(part).opacity === '1')"
REPEATED = re.compile(r"median of [2-5] pairs|not measurable|one run")  # a busy machine disturbs pairs
VISIBLE = "rounds => rounds.filter(r => !r.hidden).length"
LANES = ("spec", "ar")


def visible_steps(page: Page, lane: str) -> int:
    return int(page.eval_on_selector_all(f"#lane-{lane} .round", VISIBLE))


def compared(page: Page, tokens: int = 48, temperature: float = 0.5) -> None:
    """Run both lanes with the real engine."""
    set_number(page, "temperature", temperature)
    page.locator("#compare input").check()
    complete(page, CODE, tokens=tokens)


def visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "◌"


def test_click_on_a_token_shows_its_step(page: Page) -> None:
    trace = golden("draft", "ar")
    show(page, *trace)
    resize(page, 1280, 720)
    page.evaluate("scrollTo(0, 0)")
    token = page.locator("#lane-spec [data-kind=rejected]").first
    token.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    token.click()
    inspector = page.locator("#inspector")
    expect(inspector).to_be_visible()
    expect(inspector).to_be_in_viewport()
    assert page.evaluate("scrollY") == before  # the text stays in place
    expect(page.locator("#tip")).to_be_hidden()
    steps = RunFigures.of(trace).first.steps
    i = next(line["i"] for line in steps if len(line["accepted"]) < sum(b is not None for b in line["beta"]))
    expect(page.locator("#round-number")).to_have_text(f"{i} of {len(steps) - 1}")
    assert page.locator("#round-nodes h3 .tok").all_inner_texts() == [*map(visible, steps[i]["draft_text"])]
    slider = page.locator("#round-at")
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#round-number")).to_have_text(re.compile(f"^{i + 1} of"))
    expect(page.locator("#lane-spec .current")).to_have_count(1)
    page.locator("#round-back").click()
    expect(page.locator("#round-number")).to_have_text(re.compile(f"^{i} of"))
    page.locator("#round-close").click()
    expect(inspector).to_be_hidden()
    page.locator("#figures summary").click()
    rows = page.locator("#rounds tbody tr")
    text = rows.nth(3).locator("td.text")  # beside the number of the step, complete
    expect(text).to_have_text(visible(steps[3]["text"]))
    assert text.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    fits = "box => box.scrollWidth <= box.clientWidth"
    assert page.locator("#chart-whatif").evaluate(fits) and page.locator("#figures").evaluate(fits)
    resize(page, 1366, 768)
    assert page.locator(".rounds").evaluate(fits)
    rows.nth(3).click()
    expect(page.locator("#round-number")).to_have_text(re.compile("^3 of"))
    rows.nth(2).get_by_role("button", name="Inspect step 2").press("Enter")
    expect(page.locator("#round-number")).to_have_text(re.compile("^2 of"))
    page.locator("#round-lane").select_option("ar")
    expect(page.locator("#round-words")).to_contain_text("There was no guess")
    expect(page.locator("#chart-whatif")).to_contain_text("This run did not draft")


RECORD_LABELS = """() => {
    const button = document.querySelector("#race-play");
    window.labels = [];
    new MutationObserver(() => window.labels.push(button.textContent))
        .observe(button, {childList: true, characterData: true, subtree: true});
}"""


def test_replay_ends_in_the_final_state(page: Page) -> None:
    lines = golden("draft", "ar")
    show(page, *lines)

    def shown() -> list[Any]:
        return [
            (drawn(page, lane), visible_steps(page, lane), page.locator(f"[data-lane={lane}] .rate").inner_text())
            for lane in LANES
        ]

    before = shown()
    assert all("tok/s" in rate for *_, rate in before)
    race = page.locator("#race-at")
    race.focus()
    page.keyboard.press("Home")
    assert [visible_steps(page, lane) for lane in LANES] == [1, 1]
    times = {lane: figures.at for lane, figures in RunFigures.of(lines).lanes.items()}
    middle = max(t[-1] for t in times.values()) / 3
    race.evaluate("(slider, t) => { slider.value = t; slider.dispatchEvent(new Event('input')); }", middle)
    for lane, t in times.items():
        assert visible_steps(page, lane) == sum(round(time, 6) <= middle for time in t)  # precision of the frames
    page.locator("#race-speed").select_option("4")
    page.evaluate(RECORD_LABELS)  # the replay may be shorter than the interval at which Playwright looks
    page.locator("#race-play").click()
    page.wait_for_function("window.labels.at(-1) === '▶ Race'")
    assert page.evaluate("window.labels") == ["❚❚ Pause", "▶ Race"]
    assert shown() == before
    race.focus()
    page.keyboard.press("Home")
    show(page, header(), PREFILL, end())
    assert page.locator("#timeline").evaluate("axis => axis.style.getPropertyValue('--at')") == "1"


def test_the_strip_shows_the_last_question_of_a_conversation(page: Page) -> None:
    turns = [("user", "And of Spain?"), ("assistant", "Madrid."), ("user", "Thanks")]
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    show(page, header(options={"chat": True}, prompt=prompt), PREFILL, end())
    given = page.locator("#lane-spec .given")
    expect(given).to_have_text("Thanks", use_inner_text=True)
    assert given.text_content() == prompt


def test_identical_texts_have_a_badge(page: Page) -> None:
    open_group(page, "Advanced settings", "When a guess is kept")
    for rule, temperature, tokens in (("rejection", 0.0, 16), ("coupled", 1.0, 15)):
        choose_setting(page, "rule", f"{rule}:")
        compared(page, tokens=tokens, temperature=temperature)
        expect(page.locator("#sameness")).to_have_text("same text")
        traces = [saved(page, lane) for lane in ("spec", "ar")]
        assert traces[0][0]["recipe"]["rule"] == rule
        texts = ["".join(line["text"] for line in trace if "i" in line) for trace in traces]
        assert texts[0] == texts[1]
        assert disturbed(page) or "The theory expects" in (page.locator("#verdict").text_content() or "")
    set_number(page, "max-tokens", 8)
    page.locator("#repeat").click()
    status(page, "done: .*, first of 5 pairs")
    expect(page.locator("[data-kpi=speedup]")).to_contain_text(REPEATED)
    assert text_of(saved(page)) == text_of(saved(page, "ar"))  # a single run of each lane is shown


SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def drawn_text(svg: str) -> str:
    """Return the text of a picture without its result, legend and title."""
    texts = [node.text or "" for node in ElementTree.fromstring(svg).findall(SVG_TEXT)]
    return "".join(texts[:-6])


def drawn_result(svg: str) -> list[str]:
    """Return the headline of a picture, then names and times of its bars."""
    texts = [node.text or "" for node in ElementTree.fromstring(svg).findall(f"./*/{SVG_TEXT}")]
    bars = 4  # texts of two lanes
    return [re.sub(r"\s", "", "".join(texts[:-bars])), *texts[-bars:]]


def test_exports_match_the_run(page: Page) -> None:
    compared(page, tokens=24)
    trace = saved(page)
    table = list(csv.DictReader(io.StringIO(exported(page, lane_action(page, "csv")))))
    steps = [line for line in trace if "i" in line]
    assert ",".join(table[0]) == "round,t_s,gamma,drafted,tested,accepted,committed,ends_with,mean_beta," + (
        "draft_ms,verify_ms,host_ms,text"
    )
    for row, line, at in zip(table, steps, RunFigures.of(trace).first.at, strict=True):
        betas = [beta for beta in line["beta"] if beta is not None]
        assert json.loads(row["text"]) == line["text"] and row["ends_with"] == line["kind"]
        assert [int(row[name]) for name in ("round", "gamma", "drafted", "tested", "accepted", "committed")] == [
            line["i"], line["gamma"], len(line["draft"]), len(betas), len(line["accepted"]), len(line["tokens"]),
        ]  # fmt: skip
        assert row["mean_beta"] == (str(round(sum(betas) / len(betas), 3)) if betas else "")
        assert row["verify_ms"] == str(round(1000 * line["verify_s"], 3)) and agrees(f"{float(row['t_s']):.4f}", at)
    picture = exported(page, lane_action(page, "svg"))
    words = re.sub(r"\s", "", page.locator("#headline").text_content() or "")
    assert drawn_result(picture) == [words, *page.locator("#time-rows > * > span").all_inner_texts()]
    with page.expect_download() as download:
        lane_action(page, "png").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    shown = page.locator("#lane-spec .given, #lane-spec .tok").all_text_contents()
    assert re.sub(r"\s", "", drawn_text(picture)) == re.sub(r"\s", "", "".join(shown))
    assert picture.count("line-through") == drawn(page)["rejected"] + 1  # and in the legend
    assert exported(page, page.locator("#save-page")).startswith("<!doctype html>")
    lane_action(page, "copy").click()
    expect_for_a_moment(page, "#copy-spec", "Copied")
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == trace[0]["prompt"] + "".join(line["text"] for line in trace if "i" in line)
    with page.expect_download() as download:
        page.locator("#save-all").click()
    both = Path(download.value.path()).read_text("utf-8")
    parts = [f"[data-kpi={kpi}] .value" for kpi in ("acceptance", "tokens_per_second", "ttft")]  # of the first pair
    shown = {part: page.locator(part).text_content() or "" for part in parts}
    tokens = {lane: drawn(page, lane) for lane in ("spec", "ar")}
    opened(page, both)
    status(page, "done: recorded trace, 24 and 24 tokens")
    assert {lane: drawn(page, lane) for lane in tokens} == tokens
    for part, text in shown.items():
        expect(page.locator(part)).to_have_text(text)
    page.locator("#lane-spec [data-kind=accepted]").first.click()
    expect(page.locator("#inspector")).to_be_visible()


def test_recorded_traces_open_without_a_model(page: Page, served: Any) -> None:
    for path in sorted((ASSETS / "traces").glob("*.jsonl")):
        with recording_shown(page):
            page.get_by_role("button", name=path.stem.replace("-", " "), exact=True).click()
        expect(page.locator("[data-lane=spec] .title")).to_contain_text(path.stem.split(",")[0])
        trace = read_lines(path)
        tokens = [str(line["metrics"]["tokens"]) for line in trace if "end" in line]
        status(page, f"done: recorded trace, {' and '.join(tokens)} tokens")
        middle = next(i for i, line in enumerate(trace) if "end" in line) + 1
        assert drawn(page) == counted(trace[:middle]) and drawn(page, "ar") == counted(trace[middle:])
    expect(page.locator("#recorded-settings")).to_contain_text(f"max tokens {trace[0]['recipe']['max_tokens']}.")
    expect(page.locator("#suggestion")).to_be_hidden()  # it would run the settings of the page
    page.locator("#details summary").click()
    page.locator("#use-settings").click()
    expect(page.locator("#prompt textarea")).to_have_value(trace[0]["prompt"])
    expect(page.locator("#max-tokens input[type=number]")).to_have_value("96")
    expect(page.locator("#method option:checked")).to_have_text(re.compile(f"^{trace[0]['recipe']['method']}"))
    page.locator("#lane-spec [data-kind=rejected]").first.click()
    expect(page.locator("#round-tree svg")).to_be_visible()  # the second trace is a tree
    expect(page.locator("#round-tree .leaf")).to_have_count(page.locator(".node[data-state]").count() - 1)
    page.locator("#lane-spec").focus()
    page.keyboard.press("Escape")
    expect(page.locator("#inspector")).to_be_hidden()


HOSTILE = (
    header(prompt=MARKUP, recipe={"method": "draft", "gamma": 3, "temperature": 0.0, "pair": MARKUP}),
    step(0, pieces=["</span><script>window.harmed = true</script>"]),
    step(1, pieces=[MARKUP, "X"], draft=(MARKUP, "\n"), accepted=(0,), tested=2)
    | {"texts": {"7": MARKUP}, "laws": [{"entropy": 1.0, "top": [[7, 0.5]]}] * 3},
    end(),
)


def test_markup_in_a_trace_is_shown_as_text(page: Page) -> None:
    show(page, *HOSTILE)
    lane = page.locator("#lane-spec")
    expect(lane).to_contain_text(MARKUP)
    expect(lane).to_contain_text("<script>window.harmed")
    assert page.locator("#lane-spec :not(span)").count() == 0
    rejected = page.locator("#lane-spec [data-kind=rejected]")
    expect(rejected).to_have_text("⏎")  # a rejected newline must not break the line
    expect(rejected).to_have_css("text-decoration-line", "none")  # a line would hide it
    page.locator("#lane-spec [data-kind=accepted]").hover()
    expect(page.locator("#tip")).to_contain_text(MARKUP)
    page.locator("#lane-spec [data-kind=accepted]").click()
    expect(page.locator("#inspector .law").first).to_contain_text("<img␣src=x")
    page.locator("#figures summary").click()
    expect(page.locator("#rounds")).to_contain_text("<img␣src=x")
    assert MARKUP in drawn_text(exported(page, lane_action(page, "svg")))
    saved_page = exported(page, page.locator("#save-page"))
    assert "<img src=x" not in saved_page and "&lt;img src=x" in saved_page  # in the heading
    assert page.locator("img[src=x]").count() == 0 and page.evaluate("window.harmed") is None


def test_invalid_traces_show_an_error_and_leave_the_page_unchanged(page: Page, tmp_path: Path) -> None:
    for content, message in (
        ("text", "line 1 is not JSON"),
        (jsonl(*HOSTILE)[:-60], "not JSON"),
        (jsonl(header(), PREFILL | {"tokens": "abc"}), "tokens"),
        (b"\xff\xfe\x00\x01", "not JSON"),
        ("", "the file is empty"),
        (jsonl(header(), PREFILL, PREFILL), "does not follow"),
    ):
        show(page, header(), PREFILL, end())
        opened(page, content)
        status(page, f"failed: .*{message}")
        assert drawn(page) == {"plain": 1}  # unchanged
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 33_000_000)
    page.locator("#trace-file").set_input_files(path)
    status(page, "failed: large.jsonl has 33 MB: the limit is 32 MB")
    complete(page, CODE, tokens=8)


PRESSED = """() => {
    window.pressed = [];
    document.addEventListener("click", (e) => window.pressed.push(e.target.closest("button")?.id));
}"""


def test_added_lanes_run_with_the_others(page: Page, tmp_path: Path) -> None:
    for name in ("n-grams", "tree"):
        choose_setting(page, "method", f"{name}:")
        page.locator("#keep-lane").click()
        expect(page.locator("#kept-lanes")).to_contain_text(name)
    choose_setting(page, "method", "draft:")
    complete(page, CODE, tokens=8)
    for lane, method in (("spec", "draft"), ("ar", "ar"), ("third", "nasd"), ("fourth", "tree")):
        trace = saved(page, lane)
        assert trace[0]["recipe"]["method"] == method and drawn(page, lane) == counted(trace)
        expect(page.locator(f"[data-lane={lane}] .model")).to_have_text(re.compile("^bundled, temperature 0"))
    shown = page.locator("#headline").inner_text()  # a disturbed lane is not compared
    assert withheld(page) or re.search(r"Compared: draft [\d.]+×(, n-grams [\d.]+×)?(, tree [\d.]+×)?\.", shown)
    for headings in (page.locator(".box:not([hidden]) h2"), page.locator("#time-rows .time-name")):
        expect(headings).to_have_text([re.compile(f"^{name}") for name in ("draft", "Baseline", "n-grams", "tree")])
    expect(page.locator("#run-table tbody tr")).to_have_count(4)
    page.locator("#add-run").click()
    expect(page.get_by_text("2 settings are added already: remove them first")).to_be_visible()
    open_group(page, "Advanced settings", "Models and devices")
    page.locator("#target input, #target textarea").fill(str(save_model(tmp_path, byte_level_tokenizer())))
    expect(page.locator("#pair")).to_contain_text("Not used: a target is set")
    choose_setting(page, "method", "n-grams:")
    page.locator("#compare input").check()
    run(page, CODE, tokens=6)
    refused = "Not compared, since target or chat template differ: n-grams, up to 3 guesses (bundled);"
    expect(page.get_by_text(refused)).to_be_visible()
    status(page, "done: 6 tokens")
    expect(page.locator("[data-lane=spec] .model")).to_contain_text(f"{tmp_path.name}, temperature")
    expect(page.locator("#lane-third")).to_be_hidden()
    page.locator("#drop-lanes").click()
    expect(page.locator("#kept-lanes")).to_be_hidden()
    complete(page, CODE, tokens=8)
    expect(page.locator("#lane-third")).to_be_hidden()
    page.evaluate(PRESSED)
    page.locator("#add-run").click()
    expect(page.locator("#kept-lanes")).to_contain_text("n-grams")
    assert page.evaluate("window.pressed") == ["add-run"]


def test_added_settings_are_the_same_in_all_tabs(page: Page, new_tab: Page) -> None:
    first, second = new_tab, page

    def add(tab: Page, name: str) -> None:
        choose_setting(tab, "method", f"{name}:")
        tab.locator("#keep-lane").click()

    def expect_added(*names: str) -> None:
        units = {"tree": " deep"}
        lanes = "; ".join(f"{name}, up to 3 guesses{units.get(name, '')} (bundled)" for name in names)
        for tab in (first, second):
            words = f"Also compared, with the same target: {lanes}." if names else ""
            expect(tab.locator("#kept-lanes")).to_have_text(words)

    add(first, "n-grams")
    expect_added("n-grams")
    add(second, "tree")
    expect_added("n-grams", "tree")
    first.locator("#drop-lanes").click()
    expect_added()
    add(second, "suffix")
    expect_added("suffix")


CLOCK = """() => {
    const now = performance.now.bind(performance), clock = document.querySelector(".clock");
    Object.assign(window, { later: 0, clocks: [] });
    performance.now = () => now() + window.later;
    new MutationObserver(() => window.clocks.push(clock.textContent))
        .observe(clock, { childList: true, characterData: true, subtree: true });
}"""


def test_a_second_tab_is_queued_while_models_load_and_then_alternates_by_step(
    page: Page, new_tab: Page, scripts: Scripts
) -> None:
    first, second = page, new_tab
    run(first, "loading")
    assert scripts.inside.wait(PATIENCE)
    status(first, "loading: loading the target")
    second.evaluate(CLOCK)
    run(second, "endless")
    second.wait_for_function(STARTED, polling=100)
    status(second, "queued")
    second.evaluate("window.later = 60000")
    scripts.gate.set()
    status(first, "done")
    second.wait_for_function("window.clocks.some((text) => text)")
    stop(second)
    clocks = [float(text.removesuffix(" s")) for text in second.evaluate("window.clocks") if text]
    assert max(clocks) < 60  # without the time in the queue
    run(first, "endless")
    spans(first, 10)
    complete(second, CODE, tokens=24)
    status(first, "decoding")
    stop(first)


LATE_PROMPT = """{
    const find = document.querySelector;
    let rest = 5;
    document.querySelector = function (selector) {
        return selector === "#prompt textarea" && rest-- > 0 ? null : find.call(this, selector);
    };
}"""


def test_link_transfers_settings_and_plays_no_recording(page: Page, tab: Any, served: Any) -> None:
    """To a dark page whose parts are mounted late."""
    set_number(page, "gamma", 30)  # the slider and typed values reach the limit of the option
    set_number(page, "temperature", 0)
    page.locator("#prompt textarea").fill("a & b = <c>")
    for _ in range(2):
        page.locator("#link").click()
        expect_for_a_moment(page, "#link", "Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url and "gamma=30" in link
    page.evaluate("localStorage.clear(); localStorage.setItem('specdemo-opened', 'play')")  # shared by the tabs
    query = link.removeprefix(served.url)
    query += "&mode=speculative&remote=http://127.0.0.1:1&top_p=9999&seed=3&gama=1"
    other = tab(LATE_PROMPT, scheme="dark", query=f"{query}&target=org/large&drafter=org/small")
    expect(other.locator("#gamma input[type=number]")).to_have_value("30")
    expect(other.locator("#temperature input[type=number]")).to_have_value("0")
    expect(other.locator("#prompt textarea")).to_have_value("a & b = <c>")
    expect(other.locator("#recorded button").first).to_be_visible()
    status(other, "ready")
    assert not drawn(other)
    expect(other.get_by_text("top_p ignored: top_p must be from").first).to_be_visible()
    expect(other.get_by_text("Unknown settings in the link ignored: gama").first).to_be_visible()
    expect(other.get_by_text("This link has prompts sent to http://127.0.0.1:1").first).to_be_visible()
    other.wait_for_function(OPAQUE, arg=".toast-wrap, .toast-body, .toast-message-item")  # they fade in
    assert not grave(other, ".toast-wrap", schemes=["light"])
    open_group(other, "Advanced settings", "Sampling")
    expect(other.locator("#seed input")).to_have_value("3")
    expect(other.locator("#top-p input[type=number]")).not_to_have_value("9999")
    open_group(other, "Models and devices")
    for name, model in (("target", "org/large"), ("drafter", "org/small")):
        expect(other.locator(f"#{name} input, #{name} textarea")).to_have_value(model)
    other.goto(served.url)  # stored settings
    open_group(other, "Advanced settings", "Models and devices")
    for name, model in (("target", "org/large"), ("drafter", "org/small")):
        expect(other.locator(f"#{name} input, #{name} textarea")).to_have_value(model)
    check_contrast(other, "dark")
    expect(page.locator("#link")).to_have_text("Link to these settings")


# The part of a slider up to its value stands out more than the rest.
FILLED = """slider => {
    const style = getComputedStyle(slider);
    const [filled, rest, ground] = ["--slider-color", "--neutral-200", "--ground"].map((name) => {
        const colour = parseInt(style.getPropertyValue(name).trim().slice(1), 16);
        return (colour >> 16) + ((colour >> 8) & 255) + (colour & 255);
    });
    return Math.abs(filled - ground) > 2 * Math.abs(rest - ground);
}"""


def test_contrast_of_the_light_theme(page: Page) -> None:
    check_contrast(page, "light")


def check_contrast(page: Page, scheme: str) -> None:
    complete(page, "hostile")
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    assert not grave(page, schemes=[scheme], rules=RULES["dark"])  # contrast of WCAG 2, level AA
    assert page.locator("#gamma input[type=range]").evaluate(FILLED)
    styles = page.eval_on_selector_all(
        ".legend .tok",
        """tokens => tokens.filter(token => token.checkVisibility()).map(token => {
            const style = getComputedStyle(token);
            const decoration = [style.textDecorationLine, style.textDecorationStyle, style.fontStyle].join();
            return [token.dataset.legend, decoration, style.backgroundColor];
        })""",
    )
    kinds = {kind: decoration for kind, decoration, _ in styles}
    assert kinds.pop("plain") == kinds.pop(
        "accepted"
    )  # no decoration for these two kinds: the background distinguishes them
    assert len(set(kinds.values())) == 4 and len({colour for *_, colour in styles}) == 6


TAB_BUTTONS = "#tabs [role=tab], #tabs .overflow-menu button"  # narrow windows have a menu of the last ones


@pytest.mark.exhaustive
def test_axe_finds_no_serious_violations(page: Page) -> None:
    show(page, *golden("draft-top", "ar"))
    page.locator("#lane-spec [data-kind=rejected]").first.click()
    expect(page.locator("#inspector")).to_be_visible()
    page.locator("#figures summary").click()
    expect(page.locator("#rounds tbody tr").first).to_be_visible()
    assert not grave(page)
    page.locator("#safe-colours").check()
    assert not grave(page, ".stage", ".legend", schemes=["dark"])
    resize(page, 390, 844)  # tables scroll
    parts = {"Theory": "#theory-words li", "Bench": "#bench-run", "Explain logs": "#engine-explain"}
    for name, part in {**parts, "Memory": "#memory-pairs tbody tr"}.items():
        page.locator(TAB_BUTTONS).filter(has_text=name).evaluate("button => button.click()")
        expect(page.locator(part).first).to_be_visible()
        if name == "Theory":  # gradio shows placeholders until the plots are drawn
            expect(page.locator('.curves .dot[fill="var(--dot-set)"]')).to_have_count(6)
        assert not grave(page, "#tabs", "footer", schemes=RULES if name == "Theory" else ["light"]), name


def test_lanes_wait_and_the_inspector_is_closed_during_a_run_and_with_escape(page: Page) -> None:
    words = "getComputedStyle(document.getElementById('lane-ar'), '::before').content"
    page.locator("#compare input").check()
    run(page, "endless")
    spans(page, 12)
    assert page.evaluate(words) == '"Queued: the runs take turns."'
    page.locator("#lane-spec .tok").first.click()
    expect(page.locator("#inspector")).to_be_hidden()
    stop(page)
    assert page.evaluate(words) == '"Stopped before this run began."'
    for focused in ("#lane-spec", "#round-at"):
        page.locator("#lane-spec .tok").first.click()
        expect(page.locator("#inspector")).to_be_visible()
        page.locator(focused).press("Escape")
        expect(page.locator("#inspector")).to_be_hidden()
    expect(page.locator("#lane-spec .tok").first).to_be_focused()


@pytest.mark.parametrize("state", ["hidden", "visible"])
def test_hidden_tab_receives_all_tokens(page: Page, state: str) -> None:
    """A tab can also be hidden after an animation frame was requested."""
    page.evaluate(f"""() => {{
        Object.defineProperty(document, "visibilityState", {{get: () => "{state}", configurable: true}});
        const request = window.requestAnimationFrame;
        const waiting = [];
        window.requestAnimationFrame = (callback) => waiting.push(callback);
        window.showTab = () => {{
            delete document.visibilityState;
            window.requestAnimationFrame = request;
            waiting.forEach((callback) => request(callback));
        }};
    }}""")
    run(page, "endless")
    spans(page, 41)
    page.locator("#stop").evaluate("button => button.click()")
    status(page, "stopped")
    page.evaluate("window.showTab()")
    assert drawn(page) == counted(saved(page))


def test_run_begins_a_conversation_and_continue_chat_adds_a_turn(page: Page, tmp_path: Path, scripts: Scripts) -> None:
    folder = save_model(tmp_path, byte_level_tokenizer(TEMPLATE))
    following = page.locator("#continue-chat")
    open_group(page, "Advanced settings", "Models and devices")
    page.locator("#target input, #target textarea").fill(str(folder))
    expect(page.locator("#pair")).to_contain_text("Not used: a target is set")
    choose_setting(page, "method", "n-grams:")
    open_group(page, "Chat")
    page.locator("#chat input").check()
    expect(following).to_be_hidden()
    given = page.locator("#lane-spec .given")
    for _ in range(2):  # the second press measures the same
        complete(page, "Hello", tokens=6)
        expect(given).to_have_text("<user>Hello\n<assistant>")
        expect(given).to_have_text(re.compile(r"^\s*Hello\s*$"), use_inner_text=True)  # the template is hidden
        expect(page.locator("#turn")).to_be_hidden()
    answer = "".join(line["text"] for line in saved(page) if "i" in line)
    conversation = page.locator("#conversation")
    expect(conversation.locator(".message-row, .message")).not_to_have_count(0)
    page.locator("#prompt textarea").fill("Go on")
    following.click()
    expect(given).to_contain_text("Go on")
    status(page, "done")
    expect(page.locator("#prompt textarea")).to_have_value("Go on")  # as after Run
    expect(given).to_have_text(re.compile(r"^\s*Go on\s*$"), use_inner_text=True)
    expect(conversation).to_contain_text("Hello")
    expect(conversation).to_contain_text("Go on")
    expect(conversation).to_contain_text("tok/s")
    expect(conversation).not_to_contain_text("<assistant>")
    assert not grave(page, "#conversation")
    assert saved(page)[0]["prompt"] == f"<user>Hello\n<assistant>{answer}\n<user>Go on\n<assistant>"
    expect(page.locator("#turn")).to_have_text("Turn 2: earlier answers are part of the prompt.")
    page.locator("#repeat").click()
    status(page, "done")
    expect(page.locator("[data-kpi=speedup]")).to_contain_text(REPEATED)
    assert saved(page)[0]["prompt"] == f"<user>Hello\n<assistant>{answer}\n<user>Go on\n<assistant>"
    expect(page.locator("#turn")).to_be_visible()
    scripts.held_after = 3
    run(page, "New", tokens=60)
    expect(given).to_have_text("<user>New\n<assistant>")
    spans(page, 3)
    page.locator("#stop").click()
    scripts.gate.set()
    status(page, "stopped")
    expect(conversation).to_contain_text("New")
    expect(following).to_be_visible()
    page.get_by_role("button", name="Unit tests", exact=True).click()  # with the pair of the example
    expect(page.locator("#target input, #target textarea")).to_have_value("")


# A text that continues on the next line has two boxes.
MIDDLE = """token => {
    const box = token.getClientRects()[0];
    return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
}"""


def test_a_tap_opens_the_step_as_a_drawer_below_the_token(page: Page) -> None:
    resize(page, 390, 844)
    complete(page, CODE, tokens=64)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    for number in (3, 40):
        token = page.locator("#lane-spec .round .tok:visible").nth(number)
        token.click(trial=True)  # scrolls, and waits until the token stays in place
        point = token.evaluate(MIDDLE)
        devtools.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
        devtools.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        inspector = page.locator("#inspector")
        expect(inspector).to_be_in_viewport()
        expect(page.locator("#tip")).to_be_hidden()
        page.wait_for_function(
            f"token => {{ const {{ x, y }} = ({MIDDLE})(token); return document.elementFromPoint(x, y) === token; }}",
            arg=token.element_handle(),
        )  # nothing covers it
        assert inspector.evaluate("drawer => getComputedStyle(drawer).position") == "fixed"
        page.locator("#round-close").click()
    devtools.send("Emulation.setTouchEmulationEnabled", {"enabled": False})
