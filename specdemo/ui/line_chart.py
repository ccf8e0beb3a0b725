"""Line charts as SVG. Each curve has its own dash pattern and a label at its end, so colour is never the only cue."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ChartPoint = tuple[float | None, float | None, str]  # x, y, series; None: the series has no point yet

WIDTH, HEIGHT = 460, 260  # pixels
_LEFT = 40  # margins; the right margin has the width of the labels
_TOP, _BOTTOM = 24, 36
_LETTER = 7.2  # width of a letter of a label
_SAMPLE = 18  # length of the line before a label
_LINE = 14  # distance of labels
_TICKS = 5
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")


@dataclass(frozen=True)
class LineChart:
    """Texts and colours of a chart. Series without a label in `labels` are drawn without one."""

    title: str
    x: str
    y: str
    colours: Mapping[str, str]  # CSS colour by series
    labels: Mapping[str, str]

    def svg(self, points: Sequence[ChartPoint]) -> str:
        """Return a figure with the curves; a series with a single point is a dot."""
        series: dict[str, list[tuple[float, float]]] = {}
        for x, y, name in points:
            known = series.setdefault(name, [])
            if x is not None and y is not None:
                known.append((x, y))
        scale = _Scale.of([point for known in series.values() for point in known], self._label_width)
        marks = "".join(
            _mark(scale, known, self.colours.get(name, "var(--ink)"), _DASHES[i % len(_DASHES)])
            for i, (name, known) in enumerate(series.items())
        )
        return (
            f'<figure class="line-chart"><figcaption>{html.escape(self.title)} {_BUTTONS}</figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.title)}">'
            f"{scale.axes(self.x, self.y)}"
            f'<g class="mark-line">{marks}</g>{"".join(self._labels(scale, series))}</svg></figure>'
        )

    @property
    def _label_width(self) -> float:
        return _SAMPLE + 12 + _LETTER * max(map(len, self.labels.values()), default=0)

    def _labels(self, scale: _Scale, series: Mapping[str, Sequence[tuple[float, float]]]) -> Iterable[str]:
        """Place the labels beside the ends of the curves, from top to bottom without overlaps."""
        ends = sorted(
            (scale.y(known[-1][1]), i, name)
            for i, (name, known) in enumerate(series.items())
            if known and self.labels.get(name)
        )
        lowest, below = HEIGHT - _BOTTOM, -math.inf
        for n, (y, i, name) in enumerate(ends):
            below = min(max(y, below + _LINE), lowest - _LINE * (len(ends) - 1 - n))
            x, dash = scale.right + 6, _DASHES[i % len(_DASHES)]
            colour = self.colours.get(name, "var(--ink)")
            sample = (
                f'<circle cx="{x + _SAMPLE / 2:.1f}" cy="{below:.1f}" r="4" fill="{colour}"/>'
                if len(series[name]) == 1
                else f'<line x1="{x:.1f}" x2="{x + _SAMPLE:.1f}" y1="{below:.1f}" y2="{below:.1f}" stroke="{colour}" '
                f'stroke-dasharray="{dash}" class="sample"/>'
            )
            text = html.escape(self.labels[name])
            yield f'{sample}<text x="{x + _SAMPLE + 5:.1f}" y="{below + 4:.1f}" class="label">{text}</text>'


_BUTTONS = "".join(
    f'<button type="button" class="save-chart" data-save="{kind}">{kind.upper()}</button>' for kind in ("svg", "png")
)


@dataclass(frozen=True)
class _Scale:
    """Conversion of values to pixels."""

    low: tuple[float, float]
    high: tuple[float, float]
    right: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], label_width: float) -> _Scale:
        xs, ys = ([point[k] for point in points] or [0.0, 1.0] for k in (0, 1))
        bounds = [(min(values), max(values)) for values in (xs, ys)]
        low, high = zip(*((a, b if b > a else a + 1) for a, b in bounds), strict=True)
        return cls((low[0], low[1]), (high[0], high[1]), WIDTH - label_width)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low[0]) / (self.high[0] - self.low[0]) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        share = (value - self.low[1]) / (self.high[1] - self.low[1])
        return HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP)

    def axes(self, x: str, y: str) -> str:
        rows = [
            f'<line x1="{_LEFT}" x2="{self.right:.1f}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}" class="grid"/>'
            f'<text x="{_LEFT - 5}" y="{self.y(v) + 4:.1f}" class="tick end">{v:g}</text>'
            for v in _ticks(self.low[1], self.high[1])
        ]
        columns = [
            f'<text x="{self.x(v):.1f}" y="{HEIGHT - _BOTTOM + 16}" class="tick middle">{v:g}</text>'
            for v in _ticks(self.low[0], self.high[0])
        ]
        middle = (_LEFT + self.right) / 2
        names = (
            f'<text x="{middle:.1f}" y="{HEIGHT - 4}" class="tick middle">{html.escape(x)}</text>'
            f'<text x="2" y="10" class="tick">{html.escape(y)}</text>'
        )
        return "".join([*rows, *columns, names])


def _ticks(low: float, high: float) -> list[float]:
    """Return about `_TICKS` multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _mark(scale: _Scale, points: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    path = "L".join(f"{scale.x(x):.2f},{scale.y(y):.2f}" for x, y in points)
    kind = ' class="dot"' if len(points) == 1 else f' stroke-dasharray="{dash}"' if dash else ""
    ending = "Z" if len(points) == 1 else ""  # a closed path of one point is drawn with its round cap
    return f'<path d="{f"M{path}{ending}" if points else ""}" stroke="{colour}"{kind}/>'
