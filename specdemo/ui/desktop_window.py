"""Desktop window for the page, drawn by pywebview.

The window runs in a separate process: a toolkit without a library or display aborts its process.
"""

from __future__ import annotations

import subprocess
import sys

_INSTALL = "pip install 'pywebview[qt]' on Linux, pip install pywebview on other systems"


def show(url: str) -> str | None:
    """Show `url` in a window until it is closed; return None, or an error message if no window could be shown."""
    process = subprocess.run([sys.executable, "-m", __name__, url], stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    if process.returncode == 1 and lines:
        return lines[-1]
    return " ".join([f"pywebview ended with code {process.returncode}.", *lines[-3:]])


def _open_window(url: str) -> None:
    try:
        import webview
    except ImportError:
        sys.exit(f"pywebview is not installed ({_INSTALL})")
    webview.settings["ALLOW_DOWNLOADS"] = True  # required by the buttons that save traces
    webview.create_window("specdemo", url, width=1360, height=900, min_size=(420, 600), text_select=True)
    try:
        webview.start(private_mode=False)  # private mode would discard settings
    except webview.WebViewException as error:
        sys.exit(f"pywebview found no window toolkit: {error} ({_INSTALL})")


if __name__ == "__main__":
    _open_window(sys.argv[1])
