"""Example prompts: which are available, and their buttons."""

from __future__ import annotations

import html
import json
from collections.abc import Container, Mapping
from typing import Any

import gradio as gr

from specdemo.models.zoo import PAIRS
from specdemo.option_rules import settings_of_pair


def available_examples(examples: Mapping[str, Any], pairs: Container[str]) -> dict[str, Any]:
    """Return the examples of `pairs` with all of their settings; methods have some for the bundled pair."""
    code = {"pair": "bundled", "chat": False, "title": "", "effect": ""}
    methods = examples["methods"] if code["pair"] in pairs else {}
    return {
        "ready": [_complete(example) for example in examples["ready"] if example["pair"] in pairs],
        **{
            which: {method: _complete({**code, "method": method, **made[which]}) for method, made in methods.items()}
            for which in ("best", "worst")
        },
    }


def _complete(example: Mapping[str, Any]) -> dict[str, Any]:
    own = settings_of_pair(PAIRS[example["pair"]], {"method": example["method"]})
    return {"target": "", "drafter": "", **own, **example}


def examples_row(shown: Mapping[str, Any]) -> gr.HTML:
    """Lay out the buttons of the examples."""
    titles = [(example["title"], f'data-example="{i}"') for i, example in enumerate(shown["ready"])]
    titles += [(f"Method at its {which}", f'id="at-{which}"') for which in ("best", "worst") if shown[which]]
    chips = "".join(f'<button type="button" class="chip" {own}>{html.escape(title)}</button>' for title, own in titles)
    examples = html.escape(json.dumps(shown))
    markup = f'<div id="examples" role="toolbar" aria-label="Examples" data-examples="{examples}">{chips}</div>'
    return gr.HTML(markup, elem_id="all-examples", apply_default_css=False)
