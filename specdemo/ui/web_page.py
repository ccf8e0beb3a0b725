"""Saved web page of a run: one HTML file with lanes, inspector and race, which needs no server."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from typing import Any

from specdemo.ui import step_views
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, model_name, title
from specdemo.ui.page_files import saved_page
from specdemo.ui.theme import stylesheet

DIGITS = 6  # significant digits of steps; the page shows 3 decimals


def web_page(run: Run) -> str:
    """Return the HTML text of a finished run."""
    lanes = {name: lane for name, lane in run.lanes.items() if lane.begun}
    baseline = lanes.get(PLAIN)
    data = {
        "frame": json.loads(run.frame(0)),
        "steps": {name: _rounded(step_views.step_pictures(lane)) for name, lane in lanes.items()},
        "figures": {name: step_views.figures(lane, baseline) for name, lane in lanes.items()},
    }
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode()
    first = lanes[next(iter(lanes))]
    heading = f"{title(first.recipe)}, {model_name(first.recipe)}".rstrip(", ")
    about = _settings(first.recipe)
    return saved_page(
        {"heading": html.escape(heading), "about": html.escape(about), "data": packed, "colours": stylesheet()}
    )


def _rounded(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shorter = json.loads(json.dumps(steps), parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))
    return [{**short, "t": round(step["t"], 3)} for step, short in zip(steps, shorter, strict=True)]


def _settings(recipe: Mapping[str, Any]) -> str:
    names = ("temperature", "top_k", "top_p", "seed", "max_tokens", "rule", "policy")
    values = (f"{name.replace('_', ' ')} {recipe[name]}" for name in names if recipe.get(name) is not None)
    return f"Recorded with specdemo: {', '.join(values)}. Click a token to see its step."
