"""The Bench and the Memory tab in a real browser, with the bundled pair on a few prompts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from e2e.page_fixtures import PATIENCE, set_number
from specdemo import bench
from specdemo.models.spec import QUANTIZATIONS
from specdemo.models.zoo import PAIRS
from specdemo.ui import service
from specdemo.ui.page import build, launch_options
from specdemo.ui.sweep import HEADERS, cells


class Listener:
    """The bench's own `measure`; what it handed out is kept, to be compared with what the page shows."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.recipes: Any = ()
        self.records: list[dict[str, Any]] = []

    def __call__(self, recipes: Any, prompts: Any, pool: Any) -> Iterator[Any]:
        self.recipes, self.records = recipes, []
        self.over.clear()
        try:
            for item in bench.measure(recipes, prompts, pool):
                if isinstance(item, dict):
                    self.records.append(item)
                yield item
        finally:
            self.over.set()


@pytest.fixture(scope="module")
def measured() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def served(measured: Listener) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "measure", measured)
        demo = build()
        _, demo.url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **launch_options(demo))
        yield demo
        demo.worker.close()
        demo.close()


@pytest.fixture
def tab(tab: Any) -> Any:
    """Opens the page with one of its tabs in front."""

    def open_tab(name: str) -> Page:
        page = tab()
        page.get_by_role("tab", name=name).click()
        return page

    return open_tab


def ask(page: Page, each: int, tokens: int, kinds: tuple[str, ...] = ("code", "adversarial")) -> None:
    """A small grid: drafting by the model and by n-grams on the first prompts of some classes."""
    for kind in ("code", "repetitive", "prose", "adversarial"):
        page.locator("#bench-kinds").get_by_label(kind).set_checked(kind in kinds)
    set_number(page, "bench-each", each)
    set_number(page, "bench-max-tokens", tokens)


def says(page: Page, words: str) -> None:
    expect(page.locator("#bench-status p")).to_contain_text(re.compile(words), timeout=PATIENCE * 1000)


def table(page: Page) -> list[list[str]]:
    """Headers and rows; gradio draws them as a grid of its own."""
    grid = page.locator("#bench-table").get_by_role("row")
    expect(page.locator("#bench-table").get_by_role("gridcell").first).to_be_visible(timeout=PATIENCE * 1000)
    heads = page.locator("#bench-table").get_by_role("columnheader").all_inner_texts()
    rows = [row.get_by_role("gridcell").all_inner_texts() for row in grid.all()]
    return [[text.strip() for text in row] for row in (heads, *rows) if row]


def saved(page: Page, button: str) -> str:
    with page.expect_download() as download:
        page.locator(button).click()
    return Path(download.value.path()).read_text("utf-8")


def test_the_table_on_the_page_is_the_benchs_own(tab: Any, measured: Listener, served: Any) -> None:
    page = tab("Bench")
    ask(page, each=2, tokens=16)
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 4 prompts = 12 runs of at most 16 tokens")
    page.locator("#bench-run").click()
    says(page, r"^done: 12 runs on 4 prompts$")
    rows = bench.table(measured.recipes, measured.records)
    assert table(page) == [list(HEADERS), *cells(rows)] and len(rows) == 6
    assert {row.lane for row in rows} == {"ar T=0", "draft gamma=3 T=0", "nasd gamma=3 T=0"}
    assert all(row.same_text == 2 for row in rows if row.speedup)  # real greedy texts
    for row in rows:
        if row.slower:
            expect(page.locator("#bench-notes")).to_contain_text(row.slower[0])
    assert json.loads(saved(page, "#bench-jsonl")) == json.loads(bench.as_json(rows))
    report = saved(page, "#bench-md")
    assert bench.markdown(rows) in report and "Partial" not in report
    expect(page.locator("#bench-plot canvas, #bench-plot svg").first).to_be_visible()
    assert served.worker.active == 0


def test_stop_leaves_a_part_and_a_free_worker(tab: Any, measured: Listener, served: Any) -> None:
    page = tab("Bench")
    page.get_by_role("button", name="Toggle Sidebar").click()
    page.set_viewport_size({"width": 390, "height": 900})  # where the tabs themselves are in a menu
    ask(page, each=4, tokens=128, kinds=("code",))
    page.locator("#bench-run").click()
    says(page, r"^([4-9]|10) of 12: code [234], ")
    expect(page.locator("#bench-run")).to_be_disabled()
    page.locator("#bench-stop").click()
    says(page, "^stopped: partial, [123] of 4 prompts are measured$")
    assert served.worker.active == 0 and 1 <= len(measured.records) < 4
    rows = bench.table(measured.recipes, measured.records)
    assert table(page) == [list(HEADERS), *cells(rows)]
    assert json.loads(saved(page, "#bench-jsonl")) == json.loads(bench.as_json(rows))
    assert f"**Partial**: stopped after {len(measured.records)} of 4 prompts" in saved(page, "#bench-md")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator("#bench-run")).to_be_enabled()
    expect(page.locator("#bench-stop")).to_be_disabled()


def test_a_browser_that_goes_away_ends_the_bench(tab: Any, measured: Listener) -> None:
    page = tab("Bench")
    ask(page, each=4, tokens=128, kinds=("code",))
    page.locator("#bench-run").click()
    says(page, "^[1-4] of 12")
    assert not measured.over.is_set()
    page.goto("about:blank")
    assert measured.over.wait(PATIENCE) and len(measured.records) < 4


def test_too_much_or_nothing_is_refused_in_words(tab: Any, served: Any) -> None:
    page = tab("Bench")
    ask(page, each=24, tokens=256, kinds=("code", "repetitive", "adversarial"))
    expect(page.locator("#bench-size")).to_contain_text("192 runs of at most 256 tokens")
    page.locator("#bench-run").click()
    says(page, "^3 recipes × 64 prompts = 192 runs .* about 8 minutes .* too much for the page")
    ask(page, each=1, tokens=8, kinds=())
    page.locator("#bench-run").click()
    says(page, "^choose at least one class of prompts$")
    expect(page.locator("#bench-size")).to_contain_text("choose at least one class of prompts")
    assert served.worker.active == 0
    expect(page.locator("#bench-table")).to_be_hidden()


def test_the_size_is_of_the_last_change_however_late_answers_come(tab: Any) -> None:
    page = tab("Bench")
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 12 prompts = 36 runs of at most 64 tokens")
    held: list[Route] = []
    page.route("**/run/predict*", lambda route: held.append(route), times=1)
    with page.expect_request("**/run/predict*"):
        set_number(page, "bench-each", 5)
    set_number(page, "bench-max-tokens", 128)
    held[0].continue_()
    expect(page.locator("#bench-size")).to_contain_text("3 recipes × 20 prompts = 60 runs of at most 128 tokens")


def test_memory_is_told_from_the_trace_when_it_is_looked_at(tab: Any) -> None:
    page = tab("Memory")
    told = page.locator("#memory-run")
    expect(told).to_contain_text("No run available")
    expect(page.locator("#memory-machine")).to_contain_text("system, available")
    expect(page.locator("#memory-pairs tbody tr")).to_have_count(len(QUANTIZATIONS) + len(PAIRS) - 1)
    expect(page.locator("#memory-pairs tbody tr").first).to_contain_text("yes")
    set_number(page, "max-tokens", 24)
    page.locator("#prompt textarea").fill("def f(x):\n")
    page.locator("#run").click()
    expect(page.locator("#status")).to_have_text(re.compile("^done"), timeout=PATIENCE * 1000)
    page.locator("#memory-refresh").click()
    expect(told).to_contain_text("weights of the target")
    trace = [json.loads(line) for line in saved(page, "#trace-spec").splitlines()]
    sizes, peak = trace[0]["environment"], max(line["memory"]["kv_bytes"] for line in trace if "memory" in line)
    for what, size in (
        ("weights of the target", sizes["target_bytes"]),
        ("weights of the drafter", sizes["drafter_bytes"]),
        ("keys and values, peak", peak),
    ):
        row = told.locator("tr").filter(has_text=what)
        expect(row.locator("td")).to_have_text(f"{size / 1e6:,.1f}")
    page.get_by_role("tab", name="The method").click()
    expect(told).to_be_hidden()
    page.get_by_role("tab", name="Memory").click()
    expect(told).to_contain_text("process, peak")
