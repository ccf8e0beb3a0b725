"""Runs on the page: the display equals the trace, Stop stops, tabs share, text is escaped, errors are shown."""

import json
import re
from pathlib import Path
from typing import Any

import gradio_client
import pytest
from fakes.shown_claims import claims
from fakes.shown_figures import RunFigures
from fakes.traces import trace_lines
from playwright.sync_api import Page, expect

from e2e.page_fixtures import (
    CODE,
    MORE,
    MOST_CHARACTERS,
    PATIENCE,
    Scripts,
    choose_setting,
    complete,
    counted,
    drawn,
    expect_fit,
    explained,
    grave,
    open_group,
    resize,
    run,
    saved,
    set_number,
    spans,
    status,
    stop,
    text_of,
)
from specdemo import fit
from specdemo.recipe import METHODS, Recipe
from specdemo.ui.settings import method_name

pytestmark = [pytest.mark.slow, pytest.mark.browser]


KEPT_TEXT = """lane => [...lane.querySelectorAll(".given, .tok")]
    .filter(s => !["rejected", "ignored"].includes(s.dataset.kind)).map(s => s.textContent).join("")"""


def test_streamed_run_equals_the_trace(page: Page, scripts: Scripts) -> None:
    scripts.held_after = 8
    page.locator("#compare input").check()
    run(page, CODE, tokens=48)
    spans(page, 8)  # streamed: the engine waits
    scripts.gate.set()
    status(page, "done: 48 tokens")
    trace, plain = saved(page), saved(page, "ar")
    assert drawn(page) == counted(trace) and drawn(page, "ar") == counted(plain)
    assert set(drawn(page)) >= {"accepted", "correction", "plain"} and set(drawn(page, "ar")) == {"plain"}
    assert page.eval_on_selector("#lane-spec", KEPT_TEXT) == text_of(trace)
    assert page.eval_on_selector("#lane-ar", KEPT_TEXT) == text_of(plain)
    assert trace[-1]["end"] == "length" and trace[0]["recipe"]["method"] == "draft"
    figures = RunFigures.of([*trace, *plain])
    explained(page, ".tiles", lambda part: claims(figures, part, 1), figures)
    expect(page.locator("[data-kpi=memory]")).to_contain_text(re.compile(r"[MG]B"))
    expect(page.locator("[data-lane=spec] .badge")).to_have_text("other random text")


ADD_STEP = """lane => {
    lane.append(lane.querySelector(".round:last-of-type").cloneNode(true));
    return getComputedStyle(lane.lastElementChild).color;
}"""


def restyled_by_a_step(page: Page) -> int:
    devtools = page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    devtools.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    devtools.on("Tracing.tracingComplete", lambda end: ends.append(end))
    devtools.send("Tracing.start", {"traceConfig": {"includedCategories": ["devtools.timeline"]}})
    page.locator("#lane-spec").evaluate(ADD_STEP)
    devtools.send("Tracing.end")
    while not ends:
        page.evaluate("new Promise(requestAnimationFrame)")  # receives events
    devtools.detach()
    return max(event["args"]["elementCount"] for event in events if "elementCount" in event.get("args", {}))


def test_a_new_step_does_not_restyle_the_others(page: Page) -> None:
    """Rules like `:has(…) span` restyled all tokens in each frame, so that long runs became slow."""
    complete(page, CODE, tokens=128)
    counts = [restyled_by_a_step(page) for _ in range(3)]  # other parts of the page can change meanwhile
    assert 0 < max(counts) and min(counts) < 100 < drawn(page).total()


def test_beams_run_and_every_method_has_notes(page: Page) -> None:
    for method in ("ar", "beam"):
        choose_setting(page, "method", f"{method_name(method)}:")
        expect(page.locator("#about")).to_contain_text(METHODS[method].notes.split("**")[1])
    complete(page, "x = [1, 2, 3]\n" * 6, tokens=24)
    trace = saved(page)
    assert trace[0]["recipe"]["method"] == "beam" and drawn(page) == counted(trace)
    assert not page.locator(".ahead").count()  # beams have been decided
    assert all(method.notes for method in METHODS.values())


def test_preflight_shows_estimates(page: Page) -> None:
    estimate, before = page.locator("#estimate"), page.locator("#status").inner_text()
    set_number(page, "max-tokens", 8)
    page.locator("#preflight").click()
    advice = re.compile(r"Will it pay off\? (Gamma [1-8]: about|Don't).*speed of AR decoding")
    expect(estimate).to_contain_text(advice)
    trial = "Trial texts: 1 decoded with draft, temperature 0.5, top-p 0.95 (this prompt), first "
    expect(estimate).to_contain_text(trial)
    expect(estimate).to_contain_text(re.compile(r"first [1-8] tokens\. \d+ % of the checked guesses"))
    expect(estimate.locator("tbody tr")).to_have_count(8)
    expect(page.locator("#estimate-progress progress")).to_have_count(0)
    assert estimate.locator("td").first.evaluate("cell => getComputedStyle(cell).borderLeftWidth") == "0px"  # no grid
    update = page.locator("#update-estimate")
    expect(update).to_be_hidden()
    set_number(page, "temperature", 0.7)  # the prediction is out of date
    expect(update).to_be_visible()
    assert not grave(page, "#estimate", "#outdated-estimate")
    update.click()
    expect(estimate).to_contain_text("temperature 0.7")
    expect(update).to_be_hidden()
    choose_setting(page, "method", "tree:")
    page.locator("#preflight").click()
    expect(estimate).to_contain_text("1 decoded with tree, temperature 0.7")
    expect(estimate.locator("tbody tr")).to_have_count(1)
    choose_setting(page, "method", "beam:")
    page.locator("#preflight").click()
    expect(estimate).to_contain_text("preflight supports the methods draft, eagle, medusa, block, n-grams (nasd)")
    expect(page.locator("#status")).to_have_text(before)
    page.locator("#reset").click()
    expect(estimate).to_be_empty()


@pytest.mark.parametrize("prompt", ["endless", CODE])
def test_stop_ends_a_run_without_the_events_of_gradio_and_keeps_its_steps(
    tab: Any, scripts: Scripts, served: Any, prompt: str
) -> None:
    scripts.held_after = 5  # the real engine waits in a step
    page = tab()
    page.route("**/queue/data*", lambda route: None)
    run(page, prompt, tokens=1024)
    spans(page, 5)
    page.locator("#stop").click()
    if prompt == CODE:
        status(page, "stopping")
    scripts.gate.set()
    assert scripts.closed.wait(PATIENCE)  # the generator stops, not only its output
    assert scripts.closed_in == "device"
    steps = scripts.steps
    status(page, "stopped")
    assert served.worker.active == 0 and scripts.steps == steps
    trace = saved(page)
    assert trace[-1]["end"] == "cancelled" and drawn(page) == counted(trace)
    assert prompt == CODE or len(trace) == steps + 3  # header, end, and the step that was just being handed out


def test_invalid_input_and_engine_errors_are_shown_and_the_page_works_on(page: Page) -> None:
    open_group(page, "Advanced settings", "Sampling")
    page.locator("#seed input").fill("7")
    run(page, "")
    status(page, "failed: .*prompt is empty")
    expect(page.locator("#headline")).to_be_empty()
    run(page, "x" * (MOST_CHARACTERS + 1))
    status(page, f"failed: the prompt has {MOST_CHARACTERS + 1:,} characters")
    page.locator("#seed input").fill("")
    run(page, CODE)
    status(page, "failed: seed must be a number, not empty")
    expect(page.locator("#prompt textarea")).to_have_value(CODE)
    expect(page.get_by_text("seed must be a number, not empty").nth(1)).to_be_visible()  # the toast
    messages, button = (page.locator(part).bounding_box() for part in (".toast-wrap", "#run"))
    assert messages and button and button["y"] + button["height"] < messages["y"]
    page.locator("#seed input").fill("7")
    set_number(page, "gamma", 999_999)  # not clamped in silence
    run(page, CODE)
    status(page, "failed: gamma must be from 1 to 64, not 999999")
    expect(page.locator("#gamma input[type=number]")).to_have_value("999999")
    set_number(page, "gamma", 3)
    run(page, "refused")
    status(page, "failed: unknown method <img")
    expect(page.get_by_text("unknown method").nth(1)).to_be_visible()  # the toast
    assert page.locator("img[src=x]").count() == 0 and page.evaluate("window.harmed") is None
    run(page, "broken")
    status(page, "failed: RuntimeError: the device ran out of memory")
    assert saved(page)[-1]["end"] == "error"
    complete(page, CODE, tokens=8)
    assert saved(page)[0]["recipe"]["seed"] == 7


DROP_FRAMES = """() => {
    const parse = JSON.parse, dropped = (window.dropped = []);
    let n = 0;
    JSON.parse = (text, ...more) => {
        const mine = typeof text === "string" && text.startsWith('{"run":');
        if (mine && ++n % 3 === 0) { dropped.push(n); return null; }
        return parse(text, ...more);
    };
    window.dropNoFrames = () => { JSON.parse = parse; };
}"""


def test_lost_frames_are_requested_again(page: Page) -> None:
    page.evaluate(DROP_FRAMES)
    run(page, "endless")
    spans(page, 150)
    page.wait_for_function("window.dropped.length > 2")
    stop(page)
    page.evaluate("window.dropNoFrames()")
    assert len(page.evaluate("window.dropped")) > 2
    assert drawn(page) == counted(saved(page))


FOCUSED = "document.activeElement.closest('[id]')?.id ?? document.activeElement.tagName"


def test_keyboard_operation(page: Page, scripts: Scripts) -> None:
    assert page.evaluate("document.querySelector('#skip, #settings, #examples').id") == "skip"
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUSED) == "prompt"
    page.evaluate("document.getElementById('more-settings').open = false")
    page.locator("#examples .chip").first.focus()  # a stop of the toolbar is its last one
    page.locator("#skip").focus()
    stops = ["skip"]
    while stops[-1] != "prompt" and len(stops) < 8:
        page.keyboard.press("Tab")
        stops.append(page.evaluate(FOCUSED))
    assert stops == ["skip", "pair", "method", "gamma", "temperature", "more-settings", "examples", "prompt"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#examples .chip >> nth=1")).to_be_focused()
    page.locator("#prompt textarea").focus()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("endless")
    page.keyboard.press("Control+Enter")
    spans(page, 12)
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "true")
    page.locator("#compare input").check()
    page.locator("#compare input").press("Control+Enter")  # no second run, and the box stays checked
    expect(page.locator("#compare input")).to_be_checked()
    page.keyboard.press("Escape")
    status(page, "stopped")
    assert scripts.closed.wait(PATIENCE)
    page.locator("#lane-spec").focus()
    tip = page.locator("#tip")
    for kind, words in (("accepted", "kept"), ("rejected", "rejected"), ("ignored", "thrown away")):
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tok:focus")).to_have_attribute("data-kind", kind)
        expect(page.locator(".tok:focus")).to_have_attribute("aria-describedby", "tip")
        expect(tip.locator("strong")).to_have_text(words)
    expect(tip).to_contain_text("Thrown away: an earlier guess was rejected.")
    page.keyboard.press("Home")
    expect(tip).to_contain_text("Accepted: it is the large model's most probable token")
    page.locator("#lane-spec").hover(position={"x": 4, "y": 4})  # no token is below the pointer
    expect(page.locator(".tok:focus")).to_have_attribute("aria-describedby", "tip")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    for part in ("#gamma input[type=range]", "#compare input"):
        page.locator(part).focus()
        assert page.locator(part).evaluate("part => getComputedStyle(part).outlineStyle") == "solid"
    assert page.locator("#compare").evaluate("part => getComputedStyle(part).overflow") == "visible"
    page.locator("#show-rejected").focus()
    page.keyboard.press("Space")
    expect(page.locator("#lane-spec [data-kind=rejected]").first).to_be_hidden()


RIGHT_EDGE = "part => part.getBoundingClientRect().right"


def test_layout_of_narrow_and_wide_pages(page: Page) -> None:
    resize(page, 390)
    page.locator("#details summary").click()
    run(page, "hostile")  # fails if the sidebar covers the button
    status(page, "done")
    for width in (360, 390, 1920):
        resize(page, width)
        expect_fit(page)
        assert page.eval_on_selector_all(".tile .note", "notes => notes.every(n => n.scrollWidth <= n.clientWidth)")
        text = page.locator("#compare label span").last.bounding_box()
        assert text and text["x"] + text["width"] <= page.locator("#compare").evaluate(RIGHT_EDGE)
        boxes = [page.locator(f"[data-kpi={kpi}]").bounding_box() for kpi in ("acceptance", "memory", "speedup")]
        assert all(box and 0 <= box["x"] and box["x"] + box["width"] <= width for box in boxes)


def test_api_streams_the_trace(served: Any) -> None:
    client = gradio_client.Client(served.url, verbose=False)
    values = {"temperature": 0.0, "max_tokens": 12, "gamma": 2}
    job = client.submit(CODE, **values, api_name="/generate")
    lines = [json.loads(line) for line in job]
    assert "specdemo" in lines[0] and "end" in lines[-1]
    assert [line["i"] for line in lines[1:-1]] == list(range(len(lines) - 2))
    recipe = Recipe(pair="bundled", **values)
    again = list(trace_lines(recipe, CODE))
    committed = [[token for line in trace if "i" in line for token in line["tokens"]] for trace in (lines, again)]
    assert committed[0] == committed[1] and len(committed[0]) == 12
    with pytest.raises(Exception, match="gamma must be"):
        client.predict(CODE, gamma=0, api_name="/generate")
    with pytest.raises(Exception, match="prompt is empty"):
        client.predict("", api_name="/generate")
    estimate = client.predict(method="nasd", temperature=1, max_tokens=8, api_name="/preflight")
    assert estimate["advice"] and len(estimate["estimates"]) == 8 and estimate["c"] < 0.2
    with pytest.raises(Exception, match="preflight supports"):
        client.predict(method="beam", api_name="/preflight")


def test_cancelled_api_job_ends_the_run(served: Any, scripts: Scripts) -> None:
    scripts.reset()
    client = gradio_client.Client(served.url, verbose=False)
    job = client.submit("endless", api_name="/generate")
    assert "specdemo" in json.loads(next(job))
    assert job.cancel()
    assert scripts.closed.wait(PATIENCE) and scripts.closed_in == "device"


def test_a_quantised_copy_is_chosen_with_the_keyboard(page: Page) -> None:
    source = page.locator("#draft-model option:checked")
    expect(source).to_have_text("the pair's own")
    open_group(page, MORE)
    page.locator("#draft-model select").focus()
    copies = page.locator("#draft-model option").all_text_contents()
    for _ in range(copies.index("this model in int8") - copies.index("the pair's own")):
        page.keyboard.press("ArrowDown")
    expect(source).to_have_text("this model in int8")
    expect(page.locator("#drafter input")).to_have_value("same")
    complete(page, CODE, tokens=9)
    recipe = saved(page)[0]["recipe"]
    assert (recipe["drafter"], recipe["drafter_quantization"], recipe["method"]) == ("same", "int8", "draft")
    page.locator("#keep-copy").click()
    expect(page.locator("#kept-lanes")).to_contain_text("large model alone, in int8")
    page.locator("#drop-lanes").click()
    page.locator("#reset").click()
    expect(source).to_have_text("the pair's own")


def test_models_are_unloaded_on_request(page: Page) -> None:
    complete(page, CODE, tokens=8)
    open_group(page, "Advanced settings", "Models and devices")
    page.locator("#unload").click()
    expect(page.get_by_text(re.compile("of weights unloaded"))).to_be_visible()


def test_the_table_lists_drafters_reasons_and_the_advice(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(fit, "model_directories", lambda: [("LM Studio", tmp_path)])
    monkeypatch.setattr(fit, "TEXTS", 1)
    monkeypatch.setattr(fit, "DRAFTLESS", ("nasd",))
    table = page.locator("#fit-table")
    expect(page.locator("#fit")).to_be_hidden()
    set_number(page, "max-tokens", 8)
    open_group(page, "Advanced settings", "Models and devices")
    page.locator("#find-drafter").click()
    expect(page.locator("#fit-stop")).to_be_visible()
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(page.locator("#fit-stop")).to_be_hidden()
    expect(page.locator("#fit-status")).to_contain_text("done: 2 of 2 candidates are measured")
    expect(table.locator("p").first).to_contain_text(re.compile("Choose .*speed of AR decoding|Do not speculate"))
    measured = table.locator("tbody tr", has_text="pair/drafter")
    expect(measured).to_contain_text(re.compile(r"yes.*MB.*%.*v\(\d\) \d.*\d\.\d+ \[\d\.\d+, \d\.\d+\]", re.S))
    expect(table.locator("tbody tr").last).to_contain_text(re.compile(r"broken\.gguf\s*no\s*–"))
    expect(table.locator("li", has_text="broken.gguf")).to_contain_text("not a usable GGUF file")
    expect(table.locator("li", has_text="pair/drafter")).to_contain_text("specdemo run PROMPT --target")
    assert not grave(page, "#fit", "#settings")


COUNT_FRAMES = """const request = window.requestAnimationFrame;
window.requested = 0;
window.requestAnimationFrame = (callback) => { window.requested += 1; return request(callback); };
window.restsIn = async (frames) => {
    for (let i = 0; i < frames; i++) {
        const before = window.requested;
        await new Promise(request);
        await new Promise(request);
        if (window.requested === before) return true;
    }
    return false;
};"""


@pytest.mark.exhaustive
def test_the_first_visit_transfers_half_a_megabyte_and_an_idle_page_requests_no_frames(
    served: Any, chromium: Any
) -> None:
    """Gradio's loading indicator requested a frame in each frame, also when it was gone."""
    page = chromium.new_page()
    network = chromium.new_cdp_session(page)
    sizes: list[float] = []
    network.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    network.send("Network.enable")
    network.send("Network.setCacheDisabled", {"cacheDisabled": True})  # other tests need the cache
    page.add_init_script(COUNT_FRAMES)
    page.goto(served.url)
    expect(page.locator("body")).to_have_attribute("data-shown", "yes")
    assert 100_000 < sum(sizes) <= 580_000
    for path in ("", "lessons"):
        if path:
            page.goto(served.url + path)
        expect(page.locator("#lessons .choice, #lane-spec").first).to_be_visible()
        assert page.evaluate("restsIn(600)")
        assert page.evaluate("document.getAnimations().every(animation => animation.playState === 'finished')")
    page.close()
