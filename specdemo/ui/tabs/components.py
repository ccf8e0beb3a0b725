"""Components shared by tabs."""

from __future__ import annotations

import html
from typing import Any

# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
PROGRESS_CSS = """progress { width: 100%; height: 8px; border-radius: 4px; overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--ink) }
progress::-moz-progress-bar { background: var(--ink) }
p { margin: 4px 0 }"""
# Replace the first input by the id of the displayed run.
SHOWN_RUN_JS = """(...values) => [document.querySelector("[data-run]")?.dataset.run ?? "", ...values.slice(1)]"""


def progress_bar(over: float, total: int, words: str, attributes: str = "") -> str:
    """Return a progress bar with a line below."""
    progress = f'<progress value="{over}" max="{total}" aria-label="how much is measured"></progress>'
    return f"{progress}<p{attributes}>{html.escape(words)}</p>"
