"""Other engines in a real browser: logs that are pasted, opened or dropped, and a server as a lane."""

import re

import pytest
from fakes.engine_server import engine_server, llama_events
from fakes.traces import tokens_of
from playwright.sync_api import Page, expect

from benchmarks.document_tables import recorded_logs
from e2e.page_fixtures import CODE, complete, configure, grave, saved
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.browser]

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
