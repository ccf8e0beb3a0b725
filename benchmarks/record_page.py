"""The README's moving picture: a run on the real page, its race replayed frame by frame, and a round looked into.

Usage: `.venv/bin/python benchmarks/record_page.py`. The race is drawn at the moments of its frames, so the
picture shows the recorded times however long a screenshot takes.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e import browser
from e2e.page_fixtures import ARGS, run, set_number, status
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from specdemo.models.model_pool import ModelPool
from specdemo.ui.page import build, launch_options
from specdemo.ui.service import leave_a_core

PROMPT = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self, items=()):'
OUT = Path(__file__).parents[1] / "assets" / "pictures" / "page.webp"
LARGEST = 3_000_000  # bytes
WIDE, HIGH = 1380, 900
TICK_MS = 90
SLOW = 0.25  # of the recorded speed: what is over in a second is hard to see


class Film:
    """Frames and how long each stays."""

    def __init__(self, page: Page, scale: float) -> None:
        self._page, self._scale = page, scale
        self.frames: list[Image.Image] = []
        self.lasts: list[int] = []

    def take(self, lasts_ms: int = TICK_MS) -> None:
        """What the page shows now; a frame like the one before only makes that one last longer."""
        picture = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        picture = picture.resize((round(WIDE * self._scale), round(HIGH * self._scale)), Image.Resampling.LANCZOS)
        if self.frames and picture.tobytes() == self.frames[-1].tobytes():
            self.lasts[-1] += lasts_ms
        else:
            self.frames.append(picture)
            self.lasts.append(lasts_ms)

    def write(self, path: Path, quality: int) -> int:
        """As an animated WebP that begins anew; its size in bytes."""
        first, *rest = self.frames
        first.save(path, save_all=True, append_images=rest, duration=self.lasts, loop=0, quality=quality, method=4)
        return path.stat().st_size


def scene(page: Page, film: Film) -> None:
    """Type, run, watch; then the race; then a rejected token and its round."""
    set_number(page, "max-tokens", 160)
    set_number(page, "temperature", 0.7)
    page.get_by_role("button", name="Advanced settings").click()
    page.get_by_role("button", name="Rule").click()
    page.locator("#rule input").click()
    page.get_by_role("option", name="coupled:").click()  # both lanes then write the same text
    page.get_by_role("button", name="Rule").click()
    page.locator("#compare input").check()
    run(page, PROMPT)  # once before, so that nothing is cold
    status(page, "done")
    page.evaluate("document.querySelector('.cockpit').scrollIntoView()")
    page.locator("#run").evaluate("button => button.click()")
    page.wait_for_function("document.getElementById('status').textContent.startsWith('decoding')")
    while not page.locator("#status").inner_text().startswith("done"):
        film.take()
    film.take(1500)
    race, end = page.locator("#race-at"), float(page.locator("#race-at").get_attribute("max") or 0)
    seek = "(slider, t) => { slider.value = t; slider.dispatchEvent(new Event('input')); }"
    page.locator("#race-speed").select_option(str(SLOW))
    for i in range(int(end * 1000 / TICK_MS / SLOW) + 2):
        race.evaluate(seek, min(end, SLOW * i * TICK_MS / 1000))
        film.take()
    film.take(1500)
    page.locator("#lane-spec [data-kind=rejected]").nth(2).evaluate("token => token.click()")
    expect(page.locator("#inspector")).to_be_visible()
    page.locator("#inspector").evaluate("part => part.scrollIntoView({block: 'end'})")
    film.take(2500)
    for _ in range(3):
        before = page.locator("#round-number").inner_text()
        page.locator("#round-on").click()
        expect(page.locator("#round-number")).not_to_have_text(before)
        film.take(1600)


def main() -> None:
    """Serve the page, film it, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUT)
    parser.add_argument("--scale", type=float, default=0.7, help="pixels per pixel of the page (default: 0.7)")
    parser.add_argument("--quality", type=int, default=60, help="of the WebP (default: 60)")
    options = parser.parse_args()
    leave_a_core()  # as the program does
    demo = build(ModelPool())
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **launch_options(demo))
    path = browser.executable(browser.WHOLE) or sys.exit(browser.MISSING)
    try:
        with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as chromium:
            page = chromium.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme="light")
            page.goto(url)
            expect(page.locator("#lane-spec")).to_be_visible()
            film = Film(page, options.scale)
            scene(page, film)
        size = film.write(options.output, options.quality)
    finally:
        demo.worker.close()
        demo.close(verbose=False)
    print(f"{options.output}: {len(film.frames)} frames, {sum(film.lasts) / 1000:.1f} s, {size / 1e6:.2f} MB")
    if size > LARGEST:
        sys.exit(f"That is more than {LARGEST / 1e6:.0f} MB: lower --quality or --scale.")


if __name__ == "__main__":
    main()
