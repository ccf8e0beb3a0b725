"""Components of tabs: charts as JSON, drawn by `cockpit/charts.js`, Markdown, and views of the displayed run."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import gradio as gr

from specdemo.bench.table import markdown_table
from specdemo.core.formats import NOTHING, number
from specdemo.ui.frames import Run
from specdemo.ui.run_store import RunStore
from specdemo.ui.theme import CATEGORIES

Components = Sequence[gr.components.Component]
# Handlers receive raw values: gradio would raise an error for an incomplete number.
UNPROCESSED: dict[str, Any] = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
_LARGEST_DRAWN = 1e12  # traces of unknown origin may contain any times
# Replace the first input by the displayed run and the selected tab.
_SHOWN_JS = """(...values) => {
    const run = document.querySelector("[data-run]")?.dataset.run ?? "";
    const tab = document.querySelector("#tabs [aria-selected=true]")?.textContent.trim();
    return [{ run, tab }, ...values.slice(1)];
}"""


def is_number(value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> bool:
    """Return True for a finite number of the browser within bounds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def chart_view(elem_id: str, *names: str) -> gr.HTML:
    """Create the component of a chart, or of several with their element ids."""
    value = "".join(f'<div id="{name}"></div>' for name in names)
    return gr.HTML(value, elem_id=elem_id, elem_classes="curves", apply_default_css=False, min_width=300)


@dataclass(frozen=True)
class Series:
    """Points of a chart. Labels of bars are in its key."""

    kind: str  # line, dot or bar; bars of the same x are stacked
    colour: str
    points: Sequence[tuple[float, float]]
    label: str = ""


@dataclass(frozen=True)
class Block:
    """Part of a row of a timeline. Times are in milliseconds."""

    row: int
    kind: str
    start: float
    duration: float
    tooltip: str


def by_category(kind: str, groups: Mapping[str, Sequence[tuple[float, float]]]) -> list[Series]:
    colours = cycle(CATEGORIES)
    return [Series(kind, next(colours), points, label) for label, points in groups.items()]


def chart(title: str, x: str, y: str, series: Sequence[Series], names: Sequence[str] = (), elem_id: str = "") -> str:
    """Return a chart; `names` replace the x values 0, 1 ..."""
    drawn = [asdict(entry) | {"points": [list(map(_rounded, point)) for point in entry.points]} for entry in series]
    return _element({"title": title, "x": x, "y": y, "names": names, "series": drawn}, elem_id)


def timeline(
    label: str,
    rows: Sequence[str],
    blocks: Sequence[Block],
    kinds: Mapping[str, tuple[str, str]],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return rows of blocks. `kinds`: words and colour; `marks`: texts above a time."""
    key = [{"kind": kind, "label": words, "colour": colour} for kind, (words, colour) in kinds.items()]
    drawn = [asdict(block) | {"start": _rounded(block.start), "duration": _rounded(block.duration)} for block in blocks]
    return _element({"label": label, "rows": rows, "blocks": drawn, "key": key, "marks": marks})


def _rounded(value: float) -> float:
    return float(f"{min(max(value, -_LARGEST_DRAWN), _LARGEST_DRAWN):.5g}")


def _element(figure: Mapping[str, Any], elem_id: str = "") -> str:
    name = f'id="{elem_id}" ' if elem_id else ""
    return f'<chart-view {name}figure="{html.escape(json.dumps(figure))}"></chart-view>'


def escape_markdown(text: str) -> str:
    """Escape text of traces: an image in Markdown sends a request to another host."""
    return re.sub(r"(?=[\x00-\x7f])([^\w\s,.])", r"\\\1", text)


def link_papers(text: str) -> str:
    """Turn arXiv numbers into links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def figures_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows in Markdown: two digits, halves rounded up as in the papers, dash for None and NaN."""

    def cell(value: object) -> object:
        if isinstance(value, float) and not math.isnan(value):
            return number(value + 1e-9, 2)
        return NOTHING if value is None or isinstance(value, float) else value

    return markdown_table(head, [[cell(value) for value in row] for row in rows])


class RunViews:
    """Views of the displayed run, drawn when their tab is selected and when it shows while another run is displayed."""

    def __init__(self, runs: RunStore, tab: gr.Tab, cockpit: gr.HTML) -> None:
        self._runs = runs
        self._tab = tab
        self._cockpit = cockpit
        self._shown = gr.JSON(visible=False)

    def connect(
        self,
        triggers: Sequence[Any],
        view: Callable[..., Any],
        inputs: Components,
        outputs: Components,
        *,
        if_selected: bool = False,
    ) -> None:
        """Show the values of `view(run, *values)` after `triggers`; `run` is None before the first run.

        `if_selected`: only while the tab is selected.
        """

        def draw(request: gr.Request, shown: Any, *values: Any) -> Any:
            if if_selected and shown["tab"] != self._tab.label:
                return gr.skip()
            run: Run | None = self._runs.get(shown["run"]) or self._runs.latest(request.session_hash or "")
            return view(run, *values)

        latest: dict[str, Any] = {"js": _SHOWN_JS, "trigger_mode": "always_last", "queue": False, **UNPROCESSED}
        gr.on(list(triggers), draw, [self._shown, *inputs], list(outputs), **latest)

    def connect_run(
        self, triggers: Sequence[Any], view: Callable[..., Any], inputs: Components, outputs: Components
    ) -> None:
        """Show the values of `view` after `triggers`, for the selected tab, and for another displayed run."""
        self.connect([self._tab.select, *triggers], view, inputs, outputs)
        self.connect([self._cockpit.change], view, inputs, outputs, if_selected=True)
