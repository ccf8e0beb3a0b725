"""Values of the marks of charts on their axes, as the browser drew them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Page

# Ticks, bars, curves and dots of each chart below a selector, in pixels, with the words of their titles.
READ_CHARTS = """(selector) => [...document.querySelectorAll(selector)].map((picture) => {
    const all = (marks) => [...picture.querySelectorAll(marks)];
    const at = (node, ...names) => names.map((name) => Number(node.getAttribute(name)));
    const words = (node) => node.querySelector("title")?.textContent ?? "";
    const lines = all("line.grid").map((line) => at(line, "y1")[0]);
    const ofTick = (text) => text.classList.contains("end") && lines.includes(at(text, "y")[0] - 4);
    const middle = all("text.axis.middle"), first = Math.min(...middle.map((text) => at(text, "y")[0]));
    return {
        up: all("text.axis").filter(ofTick).map((text) => [at(text, "y")[0] - 4, text.textContent]),
        across: middle.filter((text) => at(text, "y")[0] === first).map((text) => [at(text, "x")[0], text.textContent]),
        bars: all("rect.bar").map((bar) => [...at(bar, "x", "y", "width", "height"), words(bar)]),
        curves: all("path.line").map((path) => path.getAttribute("d").slice(1).split("L").filter(Boolean)
            .map((point) => point.split(",").map(Number))),
        dots: all("circle.dot").map((dot) => [...at(dot, "cx", "cy"), dot.getAttribute("fill"), words(dot)]),
        labels: all("text.label").map((text) => text.textContent),
        name: picture.getAttribute("aria-label"),
    };
})"""


def read_chart(page: Page, selector: str) -> dict[str, Any]:
    """Return the only chart below the selector."""
    (drawn,) = page.evaluate(READ_CHARTS, f"{selector} svg.chart")
    return drawn


@dataclass(frozen=True)
class Axis:
    """A linear axis with the value at a pixel."""

    origin: float
    unit: float

    @classmethod
    def of(cls, ticks: Sequence[Sequence[Any]], unit: str = "") -> "Axis":
        """Return the axis through all ticks; fail unless they lie on one line and are at least two."""
        places = [(float(pixel), float(text.removesuffix(unit))) for pixel, text in ticks]
        assert len(places) > 1 and all(text.endswith(unit) for _, text in ticks), ticks
        (first, low), (last, high) = places[0], places[-1]
        scale = (high - low) / (last - first)
        axis = cls(first - low / scale, scale)
        for pixel, value in places:
            assert axis(pixel) == pytest.approx(value, abs=0.02 * abs(scale) + 1e-9)
        return axis

    def __call__(self, pixel: float) -> float:
        return self.unit * (pixel - self.origin)

    def error(self, pixels: float = 0.6) -> float:
        return abs(self.unit) * pixels


def check_bars(chart: dict[str, Any], stacks: Sequence[Sequence[float]], unit: str = "") -> None:
    """`stacks`: heights of each bar from the axis up, in the order of the series."""
    up = Axis.of(chart["up"], unit)
    series = list(zip(*stacks, strict=True))
    shown = [(up(y + height), up(y)) for _, y, _, height, _ in chart["bars"]]
    expected = [(sum(stack[:part]), sum(stack[: part + 1])) for part in range(len(series)) for stack in stacks]
    for pair, values in zip(shown, expected, strict=True):
        assert pair == pytest.approx(values, abs=up.error()), (pair, values)


def check_curves(chart: dict[str, Any], forms: Sequence[Callable[[float], float]]) -> None:
    """Each curve is one of `forms`, and each form is drawn."""
    across, up = Axis.of(chart["across"]), Axis.of(chart["up"])
    points = [[(across(x), up(y)) for x, y in curve] for curve in chart["curves"]]
    errors = up.error(), across.error()

    def follows(curve: Sequence[tuple[float, float]], form: Callable[[float], float]) -> bool:
        return all(_near(form, x, y, *errors) for x, y in curve)

    assert len(points) == len(forms)
    for form in forms:
        assert any(follows(curve, form) for curve in points), (chart["name"], form(0.5))
    for curve in points:
        assert any(follows(curve, form) for form in forms), (chart["name"], curve[:3])


def _near(form: Callable[[float], float], x: float, y: float, error: float, across: float) -> bool:
    """A drawn point differs by its rounding, which moves it along a steep curve, too."""
    around = [form(max(0.0, x + shift)) for shift in (-across, 0.0, across)]
    return min(around) - error <= y <= max(around) + error
