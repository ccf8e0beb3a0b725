"""Edge and cloud page in a real browser: a cloud service, an emulated link, faults, refusals."""

import os
import re
import signal
from typing import Any

import pytest
from fakes.traces import jsonl
from playwright.sync_api import Page, expect

from e2e.page_fixtures import (
    CODE,
    PATIENCE,
    Scripts,
    choose_setting,
    complete,
    configure,
    drawn,
    expect_fit,
    expect_grid,
    grave,
    grid,
    open_group,
    resize,
    run,
    saved,
    set_number,
    spans,
    status,
    text_of,
)
from specdemo.core.ledger import parts
from specdemo.core.trace import read
from specdemo.models.zoo import PAIRS
from specdemo.remote.config import MODES
from specdemo.remote.local_service import ServiceProcess
from specdemo.ui.tabs import edge

pytestmark = [pytest.mark.slow, pytest.mark.browser]

STYLES = """tokens => tokens.map((token) => {
    const computed = getComputedStyle(token);
    return { style: computed.fontStyle, ground: computed.backgroundColor, fate: token.parentElement.dataset.fate };
})"""


def process(served: Any) -> ServiceProcess:
    (only,) = (service for service in served.clouds._running.values() if service.alive)
    return only


def test_remote_run_equals_the_local_run_and_its_tab_shows_the_trace(page: Page, served: Any) -> None:
    page.get_by_role("tab", name="Edge-cloud").click()
    open_group(page, "Advanced settings", "Edge and cloud")
    choose_setting(page, "mode", "speculative")
    for name, value in (("rtt-ms", 10), ("gate-ratio", 0.4)):
        page.locator(f"#{name} input").fill(f"{value}")
        page.locator(f"#{name} input").blur()
    set_number(page, "temperature", 0)
    page.locator("#compare input").check()
    complete(page, CODE, tokens=32)
    expect(page.locator("#sameness")).to_have_text("same text")
    expect(page.locator("[data-lane=spec] .title")).to_have_text(re.compile("edge and cloud$"))
    trace, plain = saved(page), saved(page, "ar")
    assert trace[0]["recipe"]["cloud"]["remote"] == process(served).url
    expect(page.locator("[data-lane=ar] .title")).to_have_text(re.compile("^cloud only"))
    expect(page.locator("#verdict")).to_contain_text("The link took part of the time: draft")
    over_link = {"mode": "cloud_only", "remote": process(served).url, "rtt_ms": 10}
    assert plain[0]["recipe"]["cloud"].items() >= over_link.items()
    texts = [[token for line in one if "i" in line for token in line["tokens"]] for one in (trace, plain)]
    assert texts[0] == texts[1] and {line["remote"]["escalated"] for line in trace if "i" in line} == {1}
    rounds = [line for line in trace if "i" in line]
    expect(page.locator("#edge-run")).to_contain_text(f"32 tokens in {len(rounds)} steps")  # also in the open tab
    steps = [event.step for event in read(jsonl(*trace))[0].steps]
    expect_grid(page, "edge-table", edge.step_measurements(steps))
    shown = grid(page, "edge-table")
    assert len(shown) > 5 and shown[0][8] == f"{sum(line['remote']['bytes_up'] for line in rounds):.0f}"
    passes = sum(what == "verify" for some in parts(steps)[:12] for what, *_ in some)
    assert passes > 3  # the full duration of a step that was sent again may be shown as a wait
    expect(page.locator("#edge-timeline rect.verify")).to_have_count(passes)
    expect(page.locator("#edge-best")).to_contain_text("The best k is")
    expect(page.locator('#edge-plot .dot[fill="var(--dot-run)"]')).to_have_count(1)


def test_unreachable_service_is_reported_and_the_next_run_works(page: Page) -> None:
    configure(page, mode="speculative", remote="http://127.0.0.1:1", lost_after_s=1, max_tokens=8)
    run(page, CODE)
    status(page, r"failed: there is no service at http://127.0.0.1:1 \(.*\): start one with serve$")
    open_group(page, "Advanced settings", "Edge and cloud")
    expect(page.locator("#remote textarea, #remote input")).to_have_value("http://127.0.0.1:1")
    page.evaluate("new Promise((at_rest) => requestAnimationFrame(() => requestAnimationFrame(at_rest)))")
    page.locator("#remote input, #remote textarea").fill("")
    page.locator("#run").click()
    status(page, "done: 8 tokens")


def test_provisional_tokens_are_italic_until_confirmed(page: Page) -> None:
    configure(page, mode="speculative", rtt_ms=60, deadline_ms=20, provisional=True, temperature=0)
    complete(page, CODE, tokens=24)
    expect(page.locator("[data-lane=spec] .badge")).to_have_text("lossy")
    notes = [line["remote"] for line in saved(page) if "i" in line]
    fates = {fate: sum(int(one.get(fate, 0)) for one in notes) for fate in ("confirmed", "overruled")}
    assert (
        sum(one.get("provisional", 0) for one in notes) == page.locator("#lane-spec [data-by=provisional]").count() > 2
    )
    assert fates["confirmed"] + fates["overruled"] > 0
    for fate, count in fates.items():
        expect(page.locator(f"#lane-spec [data-fate={fate}]")).to_have_count(count)
    expect(page.locator("[data-legend=unseen]")).to_be_visible()
    styles = page.eval_on_selector_all("#lane-spec [data-fate] .tok[data-kind=unverified]", STYLES)
    assert {style["style"] for style in styles} == {"italic"}
    by_fate = {fate: {style["ground"] for style in styles if style["fate"] == fate} for fate in fates if fates[fate]}
    assert all(len(grounds) == 1 for grounds in by_fate.values()) and len(set(map(str, by_fate.values()))) == len(
        by_fate
    )
    page.locator("#recorded button").first.click()
    expect(page.locator("[data-legend=unseen]")).to_be_hidden()


def test_lost_connection_is_noted_and_stop_needs_no_response(page: Page, served: Any, scripts: Scripts) -> None:
    configure(page, mode="speculative", on_loss="edge", lost_after_s=1, rtt_ms=20, max_tokens=48)
    scripts.held_after = 5
    run(page, CODE)
    spans(page, 5)
    os.kill(process(served).process.pid, signal.SIGSTOP)  # accepts connections but does not respond
    scripts.gate.set()
    try:
        status(page, "done: 48 tokens")
        expect(page.locator("#lane-spec .note")).to_have_text(
            "Connection to the cloud lost: the drafter continues alone."
        )
        assert page.locator("#lane-spec [data-by=alone]").count() > 0
        assert page.locator("#lane-spec .note ~ .round:not([data-by])").count() == 0
        page.locator("#reset").click()
        configure(page, mode="speculative", remote=process(served).url, deadline_ms=600000, max_tokens=32)
        run(page, CODE)
        status(page, "loading")
        page.locator("#stop").click()
        status(page, "stopped")  # otherwise it would continue until the deadline
    finally:
        os.kill(process(served).process.pid, signal.SIGCONT)
    run(page, CODE)
    status(page, "done: 32 tokens")
    assert drawn(page)["accepted"] > 0


def test_modes_are_measured_on_the_device(page: Page, served: Any) -> None:
    page.get_by_role("tab", name="Edge-cloud").click()
    set_number(page, "modes-prompts", 1)
    set_number(page, "modes-tokens", 8)
    set_number(page, "temperature", 0)
    page.locator("#modes-run").click()
    expect(page.locator("#modes-status p")).to_have_text("done: 1 of 1 prompts are measured")
    rows = {row[0]: dict(zip(edge.MODE_TABLE_HEAD, row, strict=True)) for row in grid(page, "modes-table")}
    assert list(rows) == list(MODES)
    assert rows["edge_only"]["cloud steps"] == "0 %" and rows["edge_only"]["up kB"] == "0.0"
    assert rows["cloud_only"]["speed-up"] == "1.00×" and rows["speculative"]["cloud steps"] == "100 %"
    set_number(page, "modes-prompts", 12)
    set_number(page, "modes-tokens", 128)
    page.locator("#modes-run").click()
    expect(page.locator("#modes-status p")).to_have_text(re.compile(r"^[1-9]\d* of 36"))
    page.locator("#modes-stop").click()
    expect(page.locator("#modes-status p")).to_have_text(re.compile("^stopped"))
    assert served.worker.active == 0


def test_a_calibration_sets_the_controls_and_is_remembered_for_its_pair(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "CALIBRATION_PROMPTS", 4)
    configure(page, mode="speculative", gates=["nll"], gate_ratio=0.4, rtt_ms=10, max_tokens=8)
    open_group(page, "Advanced settings", "Edge and cloud")
    nll = page.locator("#gate-nll input[type=number]")
    default = nll.input_value()
    page.get_by_role("tab", name="Edge-cloud").click()
    page.locator("#gates-calibrate").click()
    thresholds = page.locator("#gates-thresholds")
    expect(thresholds).to_contain_text(re.compile(r"draft tokens of \d+ texts"))
    measured = re.search(r"--gate-nll ([\d.]+)", thresholds.inner_text()).group(1)
    assert measured != default
    expect(nll).to_have_value(measured)
    page.reload()  # the settings are as they were
    open_group(page, "Advanced settings", "Edge and cloud")
    expect(page.locator("#mode option:checked")).to_have_text(re.compile("^speculative"))
    expect(page.locator("#rtt-ms input")).to_have_value("10")
    expect(page.locator("#gate-ratio input")).to_have_value("0.4")
    nll.fill("0.5")
    for pair in ("smollm2-135m", "bundled"):
        choose_setting(page, "pair", PAIRS[pair].title)
    expect(nll).to_have_value(measured)
    page.locator("#reset").click()
    expect(page.locator("#mode option:checked")).to_have_text(re.compile("^off"))
    expect(page.locator("#rtt-ms input")).to_have_value("0")


@pytest.mark.exhaustive
def test_another_local_service_continues_after_one_is_ended_by_the_button(page: Page, scripts: Scripts) -> None:
    configure(page, mode="speculative", replicas=2, temperature=0)
    page.locator("#compare input").uncheck()
    complete(page, CODE, tokens=32)
    undisturbed = text_of(saved(page))
    scripts.held_after = 5
    run(page, CODE)
    spans(page, 5)
    page.get_by_role("tab", name="Edge-cloud").click()
    page.locator("#edge-kill").click()
    expect(page.locator("#edge-killed")).to_contain_text("was killed")
    scripts.gate.set()
    status(page, "done: 32 tokens")
    expect(page.locator("#lane-spec .note")).to_have_text(re.compile("^Failover: .* continues after"))
    trace = saved(page)
    assert text_of(trace) == undisturbed and sum(line.get("remote", {}).get("switched", 0) for line in trace) == 1
    expect(page.locator("#edge-run")).to_contain_text("1 failover")  # the selected tab is redrawn
    expect(page.locator("#edge-timeline rect.gap")).to_have_count(1)
    open_group(page, "Advanced settings", "Edge and cloud")
    expect(page.locator('#edge-plot .dot[fill="var(--dot-run)"]')).to_have_count(1)
    expect(page.locator("#edge-table th").first).to_have_attribute("tabindex", "0")  # the keyboard reaches the table
    assert not grave(page, "#tabs", "#settings", schemes=["light"])
    assert not grave(page, "#edge-run", "#edge-timeline", "#edge-plot", schemes=["dark"])
    resize(page, 390)
    expect_fit(page)


def test_cloud_process_ends_when_its_pipe_closes(served: Any) -> None:
    """The end of the page closes the standard input of the cloud process."""
    child = process(served)
    child.process.stdin.close()
    assert child.process.wait(PATIENCE) == 0
