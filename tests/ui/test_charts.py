"""Line charts as SVG."""

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
