"""Figures of charts and of the theory tab, compared with the lines of the traces and with the inputs of the tab."""

import math
import re
from typing import Any

import pytest
from fakes.chart_scales import READ_CHARTS, Axis, check_bars, check_curves
from fakes.shown_figures import PARTS, Claim, RunFigures, agrees, claim, unexplained
from fakes.theory_figures import (
    Theory,
    block_accepted,
    curves,
    dots,
    example_rows,
    example_words,
    published_tables,
    run_words,
    settings_words,
    table_rows,
    table_words,
    trial_words,
)
from fakes.trace_lines import golden
from fakes.trace_records import PREFILL, end, header, step
from fakes.what_if_figures import estimates
from playwright.sync_api import Page, expect

from e2e.page_fixtures import explained, set_number, show

pytestmark = [pytest.mark.slow, pytest.mark.browser]

AT = Theory(alpha=0.7, c=0.1, gamma=4, v=1.3, o=0.1, c_hat=0.1)
PLOTS = ("tokens", "speed", "gamma", "best", "ops", "share")
P, Q = (0.45, 0.32, 0.18, 0.05), (0.20, 0.30, 0.15, 0.35)
ROWS = "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"


def losing() -> list[dict[str, Any]]:
    """A run with too many guesses: its passes take twice as long as those of its baseline."""
    times = {"draft_s": 0.001, "verify_s": 0.01, "beta": [0.8, 0.2, None]}
    steps = [step(i, pieces=["x", "y"], draft=("x", "z", "w"), accepted=(0,), **times) for i in range(1, 41)]
    plain = [step(i, pieces=["x"], draft_s=0.0, verify_s=0.0045) for i in range(1, 81)]
    return [header(), PREFILL, *steps, end(), header("ar"), PREFILL, *plain, end()]


def opened(page: Page, *names: str) -> RunFigures:
    lines = losing() if names == ("losing",) else golden(*names)
    run = RunFigures.of(lines)
    show(page, *lines)
    expect(page.locator("#lane-spec .round")).to_have_count(len(run.first.steps))
    page.evaluate("document.getElementById('figures').open = true")
    return run


def chart(page: Page, selector: str) -> dict[str, Any]:
    (drawn,) = page.evaluate(READ_CHARTS, f"{selector} svg.chart")
    return drawn


@pytest.mark.parametrize("name", ["draft", "hybrid", "nasd"])
def test_bars_of_a_run_are_its_figures_on_the_axes(file_tab: Page, name: str) -> None:
    run = opened(file_tab, name, "ar")
    positions = chart(file_tab, "#chart-positions")
    shares = [[100 * passed / tested] for passed, tested in run.first.positions]
    check_bars(positions, shares, " %")
    names = [f"{k} (n {tested})" for k, (_, tested) in enumerate(run.first.positions, 1)]
    assert [text for _, text in positions["across"]] == names
    times = chart(file_tab, "#chart-times")
    check_bars(times, [[1000 * line[part] for part in PARTS] for line in run.first.steps[1:]])
    across = Axis.of(times["across"])
    centres = [across(x + width / 2) for x, _, width, *_ in times["bars"]]
    assert centres == pytest.approx([*range(1, len(run.first.steps))] * len(PARTS), abs=across.error())


@pytest.mark.parametrize("names", [("draft", "ar"), ("draft-egag", "ar"), ("losing",)])
def test_estimates_of_other_lengths_follow_from_the_trace(file_tab: Page, names: tuple[str, ...]) -> None:
    """Speeds exactly; the limits of 95 % of the runs within the spread of an own simulation."""
    run = opened(file_tab, *names)
    rows = file_tab.locator("#chart-whatif tr:not(:first-child)").evaluate_all(ROWS)
    known = estimates(run, len(rows) - 1)
    drawn = chart(file_tab, "#chart-whatif")
    check_curves(drawn, [lambda gamma: _between(known, gamma)])
    up, across = Axis.of(drawn["up"]), Axis.of(drawn["across"])
    for (x, y, *_), (gamma, (_, speed, _)) in zip(drawn["dots"], known.items(), strict=False):
        assert (across(x), up(y)) == (pytest.approx(gamma, abs=across.error()), pytest.approx(speed, abs=up.error()))
    for (length, tokens, rate, limits), (gamma, (per_pass, speed, simulated)) in zip(rows, known.items(), strict=True):
        assert int(length) == gamma and agrees(tokens, per_pass) and agrees(rate, speed), (length, per_pass, speed)
        low, high = map(float, limits.split("–"))
        tenth = len(simulated) // 10
        assert simulated[0] * 0.97 <= low <= simulated[tenth] * 1.03, (gamma, low, simulated[::tenth])
        assert simulated[-tenth] * 0.97 <= high <= simulated[-1] * 1.03, (gamma, high, simulated[::tenth])
    advised = check_advice(file_tab, run, known, [[float(x) for x in limits.split("–")] for *_, limits in rows])
    assert advised or names != ("losing",)


def check_advice(page: Page, run: RunFigures, known: dict[int, Any], limits: list[list[float]]) -> bool:
    """Return True for a best length: the fastest, if its range is above a measured speed that the estimate contains."""
    recipe, speed = run.first.recipe, run.first.speed or 0.0
    gamma = recipe["gamma"] if recipe.get("policy", "fixed") == "fixed" else None
    best = max(known, key=lambda length: known[length][1])
    low, high = limits[best]
    fits = gamma is None or limits[gamma][0] <= speed <= limits[gamma][1]
    advised = fits and best != gamma and low > speed
    words = page.locator("#chart-whatif p").inner_text()
    guesses = "{} guess at a time" if best == 1 else "{} guesses at a time"
    claims = [
        claim(f"Estimated best: {guesses}, {{}}–{{}} tokens/s.", *((best, low, high) if advised else (None,) * 3)),
        claim("Measured (+): {} guesses, {} tokens/s.", gamma, speed),
        claim("Measured: {} tokens/s.", speed),
    ]
    assert not re.search(r"\d", unexplained(words, claims)), words
    assert ("Estimated best" in words) == advised and ("No advice" in words) == (not fits)
    assert page.locator("#chart-whatif .dot").count() == len(known) + advised
    verdict = page.locator("#verdict").text_content() or ""
    named = claim(f"With {guesses}, the estimate is {{}} to {{}} tokens per second", best, low, high)
    assert ("the estimate is" in verdict) == (advised and (run.speedup() or 1) < 0.95)
    assert "the estimate is" not in unexplained(verdict, [named])
    return advised


def _between(known: dict[int, Any], gamma: float) -> float:
    """Speed on the line between two lengths."""
    low = min(math.floor(gamma), max(known) - 1) if gamma < max(known) else max(known) - 1
    share = gamma - low
    return (1 - share) * known[low][1] + share * known[low + 1][1]


# --- theory tab ----------------------------------------------------------------------------------------------------


def test_every_figure_of_the_theory_follows_from_run_and_sliders(file_tab: Page) -> None:
    run = opened(file_tab, "draft", "ar")
    file_tab.get_by_role("tab", name="Theory").click()
    expect(file_tab.locator("#theory-words li")).to_have_count(2)
    for name in ("alpha", "c", "gamma", "v", "o", "c_hat"):
        set_number(file_tab, f"theory-{name.replace('_', '-')}", getattr(AT, name))
    expect(file_tab.locator("#theory-by-gamma")).to_contain_text("α = 0.7")
    expect(file_tab.locator("#theory-by-gamma tbody tr").first.locator("td").nth(5)).to_have_text("1.24")
    explained(file_tab, "#theory-run", lambda _: run_words(run))
    explained(file_tab, "#theory-words", lambda _: settings_words(AT))
    explained(file_tab, "#theory-by-gamma :is(p, th)", lambda _: table_words(AT))
    shown = file_tab.locator("#theory-by-gamma tbody tr").evaluate_all(ROWS)
    for cells, values in zip(shown, table_rows(AT, run), strict=True):
        cells[0] = cells[0].removeprefix("this run, ").partition(":")[0]
        for cell, value in zip(cells, values, strict=True):
            assert cell == "–" if value is None else agrees(cell, value), (cells, values)
    for plot in PLOTS:
        check_plot(chart(file_tab, f"#plot-{plot}"), plot, run)
    check_timeline(file_tab, run)


PUBLISHED = """tables => tables.map((table) => [...table.querySelectorAll("tbody tr")]
    .map((row) => [...row.cells].map((cell) => cell.textContent.trim())))"""


def test_published_tables_are_those_of_the_papers_and_follow_from_their_inputs(file_tab: Page) -> None:
    file_tab.get_by_role("tab", name="Theory").click()
    file_tab.locator("#theory-papers button").first.click()
    expect(file_tab.locator("#theory-papers table")).to_have_count(5)
    shown = file_tab.locator("#theory-papers table").evaluate_all(PUBLISHED)
    for table, known in zip(shown, published_tables(), strict=True):
        for cells, values in zip(table, known, strict=True):
            for cell, value in zip(cells, values, strict=True):
                assert cell == value if isinstance(value, str) else agrees(cell.removesuffix("%"), value), (
                    cells,
                    values,
                )
    explained(file_tab, "#theory-papers :is(p, th)", lambda _: published_words())


def published_words() -> list[Claim]:
    return [
        claim("({} + γα) / ({} + γc)", 1, 1),
        claim("Theorem {}", 3.8),
        claim("Table {}, computed for c = ĉ = {}.", 1, 0),
        claim("Table {}: T5-XXL on a TPU v4, batch size {})", 2, 1),
        claim("Table {})", 3),
        claim("Thm {}", 3.8),
        claim("alpha, T = {} alpha, T = {}", 0, 1),
        claim("{} , Table {}: Chinchilla {}B with a drafter of {}B, batch size {}.", 2302.01318, 1, 70, 4, 1),
    ]


def check_plot(drawn: dict[str, Any], plot: str, run: RunFigures) -> None:
    check_curves(drawn, curves(plot, AT))
    across, up = Axis.of(drawn["across"]), Axis.of(drawn["up"])
    for (x, y, *_), dot in zip(drawn["dots"], dots(plot, AT, run), strict=True):
        assert across(x) == pytest.approx(dot[0], abs=across.error()), (plot, dot)
        assert up(y) == pytest.approx(dot[1], abs=up.error()), (plot, dot)
    lengths = {"tokens": "1 3 5 7", "speed": "1 3 10", "ops": "1 3 10", "best": "0.01 0.05 0.2", "gamma": "3.8"}
    labelled = {number for label in drawn["labels"] for number in re.findall(r"[\d.]+", label)}
    assert labelled == {*lengths.get(plot, "").split()}


BLOCKS = """() => [...document.querySelectorAll("#theory-calls rect.block")].map((block) =>
    [Number(block.getAttribute("x")), Number(block.getAttribute("width")), block.textContent])"""
TIMES = """() => [...document.querySelectorAll("#theory-calls text.axis")].map((text) =>
    [Number(text.getAttribute("x")), text.textContent])"""


def check_timeline(page: Page, run: RunFigures) -> None:
    """Titles of all calls are durations of the traces, and their widths those on the axis."""
    axis = Axis.of(page.evaluate(TIMES), " ms")
    durations = [
        1000 * seconds
        for lane in run.lanes.values()
        for line in lane.steps
        for seconds in (line["verify_s"], line["draft_s"] / max(1, len(line["draft"])))
    ]
    blocks = page.evaluate(BLOCKS)
    assert blocks
    for x, width, words in blocks:
        (shown,) = re.findall(r"\((\d+\.\d\d) ms\)$", words)
        assert any(agrees(shown, duration) for duration in durations), words
        cut = x + width > 959
        assert axis(width) - axis(0) <= float(shown) + axis.error(1) and (
            cut or axis(width) - axis(0) == pytest.approx(float(shown), abs=axis.error(1) + 0.005)
        )


def test_every_figure_of_the_worked_example_follows_from_p_and_q(file_tab: Page) -> None:
    file_tab.get_by_role("tab", name="Theory").click()
    expect(file_tab.locator("#theory-residual")).to_contain_text("β = 0.700")
    explained(file_tab, "#theory-residual :is(p, th)", lambda _: example_words(P, Q))
    shown = file_tab.locator("#theory-residual tbody tr").evaluate_all(ROWS)
    for (_, *cells), values in zip(shown, example_rows(P, Q), strict=True):
        figures = re.findall(r"[\d.]+", " ".join(cells))
        assert all(map(agrees, figures, values)) and len(figures) == len(values), (cells, values)
    pairs = [*zip(P, Q, strict=True)]
    stacks = [
        [min(a, b), max(a - b, 0.0) if first else 0.0, 0.0 if first else max(b - a, 0.0)]
        for a, b in pairs
        for first in (True, False)
    ]
    check_bars(chart(file_tab, "#theory-parts"), stacks)
    check_trial(file_tab)
    check_block(file_tab)


def check_trial(page: Page) -> None:
    page.locator("#theory-draw").click()
    expect(page.locator("#theory-trial")).to_contain_text("10,000 tokens")
    rows = page.locator("#theory-trial tbody tr").evaluate_all(ROWS)
    drawn = [float(cells[3]) for cells in rows]
    assert sum(drawn) == pytest.approx(1, abs=0.003)
    for (_, *cells), a, b, share in zip(rows, P, Q, drawn, strict=True):
        assert agrees(cells[0], a) and agrees(cells[1], b)
        assert float(cells[3].replace("−", "-")) == pytest.approx(share - a, abs=0.0011)
    text = page.locator("#theory-trial p").inner_text()
    distance = float(re.findall(r"tokens: ([\d.]+)\.", text)[0])
    assert distance == pytest.approx(sum(abs(x - a) for x, a in zip(drawn, P, strict=True)) / 2, abs=0.0011)
    accepted, tested, steps = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:of|tested|steps)", text))
    assert tested == steps and 10_000 <= accepted + steps <= 10_001  # a step of 1 guess gives 1 or 2 tokens
    known = Claim("{} of {} tested tokens in {} steps", [(accepted, tested, steps)])
    rest = unexplained(text, [*trial_words(P, 10_000, distance), known])
    assert not re.search(r"\d", rest), rest


def check_block(page: Page) -> None:
    """Bounds and outcomes of random draws."""
    rows = page.locator("#theory-block tbody tr").evaluate_all(ROWS)[:-1]
    beta = sum(map(min, P, Q))
    weight, kept = 1.0, {3: 0, 4: 0}
    for i, cells in enumerate(rows):
        token = "abcd".index(cells[0])
        ratio, draw = P[token] / Q[token], float(cells[2])
        assert agrees(cells[1], ratio)
        weight = min(1.0, weight * ratio)
        rest = sum(max(weight * a - b, 0.0) for a, b in zip(P, Q, strict=True))
        bounds = {3: min(1.0, ratio), 4: weight if i == len(rows) - 1 else rest / (rest + 1 - weight or 1.0)}
        for column, bound in bounds.items():
            if cells[column] == "not tested":
                continue
            value, _, outcome = cells[column].partition(": ")
            assert agrees(value, bound), (cells, bound)
            kept[column] += outcome == "accepted"
            if column == 3:
                assert (outcome == "accepted") == (draw < bound)
    text = page.locator("#theory-block p").first.inner_text()
    mean = sum(beta**k for k in range(1, len(rows) + 1))
    known = [
        Claim("Accepted: {} token by token, {} as a block.", [(kept[3], kept[4])]),
        Claim("On average: {} and {} of {}.", [(mean, block_accepted(P, Q, len(rows)), len(rows))]),
    ]
    assert not re.search(r"\d", unexplained(text, known)), text
