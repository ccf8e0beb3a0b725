"""Line charts as SVG: curves, dots, labels and axes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from specdemo.ui.line_chart import HEIGHT, WIDTH, LineChart

CURVES = ("one", "two", "three & more")
CHART = LineChart("A < B", "x", "y", {"one": "red", "run": "blue"}, {name: name for name in (*CURVES, "run")})


def drawn(*points: tuple) -> ElementTree.Element:
    return ElementTree.fromstring(CHART.svg(points))


def positions(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path)]


def test_curves_are_to_scale_and_dots_have_one_point() -> None:
    figure = drawn((0.0, 0.0, "one"), (1.0, 4.0, "one"), (2.0, 8.0, "one"), (1.0, 4.0, "run"), (None, None, "later"))
    curve, dot, later = figure.findall(".//g/path")
    (left, low), (middle, half), (right, high) = positions(curve.attrib["d"])
    assert middle == pytest.approx((left + right) / 2) and half == pytest.approx((low + high) / 2)
    assert 0 <= left < right <= WIDTH and 0 <= high < low <= HEIGHT
    assert positions(dot.attrib["d"]) == [(middle, half)] and dot.attrib["class"] == "dot"
    assert later.attrib["d"] == ""


def test_curves_differ_without_colour_and_labels_do_not_overlap() -> None:
    points = [(x, y, name) for name in CURVES for x, y in ((0.0, 0.0), (1.0, 1.0))]  # all end at one place
    figure = drawn(*points, (1.0, 1.0, "run"))
    dashes = [path.get("stroke-dasharray", "") for path in figure.findall(".//g/path")[:3]]
    assert len(set(dashes)) == 3
    labels = [text for text in figure.iter("text") if text.get("class") == "label"]
    assert [label.text for label in labels] == [*CURVES, "run"]
    heights = [float(label.attrib["y"]) for label in labels]
    assert all(below - above >= 12 for above, below in zip(heights, heights[1:], strict=False))
    assert max(heights) < HEIGHT


def test_equal_values_and_missing_points_are_drawn() -> None:
    assert len(drawn((1.0, 2.0, "one"), (1.0, 2.0, "one")).findall(".//g/path")) == 1
    assert not drawn().findall(".//g/path")
