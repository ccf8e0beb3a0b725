"""Figures of charts and of the theory tab: marks on their axes, as the browser drew them, and what they must show.

The figures follow from the lines of a run, the inputs of the tab and the closed forms.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from playwright.sync_api import Page

from fakes.shown_figures import PARTS, Claim, RunFigures, claim
from fakes.traces import jsonl
from specdemo.bench.published_tables import LEVIATHAN_2, LEVIATHAN_3
from specdemo.core import theory
from specdemo.ui.frames import read_traces
from specdemo.ui.run_figures import RunEstimate, estimate_lengths

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


LONGEST = 64  # tokens of a draft in the texts
SHORTER = 20  # and in the plot


@dataclass(frozen=True)
class Theory:
    """Coefficients of the closed forms, in steps of the baseline; tests/core/test_theory.py verifies the forms."""

    alpha: float
    c: float
    gamma: float
    v: float
    o: float
    c_hat: float

    def verification(self, gamma: float) -> float:
        if not gamma:
            return 1.0
        return 1 + (self.v - 1) * gamma / self.gamma if self.v > 1 else self.v

    def speedup(self, gamma: float) -> float:
        tokens = theory.expected_tokens(self.alpha, gamma)
        return theory.speedup(tokens, gamma, self.c, self.verification(gamma), self.o) if gamma else 1.0

    def theorem(self, gamma: float) -> float:
        return theory.walltime_improvement(self.alpha, gamma, self.c)

    def share(self, gamma: float) -> float:
        return theory.accepted_share(self.alpha, gamma) if gamma else math.nan

    def operations(self, gamma: float) -> float:
        return theory.operations(self.alpha, gamma, self.c_hat)

    def row(self, gamma: float) -> list[float]:
        """Cells of the table of draft lengths, after the length."""
        tokens = theory.expected_tokens(self.alpha, gamma)
        figures = [self.share(gamma), tokens, self.theorem(gamma), self.speedup(gamma)]
        return [*figures, self.operations(gamma), 1 / tokens]

    def best(self, longest: int = LONGEST, form: Callable[[float], float] | None = None) -> int:
        """Fastest draft length, the shortest of several."""
        speed = form or self.speedup
        return max(range(longest + 1), key=lambda gamma: (round(speed(gamma), 12), -gamma))


def of_run(run: RunFigures) -> Theory:
    """Coefficients that a compared run of a draft model measured."""
    lane = run.first
    drafted, steps = lane.all_drafted, len(lane.steps) - 1
    costs = [run.step_cost(part) or 0.0 for part in PARTS]
    sampled = sum(len(line["q"] or ()) for line in lane.steps)
    environment = lane.header["environment"]
    c_hat = environment["drafter_bytes"] / environment["target_bytes"] * sampled / drafted
    gamma = drafted / steps
    return Theory(lane.overlap or 0.0, costs[0] / gamma, gamma, costs[1], costs[2], c_hat)


def operations_of(run: RunFigures) -> float:
    """Operations per token that a run measured."""
    measured = of_run(run)
    return (1 + measured.gamma * (1 + measured.c_hat)) / (run.first.tokens_per_step or math.nan)


def run_words(run: RunFigures) -> Iterator[Claim]:
    at, lane, speedup = of_run(run), run.first, run.speedup()
    assert speedup and lane.acceptance is not None
    theorem = at.theorem(at.gamma)
    yield claim("T {}): α = {}, estimated", lane.recipe["temperature"], at.alpha)
    yield claim("accepted / drafted = {}; γ = {} draft tokens per step", lane.acceptance, at.gamma)
    yield claim("a draft token took c = {}, a verification pass v = {}, and the host o = {} per step", at.c, at.v, at.o)
    yield claim("The run was {}× as fast as AR decoding, {}% of Theorem {}.", speedup, 100 * speedup / theorem, 3.8)
    yield claim("this speed-up for α = {}.", theory.alpha_of_speedup(speedup, at.gamma, at.c))
    linear = theory.share_speedup(lane.acceptance, at.gamma, at.c)
    yield claim("The formula ({} + γα) / ({} + γc) predicts {}×.", 1, 1, linear)


def settings_words(at: Theory) -> Iterator[Claim]:
    best, of_theorem = at.best(), at.best(form=lambda gamma: at.theorem(gamma) if gamma else 1.0)
    yield claim(
        "Best γ: {} with v and o ({}×), {} by Theorem {} ({}×).",
        *(best, at.speedup(best), of_theorem, 3.8, at.theorem(of_theorem)),
    )
    yield claim("The rule of thumb √({}/c − {}) = {} ignores α.", 1, 1, theory.thumb_gamma(at.c))
    yield claim("at least ({} + α) / ({} + c) = {}×.", 1, 1, theory.least_improvement(at.alpha, at.c))
    yield claim("requires v = {} and o = {} (Corollary {})", 1, 0, 3.9)


def table_words(at: Theory) -> Iterator[Claim]:
    yield claim("Here, α = {}.", at.alpha)
    yield claim("speed-up, Theorem {}", 3.8)
    yield claim("Tokens per pass: ({} − α^(γ+{})) / ({} − α).", 1, 1, 1)
    yield claim("tokens / (γc + {}) by Theorem {}", 1, 3.8)
    yield claim("Theorem {}. Memory", 3.11)
    yield claim("section {}.", 3.4)


def table_rows(at: Theory, run: RunFigures) -> list[list[float | None]]:
    lane, measured = run.first, of_run(run)
    known = [measured.gamma, lane.acceptance, lane.tokens_per_step, None, run.speedup(), operations_of(run), None]
    forms: list[list[float | None]] = [
        [gamma, *at.row(gamma)] for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, at.gamma})
    ]
    return [*forms, known, [measured.gamma, *measured.row(measured.gamma)]]


Form = Callable[[float], float]


def curves(plot: str, at: Theory) -> list[Form]:
    """Curves of a plot; the last is at the sliders."""
    plain = replace(at, v=1.0, o=0.0)

    def of_alpha(form: Callable[[Theory], float], settings: Theory = at) -> Form:
        return lambda alpha: form(replace(settings, alpha=min(1.0, alpha)))

    def unbounded(alpha: float) -> float:
        return 1 / (1 - min(alpha, 1 - 1 / 12))

    if plot == "tokens":
        forms = [of_alpha(lambda s, g=g: theory.expected_tokens(s.alpha, g)) for g in (1, 3, 5, 7)]
        return [*forms, unbounded, of_alpha(lambda s: theory.expected_tokens(s.alpha, s.gamma))]
    if plot == "speed":
        forms = [of_alpha(lambda s, g=g: s.theorem(g)) for g in (1, 3, 10)]
        return [*forms, lambda _: 1.0, of_alpha(lambda s: s.speedup(s.gamma))]
    if plot == "gamma":
        return [lambda gamma: plain.speedup(gamma), lambda _: 1.0, at.speedup]
    if plot == "best":
        forms = [of_alpha(lambda s, c=c: replace(s, c=c).best(SHORTER), plain) for c in (0.01, 0.05, 0.2)]
        return [*forms, of_alpha(lambda s: s.best(SHORTER))]
    if plot == "ops":
        forms = [of_alpha(lambda s, g=g: s.operations(g)) for g in (1, 3, 10)]
        return [*forms, of_alpha(lambda s: s.operations(s.gamma))]
    return [lambda _: at.alpha, lambda gamma: at.share(max(gamma, 0.01))]


def dots(plot: str, at: Theory, run: RunFigures) -> list[tuple[float, float]]:
    lane, measured = run.first, of_run(run)
    heights = {
        "tokens": (theory.expected_tokens(at.alpha, at.gamma), lane.tokens_per_step),
        "speed": (at.speedup(at.gamma), run.speedup()),
        "gamma": (at.speedup(at.gamma), run.speedup()),
        "best": (at.gamma, measured.gamma),
        "ops": (at.operations(at.gamma), operations_of(run)),
        "share": (at.share(at.gamma), lane.acceptance),
    }[plot]
    across = [(s.gamma if plot in ("gamma", "share") else s.alpha) for s in (at, measured)]
    return [(x, y or math.nan) for x, y in zip(across, heights, strict=True)]


# --- published figures --------------------------------------------------------------------------------------------

# Chen et al. 2302.01318, Table 1, with the ratio of the latencies of drafter and target, 1.8 and 14.1 ms.
CHINCHILLA = (("XSum, nucleus", 1.92), ("XSum, greedy", 2.01), ("HumanEval, nucleus", 2.46))
GUIDE = ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5))  # of the practice guide: draft length, accepted / drafted
COSTLESS = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))  # Leviathan et al. 2211.17192, Table 1

Cells = Sequence[float | str]


def published_tables() -> list[list[Cells]]:
    """Rows of the published tables in their order, with the figures that follow from their inputs."""

    def form(alpha: float, gamma: float, c: float = 0.0) -> Theory:
        return Theory(alpha, c, gamma, 1.0, 0.0, 0.0)

    guide: list[Cells] = []
    for gamma, share in GUIDE:
        alpha = theory.alpha_of_share(share, gamma)
        guide.append(
            (gamma, share, 0.1, theory.share_speedup(share, gamma, 0.1), alpha, form(alpha, gamma, 0.1).theorem(gamma))
        )
    costless = [(a, g, form(a, g).operations(g), form(a, g).theorem(g)) for a, g in COSTLESS]
    measured: list[Cells] = []
    for task, drafter, temperature, gamma, alpha, c, speedup in LEVIATHAN_2:
        theorem = form(alpha, gamma, c).theorem(gamma)
        inputs = task, f"T5-{drafter}", temperature, gamma, c, alpha
        measured.append((*inputs, speedup, theorem, 100 * speedup / theorem))
    chinchilla = [
        (task, 4, 1.8 / 14.1, speedup, theory.alpha_of_speedup(speedup, 4, 0.128)) for task, speedup in CHINCHILLA
    ]
    return [guide, costless, measured, [*LEVIATHAN_3], chinchilla]


# --- the worked example --------------------------------------------------------------------------------------------

Probs = Sequence[float]


def example_words(p: Probs, q: Probs) -> Iterator[Claim]:
    beta, kl = theory.overlap(p, q), theory.divergence(p, q)
    largest = theory.largest_ratio(p, q)
    yield claim("probability min({}, p/q)", 1)
    yield claim("The acceptance rate is β = {} ,", beta)
    yield claim("With probability {}, a correction", 1 - beta)
    yield claim("max(p − q, {})", 0)
    yield claim("Lemma {}: β = {} − D_LK", 3.3, 1)
    yield claim("the sum of |p − q|, {}.", 1 - beta)
    yield claim("accepted + ({} − β) · residual", 1)
    yield claim("M = max p/q = {}. It accepts {}/M = {} of", largest, 1, 1 / largest)
    yield claim("of variance {}:", theory.weight_variance(p, q))
    yield claim("KL(p‖q) = {}. Pinsker: β ≥ {} − √(KL/{}) = {}.", kl, 1, 2, theory.pinsker(kl))
    yield claim("β ≥ e^(−KL)/{} = {}.", 2, theory.bretagnolle_huber(kl))
    yield claim("The often-quoted {}/({} + KL) = {} is not a bound.", 1, 1, 1 / (1 + kl))
    constant = 1 - theory.divergence((0.5, 0.5), (0.6, 0.4))
    yield claim("({} − KL)/γ: p = ({}, {}) and q = ({}, {})", 1, 0.5, 0.5, 0.6, 0.4)
    yield claim("have β = {}, but {} − KL = {} at γ {}", 0.9, 1, constant, 1)


def example_rows(p: Probs, q: Probs) -> list[list[float]]:
    """Cells of the table: p, q, accepted, excess, residual, and the sum in its last cell."""
    beta = sum(map(min, p, q))
    rows = []
    for a, b in zip(p, q, strict=True):
        excess = max(a - b, 0.0)
        rows.append([a, b, min(a, b), excess, excess / (1 - beta), min(a, b), excess, a])
    return rows


def estimates(run: RunFigures, longest: int) -> dict[int, tuple[float, float, list[float]]]:
    """Tokens per pass, tokens per second, and ordered speeds of 95 % of the simulated runs, by draft length.

    tests/core/test_theory.py verifies the estimate.
    """
    opened = read_traces(jsonl(*(line for lane in run.lanes.values() for line in (lane.header, *lane.steps))))
    estimate = estimate_lengths(opened.lanes["spec"], opened.lanes.get("ar"))
    assert isinstance(estimate, RunEstimate) and estimate.rows[-1].gamma == longest
    return {row.gamma: (row.tokens_per_pass, row.speed, [row.low] * 10 + [row.high] * 10) for row in estimate.rows}
