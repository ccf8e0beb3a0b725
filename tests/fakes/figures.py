"""Figures of charts, as the browser reads them."""

import json
from html.parser import HTMLParser
from typing import Any


def figure_of(markup: str) -> dict[str, Any]:
    """Return the figure of the only element in `markup`; JavaScript would refuse infinite numbers."""
    elements: list[dict[str, str | None]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: elements.append(dict(attributes))  # type: ignore[method-assign]
    parser.feed(markup)
    (attributes,) = elements
    figure: dict[str, Any] = json.loads(attributes["figure"] or "", parse_constant=_refuse)
    return figure


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def values(markup: str, label: str) -> dict[float, float]:
    """Return the points of the labelled series."""
    (series,) = [series for series in figure_of(markup)["series"] if series["label"] == label]
    return dict(series["points"])
