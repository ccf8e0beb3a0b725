"""Record what the page and README.md show: traces in assets/traces, `assets/pictures/page.webp`, `assets/preview.png`.

`python -m benchmarks.record example` records the example of the first visit, `--name` another trace;
`python -m benchmarks.record page` records the page in a browser.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect

from benchmarks.page_cost import RETURNING, chromium, launched, status
from benchmarks.runs import traced
from benchmarks.tables import ROOT, Study, study_command
from specdemo.core.errors import UserError, check_name
from specdemo.core.trace import write
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.option_rules import settings_of_pair
from specdemo.recipe import Recipe
from specdemo.ui.lane import baseline_of
from specdemo.ui.page import RECORDED_TOP
from specdemo.ui.service import leave_a_core

EXAMPLE = "hybrid, short answer"
STACK = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self, items=()):'
LINES = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file.'
_CODE: dict[str, Any] = {"pair": "bundled", "top_p": 1.0, "seed": 1, "max_tokens": 96, "gamma": 4}
# Title of an example, or a prompt, and options
RECORDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    EXAMPLE: ("Rewrite a text", {"max_tokens": 80}),
    "draft, temperature 0.7": (STACK, {**_CODE, "method": "draft", "temperature": 0.7}),
    "tree, greedy": (LINES, {**_CODE, "method": "tree", "temperature": 0.0}),
}
WARM_UPS = 2
FILMED = "Facts to JSON"
OUTPUT = ROOT / "assets" / "pictures" / "page.webp"
PREVIEW, PREVIEW_SIZE = ROOT / "assets" / "preview.png", {"width": 1200, "height": 630}
MAX_BYTES = 3_000_000
WIDTH, HEIGHT = 1380, 900
TICK_MS = 90
RACE_SPEED = 0.25  # relative to the recorded speed


def recording(name: str, options: argparse.Namespace) -> tuple[Recipe, str]:
    """Return recipe and prompt of a recording; an example has the settings of its pair."""
    text, values = RECORDINGS[name]
    examples = {example["title"]: example for example in json.loads((ASSETS / "examples.json").read_text())["ready"]}
    if example := examples.get(text):
        own = {name: example[name] for name in ("method", "chat", "temperature")}
        values = {**settings_of_pair(PAIRS[example["pair"]], own), "pair": example["pair"], "top_p": 1.0, **values}
        text = example["prompt"]
    if options.target:
        values = {**values, "pair": None, "target": options.target}
    return replace(Recipe(), **values, top=RECORDED_TOP, device=options.device), text


def example(options: argparse.Namespace) -> None:
    """Write a trace that the page plays without a model, with its AR baseline, after warm-up runs.

    `--target` replaces the target. The trace contains the name of the pair, no file names.
    """
    check_name("recording", options.name, RECORDINGS)
    recipe, prompt = recording(options.name, options)
    pool, lines = ModelPool(), []
    named = {"pair": recipe.pair, "target": None, "drafter": None}
    for lane in (recipe, baseline_of(recipe)):
        talk = [{"role": "user", "content": prompt}] if lane.chat else prompt
        *_, trace = (traced(lane, talk, pool) for _ in range(WARM_UPS + 1))
        header = replace(trace.header, recipe={**trace.header.recipe, **named})
        lines += [write(event) for event in (header, *trace.steps, trace.end)]
        m = trace.end.metrics
        print(f"{lane.method}: {m.tokens} tokens, {m.tokens_per_target_pass:.2f} per pass", end=", ")
        print(f"accepted {m.accepted} of {m.tested} tested, {m.tokens_per_second:.1f} tokens/s")
    text = "".join(lines)
    if str(Path.home()) in text or (options.target and options.target in text):
        raise UserError("the trace contains the name of a file: nothing was written")
    output = options.output or ASSETS / "traces" / f"{options.name}.jsonl"
    output.write_text(text, "utf-8")
    print(f"{output}: {len(text.encode()) / 1000:.0f} kB")


class Film:
    """Frames and the duration of each."""

    def __init__(self, page: Page, scale: float) -> None:
        self._page, self._scale = page, scale
        self.frames: list[Image.Image] = []
        self.durations_ms: list[int] = []

    def take(self, duration_ms: int = TICK_MS) -> None:
        """Add a screenshot; an unchanged screenshot extends the previous frame."""
        picture = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        size = (round(WIDTH * self._scale), round(HEIGHT * self._scale))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
        if self.frames and picture.tobytes() == self.frames[-1].tobytes():
            self.durations_ms[-1] += duration_ms
        else:
            self.frames.append(picture)
            self.durations_ms.append(duration_ms)

    def write(self, path: Path, quality: int) -> int:
        """Write a looping WebP and return its size in bytes."""
        first, *rest = self.frames
        options = {"duration": self.durations_ms, "loop": 0, "quality": quality, "method": 4}
        first.save(path, save_all=True, append_images=rest, **options)
        return path.stat().st_size


def record(page: Page, film: Film) -> None:
    """Record an example with both lanes, their race, and the inspector on a rejected token."""
    page.get_by_role("button", name=FILMED).click()
    page.locator("#compare input").check()
    page.locator("#run").click()  # warm-up
    status(page, "done")
    page.get_by_role("button", name=FILMED).click()  # a new conversation
    page.locator("#pace").select_option("readable")
    page.evaluate("document.querySelector('.cockpit').scrollIntoView()")
    page.locator("#run").evaluate("button => button.click()")
    page.wait_for_function("!document.getElementById('status').textContent.startsWith('done')")
    while not page.locator("#status").inner_text().startswith("done"):
        film.take()
    film.take(1500)
    race, end = page.locator("#race-at"), float(page.locator("#race-at").get_attribute("max") or 0)
    seek = "(slider, t) => { slider.value = t; slider.dispatchEvent(new Event('input')); }"
    page.locator("#race-speed").select_option(str(RACE_SPEED))
    for i in range(int(end * 1000 / TICK_MS / RACE_SPEED) + 2):
        race.evaluate(seek, min(end, RACE_SPEED * i * TICK_MS / 1000))
        film.take()
    film.take(1500)
    page.locator("#lane-spec [data-kind=rejected]").first.evaluate("token => token.click()")
    expect(page.locator("#inspector")).to_be_visible()
    page.locator("#inspector").evaluate("part => part.scrollIntoView({block: 'end'})")
    film.take(2500)
    for _ in range(3):
        before = page.locator("#round-number").inner_text()
        page.locator("#round-on").click()
        expect(page.locator("#round-number")).not_to_have_text(before)
        film.take(1600)


def record_preview(page: Page, url: str) -> None:
    """Write the picture of the explained example, with a palette of 128 colours."""
    page.goto(url)
    expect(page.locator("#walk")).to_be_visible()
    expect(page.locator(".round[data-stage]")).to_have_count(0)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128).save(PREVIEW, optimize=True)


def page(options: argparse.Namespace) -> None:
    """Write the animation of README.md, and the picture of link previews, the page at the first visit.

    The race is drawn at the times of its frames, independent of the time of a screenshot.
    """
    leave_a_core()  # as in app.py
    with launched(None, compare=False) as demo, chromium() as opened:
        tab = opened.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.add_init_script(RETURNING)
        tab.goto(demo.url)
        expect(tab.locator("#lane-spec")).to_be_visible()
        film = Film(tab, options.scale)
        record(tab, film)
        record_preview(opened.new_page(viewport=PREVIEW_SIZE, color_scheme="light"), demo.url)
    size = film.write(options.output, options.quality)
    seconds = sum(film.durations_ms) / 1000
    print(f"{options.output}: {len(film.frames)} frames, {seconds:.1f} s, {size / 1e6:.2f} MB")
    if size > MAX_BYTES:
        raise UserError(f"the file is larger than {MAX_BYTES / 1e6:.0f} MB: lower --quality or --scale")


STUDIES = {
    "example": Study(
        example,
        {
            "name": {"default": EXAMPLE, "help": f"{', '.join(RECORDINGS)} (default: {EXAMPLE})"},
            "target": {"help": "GGUF file or directory of the target (default: that of the pair)"},
            "device": "cpu",
            "output": {"type": Path, "help": "file (default: the recording in assets/traces)"},
        },
    ),
    "page": Study(
        page,
        {
            "output": OUTPUT,
            "scale": {"type": float, "default": 0.7, "help": "pixels per pixel of the page (default: 0.7)"},
            "quality": {"type": int, "default": 60, "help": "of the WebP (default: 60)"},
        },
    ),
}
main = study_command(__file__, __doc__, {}, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
