"""Page in a browser: ids, classes and data attributes after recorded traces were shown and a step was opened."""

import json
from typing import Any

from .traces import golden_traces

# Attributes with few values
FIXED = ("by", "exact", "fate", "kind", "kpi", "lane", "legend", "newline", "state", "tone")
# Notes of steps over a link: sent before the answer, answered late, skipped by a gate, continued without the cloud.
NOTES = ({}, {"provisional": 1.0}, {"confirmed": 1.0, "overruled": 0.0}, {"escalated": 0.0}, {"lost": 1.0, "edge": 1.0})
SHOWN = """() => {
  const inside = [...document.querySelectorAll(".cockpit, .cockpit *")];
  const data = {};
  for (const node of [...inside, ...document.querySelectorAll("[data-run]")])
    for (const [name, value] of Object.entries(node.dataset)) (data[name] ??= []).push(value);
  return { ids: inside.map((node) => node.id), classes: inside.flatMap((node) => [...node.classList]), data };
}"""


def lanes() -> str:
    """Traces that fill every lane: with recorded distributions, AR decoding, beam search, and a tree over a link."""
    golden = golden_traces()
    tree = list(map(json.loads, golden["tree"].splitlines()))
    for line, notes in zip((line for line in tree if "i" in line), NOTES, strict=False):
        if notes:
            line["remote"] = notes
    return "".join((golden["draft-top"], golden["ar"], golden["beam"], *(json.dumps(line) + "\n" for line in tree)))


def document(url: str) -> dict[str, Any]:
    from e2e import browser
    from e2e.page_fixtures import PATIENCE, RETURNING
    from playwright.sync_api import sync_playwright

    path = browser.executable()
    assert path, browser.MISSING
    golden = golden_traces()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        tab = opened.new_page()
        tab.set_default_timeout(PATIENCE * 1000)
        tab.add_init_script(RETURNING)
        tab.goto(url)
        tab.locator("body[data-shown=yes]").wait_for()  # the modules are mounted

        def show(text: str, lane: str) -> None:
            file = {"name": "trace.jsonl", "mimeType": "text/plain", "buffer": text.encode()}
            tab.locator("#trace-file").set_input_files(file)
            tab.locator(f"#lane-{lane} .tok").first.wait_for()

        show(golden["nasd"] + golden["ar"], "ar")  # equal texts
        tab.locator("#details summary").click()
        tab.locator("#sameness").wait_for()
        states = [tab.evaluate(SHOWN)]
        show(lanes(), "fourth")
        tab.locator("#figures summary").click()
        tab.locator("#rounds td").first.wait_for()
        token = tab.locator("#lane-spec .tok[data-kind=accepted]").first
        token.hover()
        tab.locator("#tip").wait_for()
        states.append(tab.evaluate(SHOWN))
        token.click()
        tab.locator("#round-nodes .node").first.wait_for()
        states.append(tab.evaluate(SHOWN))
        tab.locator("#round-close").click()  # the details of the step cover other lanes
        tab.locator("#lane-fourth .tok").first.click()
        tab.locator("#round-at").fill("2")
        tab.locator("#round-tree svg").wait_for()
        states.append(tab.evaluate(SHOWN))
        opened.close()
    names = sorted({name for state in states for name in state["data"]})
    values = {name: {value for state in states for value in state["data"].get(name, ())} for name in names}
    return {
        "ids": sorted({name for state in states for name in state["ids"] if name}),
        "classes": sorted({name for state in states for name in state["classes"]}),
        "data": {name: sorted(values[name]) if name in FIXED else [] for name in names},
    }


def frame_of_socket(url: str) -> dict[str, Any]:
    """First message of a WebSocket, which for a run that is over is its last frame."""
    from websockets.sync.client import connect

    with connect(url.replace("http", "ws", 1)) as socket:
        return json.loads(socket.recv(timeout=60))
