"""A window of the page's own, by pywebview where it is installed. Knows an address, nothing else.

It is drawn by a process of its own: a toolkit that misses a library or the display aborts the process that it is in,
and its loop would take turns with the thread that decodes.
"""

from __future__ import annotations

import subprocess
import sys

HOW = "pip install 'pywebview[qt]' on Linux, pip install pywebview elsewhere"


def show(url: str) -> str | None:
    """Open a window on `url` and return when it has been closed; or say why there is none."""
    ended = subprocess.run([sys.executable, "-m", __name__, url], stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode == 0:
        return None
    said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    if ended.returncode == 1 and said:
        return said[-1]
    return " ".join([f"pywebview ended with code {ended.returncode}.", *said[-3:]])  # a toolkit's last words


def draw(url: str) -> None:
    """The window itself, until it is closed. On the main thread only."""
    try:
        import webview
    except ImportError:
        sys.exit(f"pywebview is not installed ({HOW})")
    webview.settings["ALLOW_DOWNLOADS"] = True  # or the buttons that save a trace would do nothing
    webview.create_window("specdemo", url, width=1360, height=900, min_size=(420, 600), text_select=True)
    try:
        webview.start(private_mode=False)  # or settings would be forgotten at the end
    except webview.WebViewException as error:
        sys.exit(f"pywebview has nothing to draw with: {error} ({HOW})")


if __name__ == "__main__":
    draw(sys.argv[1])
