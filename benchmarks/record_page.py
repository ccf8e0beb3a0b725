"""Record the animation `assets/pictures/page.webp` of README.md: a run on the real page, its race, and the inspector.

Also record `assets/preview.png`, the picture of link previews: the page at the first visit.

`python -m benchmarks.record_page`. The race is drawn at the times of its frames, so that the animation shows recorded
times, independent of the time of a screenshot.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect

from benchmarks.page_cost import RETURNING, chromium, launched, status
from benchmarks.tables import ROOT, Study, study_command
from specdemo.core.errors import UserError
from specdemo.ui.service import leave_a_core

EXAMPLE = "Facts to JSON"
OUTPUT = ROOT / "assets" / "pictures" / "page.webp"
PREVIEW, PREVIEW_SIZE = ROOT / "assets" / "preview.png", {"width": 1200, "height": 630}
MAX_BYTES = 3_000_000
WIDTH, HEIGHT = 1380, 900
TICK_MS = 90
RACE_SPEED = 0.25  # relative to the recorded speed


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
    page.get_by_role("button", name=EXAMPLE).click()
    page.locator("#compare input").check()
    page.locator("#run").click()  # warm-up
    status(page, "done")
    page.get_by_role("button", name=EXAMPLE).click()  # a new conversation
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


def study(options: argparse.Namespace) -> None:
    """Serve the page, record it and write the animation."""
    leave_a_core()  # as in app.py
    with launched(None, compare=False) as demo, chromium() as opened:
        page = opened.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.add_init_script(RETURNING)
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        film = Film(page, options.scale)
        record(page, film)
        record_preview(opened.new_page(viewport=PREVIEW_SIZE, color_scheme="light"), demo.url)
    size = film.write(options.output, options.quality)
    seconds = sum(film.durations_ms) / 1000
    print(f"{options.output}: {len(film.frames)} frames, {seconds:.1f} s, {size / 1e6:.2f} MB")
    if size > MAX_BYTES:
        raise UserError(f"the file is larger than {MAX_BYTES / 1e6:.0f} MB: lower --quality or --scale")


OPTIONS = {
    "output": OUTPUT,
    "scale": {"type": float, "default": 0.7, "help": "pixels per pixel of the page (default: 0.7)"},
    "quality": {"type": int, "default": 60, "help": "of the WebP (default: 60)"},
}
main = study_command(__file__, __doc__, {}, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
