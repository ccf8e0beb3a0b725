"""Tabs of a first visit; Bench and Memory tabs, with the bundled pair on a few prompts; logs of other engines, and a
server as a lane.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.engine_server import engine_server, llama_events
from fakes.traces import tokens_of
from playwright.sync_api import Page, Route, expect

from benchmarks.document_tables import recorded_logs
from e2e.page_fixtures import (
    CODE,
    PATIENCE,
    complete,
    configure,
    expect_fit,
    expect_grid,
    exported,
    grave,
    resize,
    saved,
    set_number,
)
from specdemo.bench import measure, table
from specdemo.bench.measure import BenchProgress
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import QUANTIZATIONS
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe
from specdemo.ui import service
from specdemo.ui.tabs.bench import SWEEP_TABLE_HEAD, sweep_cells

pytestmark = [pytest.mark.slow, pytest.mark.browser]


class MeasureRecorder:
    """Wrapper of `measure.measure` that records its results for comparison with the page."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.recipes: Any = ()
        self.records: list[dict[str, Any]] = []
        self.held_after: int | None = None  # records after which it repeats its progress until it is stopped

    def __call__(self, recipes: Any, prompts: Any, pool: Any) -> Iterator[Any]:
        self.recipes, self.records = recipes, []
        self.finished.clear()
        try:
            for item in measure.measure(recipes, prompts, pool):
                if isinstance(item, dict):
                    self.records.append(item)
                yield item
                while self.held_after is not None and len(self.records) >= self.held_after:
                    for _ in measure.measure(recipes, prompts, pool):  # takes time
                        yield BenchProgress(5, 36, "code 2, draft")
        finally:
            self.finished.set()


@pytest.fixture(scope="module")
def measured() -> Iterator[MeasureRecorder]:
    recorder = MeasureRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "measure", recorder)
        yield recorder


@pytest.fixture
def at(new_tab: Page, measured: MeasureRecorder) -> Callable[[str], Page]:
    """Show a tab of the page."""

    def show(name: str) -> Page:
        resize(new_tab, 1280)
        new_tab.bring_to_front()  # Chromium draws hidden tabs rarely
        new_tab.get_by_role("tab", name=name).click()
        return new_tab

    return show


def choose(page: Page, each: int, tokens: int, kinds: tuple[str, ...] = ("code", "adversarial")) -> None:
    """Choose a small grid: methods draft and nasd on the first prompts of some classes."""
    for kind in ("code", "repetitive", "prose", "adversarial"):
        page.locator("#bench-kinds").get_by_label(kind).set_checked(kind in kinds)
    set_number(page, "bench-each", each)
    set_number(page, "bench-max-tokens", tokens)


def expect_status(page: Page, pattern: str) -> None:
    expect(page.locator("#bench-status p")).to_contain_text(re.compile(pattern), timeout=PATIENCE * 1000)


def test_tabs_of_a_first_visit_have_no_run(at: Callable[[str], Page]) -> None:
    for name, part in {"Memory": "#memory-run", "Edge-cloud": "#edge-run", "Theory": "#theory-run"}.items():
        page = at(name)
        expect(page.locator(part)).to_contain_text("No run available")
        expect(page.locator("#edge-first")).to_be_hidden()  # no empty headings, tables and sliders
    expect(page.locator('.curves .dot[fill="var(--dot-set)"]')).to_have_count(6)
    expect(page.locator('.curves .dot[fill="var(--dot-run)"]')).to_have_count(0)
    page.locator("#theory-set").click()
    expect(page.get_by_text("No run available").nth(1)).to_be_visible()
    for name, document in {"Edge-cloud": "edge-cloud", "Bench": "performance"}.items():
        expect(at(name).locator(f"a[href='documentation/{document}']")).to_be_visible()
        links = page.locator("main a[href]:not([target=_blank], #skip):visible")
        expect(links).to_have_count(0)  # Back would lose the run


def test_size_follows_the_last_change_despite_late_responses(at: Callable[[str], Page]) -> None:
    page = at("Bench")
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 12 prompts = 36 runs of at most 64 tokens")
    delayed: list[Route] = []
    page.route("**/run/predict*", lambda route: delayed.append(route), times=1)
    with page.expect_request("**/run/predict*"):
        set_number(page, "bench-each", 5)
    set_number(page, "bench-max-tokens", 128)
    delayed[0].continue_()
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 20 prompts = 60 runs of at most 128 tokens")


def test_oversized_and_empty_grids_are_rejected(at: Callable[[str], Page], served: Any) -> None:
    page = at("Bench")
    choose(page, each=24, tokens=256, kinds=("code", "repetitive", "adversarial"))
    expect(page.locator("#bench-size")).to_contain_text("192 runs of at most 256 tokens")
    page.locator("#bench-run").click()
    expect_status(page, "^3 recipes × 64 prompts = 192 runs .* about 8 minutes .* measures at most 240 runs")
    choose(page, each=1, tokens=8, kinds=())
    page.locator("#bench-run").click()
    expect_status(page, "^choose at least one class of prompts$")
    expect(page.locator("#bench-size")).to_contain_text("choose at least one class of prompts")
    assert served.worker.active == 0
    expect(page.locator("#bench-table")).to_be_hidden()


NOTE_PRESSED = """() => {
    HTMLElement.prototype.click = function () { (window.pressed ??= []).push(this.id || this.className); };
}"""


def test_memory_tab_shows_the_trace_when_selected(at: Callable[[str], Page]) -> None:
    page = at("Memory")
    page.evaluate(NOTE_PRESSED)
    latest = page.locator("#memory-run")
    expect(page.locator("#memory-machine")).to_contain_text("system, available")
    expect(page.locator("#memory-pairs tbody tr")).to_have_count(len(QUANTIZATIONS) + len(PAIRS) - 1)
    expect(page.locator("#memory-pairs tbody tr").first).to_contain_text("yes")
    set_number(page, "max-tokens", 24)
    page.locator("#prompt textarea").fill("def f(x):\n")
    page.locator("#run").click()
    expect(page.locator("#status")).to_have_text(re.compile("^done"), timeout=PATIENCE * 1000)
    expect(latest).to_contain_text("weights of the target")
    resize(page, 390)
    resize(page, 1280)  # closes and opens the settings
    assert page.evaluate("window.pressed") is None  # the script presses no button
    page.get_by_role("tab", name="Method").click()
    expect(latest).to_be_hidden()
    page.get_by_role("tab", name="Memory").click()
    expect(latest).to_contain_text("process, peak")
    with page.expect_response("**/run/predict"):
        page.locator("#memory-refresh").click()


def test_table_matches_the_bench(at: Callable[[str], Page], measured: MeasureRecorder, served: Any) -> None:
    page = at("Bench")
    choose(page, each=2, tokens=8)
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 4 prompts = 12 runs of at most 8 tokens")
    page.locator("#bench-run").click()
    expect_status(page, r"^done: 4 of 4 prompts are measured$")
    rows = table.table(measured.recipes, measured.records)
    assert len(rows) == 6
    expect_grid(page, "bench-table", sweep_cells(rows))
    expect(page.locator("#bench-table").get_by_role("columnheader")).to_contain_text(list(SWEEP_TABLE_HEAD))
    lanes = dict.fromkeys(row.lane for row in rows)
    assert lanes.keys() == {"ar T=0", "draft gamma=3 T=0", "nasd gamma=3 T=0"}
    assert all(row.same_text == 2 for row in rows if row.speedup)  # real greedy texts
    for row in rows:
        if row.slower:
            expect(page.locator("#bench-notes")).to_contain_text(row.slower[0])
    assert json.loads(exported(page, page.locator("#bench-jsonl"))) == json.loads(table.as_json(rows))
    report = exported(page, page.locator("#bench-md"))
    assert table.markdown(rows) in report and "Partial" not in report
    by_lane = sorted((row for row in rows if row.speedup), key=lambda row: [*lanes].index(row.lane))
    expect(page.locator("#bench-map td")).to_have_text([table.speedup_text(row) for row in by_lane])
    assert table.map_markdown(rows) in report
    expect(page.locator("#bench-plot .bar").first).to_be_visible()
    expect(page.locator("#bench-positions path.line").first).to_be_visible()
    page.get_by_role("button", name="Acceptance by position, length of the text and confidence").click()
    expect(page.locator("#bench-acceptance table").first).to_contain_text(" of ")
    assert not grave(page, "#tabs", schemes=("light",))
    choose(page, each=1, tokens=8, kinds=("code",))
    page.locator("#bench-pairs-run").click()
    status = page.locator("#bench-pairs-status p")
    expect(status).to_have_text("done: 1 of 1 pairs are measured", timeout=PATIENCE * 1000)
    measured_pair = page.locator("#bench-pairs-table table").first.locator("tbody tr")
    expect(measured_pair.locator("td:first-child")).to_have_text(["bundled", "bundled"])
    expect(measured_pair.locator("td:nth-child(2)")).to_have_text(["draft gamma=3", "n-grams (nasd) gamma=3"])
    assert served.worker.active == 0


def test_stop_shows_partial_results_and_frees_the_worker_as_does_leaving_the_page(
    at: Callable[[str], Page], measured: MeasureRecorder, served: Any
) -> None:
    measured.held_after = 1
    page = at("Bench")
    resize(page, 390)  # a narrow page puts the tabs in a menu
    choose(page, each=12, tokens=16, kinds=("code",))
    page.locator("#bench-run").click()
    expect_status(page, "^5 of 36: code 2, draft")
    expect(page.locator("#bench-run")).to_be_disabled()
    page.locator("#bench-stop").click()
    expect_status(page, r"^stopped: \d+ of 12 prompts are measured$")
    assert served.worker.active == 0 and len(measured.records) == 1
    rows = table.table(measured.recipes, measured.records)
    expect_grid(page, "bench-table", sweep_cells(rows))
    assert json.loads(exported(page, page.locator("#bench-jsonl"))) == json.loads(table.as_json(rows))
    report = exported(page, page.locator("#bench-md"))
    assert "**Partial**: stopped after 1 of 12 prompts" in report
    expect_fit(page)
    expect(page.locator("#bench-run")).to_be_enabled()
    expect(page.locator("#bench-stop")).to_be_disabled()
    measured.held_after = 0
    page.locator("#bench-run").click()
    expect_status(page, "^5 of 36")
    assert not measured.finished.is_set()
    page.goto("about:blank")  # also ends it
    assert measured.finished.wait(PATIENCE)


DROP = """([field, text]) => {
    const files = new DataTransfer();
    files.items.add(new File([text], "engine.log", { type: "text/plain" }));
    field.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
}"""


def explained(page: Page, sentence: str) -> None:
    page.locator("#engine-explain").click()
    expect(page.locator("#engine-diagnosis")).to_contain_text(sentence)


def test_logs_are_explained_as_in_the_terminal(page: Page) -> None:
    page.get_by_role("tab", name="Explain logs").click()
    field = page.locator("#engine-log textarea")
    explained(page, "the field is empty")
    field.fill("nothing")
    explained(page, "transformers reports no acceptance")
    charts = page.locator("#engine-positions svg, #engine-costs svg")
    expect(charts.filter(visible=True)).to_have_count(0)
    logs = recorded_logs()
    window = logs["vllm-window.log"]
    page.evaluate(DROP, [field.element_handle(), window])
    expect(field).to_have_value(window)
    explained(page, "Acceptance falls to 0 after position 5")
    expect(page.locator("#engine-diagnosis")).to_contain_text("vLLM: 89 of 975 drafted tokens accepted (9 %)")
    expect(page.locator("#engine-positions .bar").first).to_be_visible()
    expect(page.locator("#engine-costs path.line").first).to_be_visible()
    with page.expect_file_chooser() as chooser:
        page.locator("#engine-open").click()
    eagle3 = logs["llama-eagle3.log"].encode()
    chooser.value.set_files({"name": "eagle3.log", "mimeType": "text/plain", "buffer": eagle3})
    expect(field).to_have_value(re.compile("draft acceptance"))
    page.locator("#engine-ar input").fill("150")
    explained(page, "slower than 150 without drafts")
    expect(page.locator("#engine-diagnosis tr", has_text="transformers")).to_contain_text("0.79 (accepted / tested)")
    assert not grave(page, "#engine-log", "#engine-ar", "#engine-diagnosis")
    field.fill("nothing")
    explained(page, "transformers reports no acceptance")
    expect(charts.filter(visible=True)).to_have_count(0)


def test_a_server_is_a_lane_that_shows_what_it_does_not_report(page: Page) -> None:
    recipe = Recipe(pair="bundled", method="ar", temperature=0.0, top_p=1.0, max_tokens=12)
    tokens = tokens_of(generate(recipe, CODE, ModelPool()))
    with engine_server() as server:
        server.events = llama_events(tokens, 2)
        configure(page, external=server.external, temperature=0, top_p=1, max_tokens=12, compare=True)
        complete(page, CODE)
    box = page.locator("[data-lane=third]")
    expect(box.locator(".title")).to_have_text(f"llama.cpp at {server.url.removeprefix('http://')}")
    expect(box.locator(".badge")).to_have_text("reported by engine, same text")
    expect(box.locator(".undisclosed").first).to_have_text("+1")
    expect(box.locator(".undisclosed").first).to_have_attribute("title", "+1, not reported by the engine")
    trace = saved(page, "third")
    assert trace[1]["draft_s"] is None and [line["undisclosed"] for line in trace[1:-1]] == [0, 1, 1, 1, 1]
    box.locator(".tok[data-kind=accepted]").first.click()
    expect(page.locator("#round-times")).to_contain_text("does not report the durations")
    expect(page.locator("#round-words")).to_contain_text("1 guess not reported by the engine")
