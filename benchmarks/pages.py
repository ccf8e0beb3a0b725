"""The real page in a real browser, for studies that measure or record it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.tables import ROOT
from specdemo.models.model_pool import ModelPool
from specdemo.ui.page import build, launch_options

sys.path.insert(0, str(ROOT / "tests"))

from e2e import browser
from e2e.page_fixtures import ARGS, CODE, open_group, run, set_number, status

__all__ = ["CODE", "HOST", "chromium", "open_group", "run", "served", "set_number", "status"]

HOST = "127.0.0.1"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a complete Chromium, not the headless shell."""
    path = browser.executable(browser.WHOLE) or sys.exit(browser.MISSING)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as opened:
        yield opened


@contextmanager
def served(pool: ModelPool, **options: Any) -> Iterator[Any]:
    """Serve the page from this process; the demo has the attribute `url`."""
    demo = build(pool, **options)
    _, demo.url, _ = demo.launch(server_name=HOST, prevent_thread_lock=True, **launch_options(demo))
    gc.freeze()  # as in app.py
    try:
        yield demo
    finally:
        demo.worker.close()
        demo.close(verbose=False)
