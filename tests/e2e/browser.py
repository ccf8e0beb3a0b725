"""Browser of the page tests: a system Chromium, or playwright's download.

As a script it downloads playwright's browser if there is none. The script never fails; tests that need a browser do.
"""

import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright

WHOLE = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NAMES = ("chromium-headless-shell", *WHOLE)  # the same engine without windows and tabs, quicker
MISSING = (
    "The page's tests need Chromium: install it (on Debian and Ubuntu: apt install chromium), "
    "or run .venv/bin/playwright install --with-deps chromium."
)


def executable(names: tuple[str, ...] = NAMES) -> str | None:
    """Path of Chromium, or None. `WHOLE` lists full browsers, which measurements of the user's experience require."""
    system = next(filter(None, map(shutil.which, names)), None)
    if system:
        return system
    with sync_playwright() as playwright:
        return shutil.which(playwright.chromium.executable_path)


if __name__ == "__main__" and not executable():
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)
    if not executable():
        print(MISSING, file=sys.stderr)
