"""Theory tab in a real browser, compared with the traces, the closed forms and the inputs of the tab."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fakes.chart_figures import (
    Axis,
    Theory,
    check_bars,
    check_curves,
    curves,
    dots,
    example_rows,
    example_words,
    published_tables,
    read_chart,
    run_words,
    settings_words,
    table_rows,
    table_words,
)
from fakes.shown_figures import RunFigures, agrees, claim, unexplained
from fakes.traces import ALL_KEPT, PREFILL, REJECTION, end, golden, header
from playwright.sync_api import Page, expect

from e2e.page_fixtures import cells, expect_fit, explained, resize, run, show, spans, stop
from specdemo.core.theory import block_accepted

pytestmark = [pytest.mark.slow, pytest.mark.browser]

DOT = "var(--dot-set)"
AT = Theory(alpha=0.7, c=0.1, gamma=4, v=1.3, o=0.1, c_hat=0.1)
PLOTS = ("tokens", "speed", "gamma", "best", "ops", "share")
P, Q = (0.45, 0.32, 0.18, 0.05), (0.20, 0.30, 0.15, 0.35)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def page(file_tab: Page) -> Page:
    """Tab of the browser, at the tab of the page."""
    file_tab.bring_to_front()
    file_tab.get_by_role("tab", name="Theory").click()
    expect(file_tab.locator("#theory-words li")).to_have_count(2)
    return file_tab


def enter(page: Page, name: str, value: float | str) -> None:
    field = page.locator(f"#theory-{name} input[type=number]")
    field.fill(str(value))
    field.blur()


# --- closed forms and the displayed run -----------------------------------------------------------------------------


def test_every_figure_follows_from_run_and_sliders(page: Page) -> None:
    lines = golden("draft", "ar")
    figures = RunFigures.of(lines)
    show(page, *lines)
    for name in ("alpha", "c", "gamma", "v", "o", "c_hat"):
        enter(page, name.replace("_", "-"), getattr(AT, name))
    expect(page.locator("#theory-by-gamma")).to_contain_text("α = 0.7")
    expect(page.locator("#theory-by-gamma tbody tr").first.locator("td").nth(5)).to_have_text("1.24")
    explained(page, "#theory-run", lambda _: run_words(figures))
    explained(page, "#theory-words", lambda _: settings_words(AT))
    explained(page, "#theory-by-gamma :is(p, th)", lambda _: table_words(AT))
    shown = cells(page.locator("#theory-by-gamma tbody tr"))
    for row, values in zip(shown, table_rows(AT, figures), strict=True):
        row[0] = row[0].removeprefix("this run, ").partition(":")[0]
        for cell, value in zip(row, values, strict=True):
            assert cell == "–" if value is None else agrees(cell, value), (row, values)
    for plot in PLOTS:
        check_plot(read_chart(page, f"#plot-{plot}"), plot, figures)
    enter(page, "calls-first", "1")  # draws the calls of this run
    steps = figures.first.steps
    expect(page.locator("#theory-calls .draft title").first).to_contain_text(
        f"drafter call 1 of {len(steps[1]['draft'])}"
    )
    check_timeline(page, figures)
    page.locator("#theory-set").click()  # the sliders are set to the run
    overlap = f"{figures.first.overlap:.2f}".rstrip("0")
    expect(page.locator("#theory-alpha input[type=number]")).to_have_value(overlap)
    gamma = round(figures.first.all_drafted / (len(steps) - 1))
    expect(page.locator("#theory-gamma input[type=number]")).to_have_value(str(gamma))


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


def test_words_follow_the_sliders_also_after_an_incomplete_number(page: Page) -> None:
    words = page.locator("#theory-words")
    for name, value in (("c", 0.1), ("gamma", 4), ("v", 2), ("alpha", 0.05)):
        enter(page, name, value)
    expect(words).to_contain_text("Use autoregressive decoding")
    page.locator("#theory-alpha input[type=number]").fill("")
    enter(page, "alpha", 0.7)
    expect(words).to_contain_text("α > c")


def test_timeline_shows_the_displayed_run(page: Page) -> None:
    show(page, header(), PREFILL, REJECTION, ALL_KEPT, end())
    enter(page, "calls-first", 100)
    expect(page.locator("#theory-calls")).to_contain_text("choose an earlier first token")
    enter(page, "calls-first", 0)
    expect(page.locator("#theory-calls .draft title").first).to_contain_text("drafter call 1 of 3: 'b' accepted")


def touched_during(page: Page, tokens: int) -> int:
    """Changes of the plots while `tokens` are shown."""
    page.evaluate("window.touched = 0")
    spans(page, page.locator(".lane .tok").count() + tokens)
    return int(page.evaluate("window.touched"))


def test_tab_is_not_drawn_while_tokens_stream(page: Page) -> None:
    page.evaluate("document.getElementById('plot-speed').replaceChildren()")
    expect(page.locator(f'.curves .dot[fill="{DOT}"]')).to_have_count(6)  # all plots are drawn, also emptied ones
    run(page, "endless")
    spans(page, 20)
    enter(page, "alpha", 0.36)  # a moved slider redraws, as the events of earlier runs can
    expect(page.locator("#theory-by-gamma")).to_contain_text("α = 0.36")
    expect(page.locator("#theory-run")).to_contain_text("A run is in progress")
    page.evaluate("""() => {
        const watch = new MutationObserver((changes) => { window.touched += changes.length; });
        for (const plot of document.querySelectorAll(".curves")) watch.observe(plot, {childList: true, subtree: true});
    }""")
    assert 0 in [touched_during(page, 40) for _ in range(3)]
    stop(page)


def test_published_tables_are_those_of_the_papers_and_follow_from_their_inputs(page: Page) -> None:
    page.locator("#theory-papers button").first.click()
    tables = page.locator("#theory-papers table")
    expect(tables).to_have_count(5)
    for table, known in zip(tables.all(), published_tables(), strict=True):
        for row, values in zip(cells(table.locator("tbody tr")), known, strict=True):
            for cell, value in zip(row, values, strict=True):
                known_cell = cell == value if isinstance(value, str) else agrees(cell.removesuffix("%"), value)
                assert known_cell, (row, values)


# --- the worked example -----------------------------------------------------------------------------------------------


def test_every_figure_of_the_worked_example_follows_from_p_and_q(page: Page) -> None:
    expect(page.locator("#theory-residual")).to_contain_text("β = 0.700")
    explained(page, "#theory-residual :is(p, th)", lambda _: example_words(P, Q))
    shown = cells(page.locator("#theory-residual tbody tr"))
    for (_, *row), values in zip(shown, example_rows(P, Q), strict=True):
        figures = re.findall(r"[\d.]+", " ".join(row))
        assert all(map(agrees, figures, values)) and len(figures) == len(values), (row, values)
    stacks = [
        [min(a, b), max(a - b, 0.0) if first else 0.0, 0.0 if first else max(b - a, 0.0)]
        for a, b in zip(P, Q, strict=True)
        for first in (True, False)
    ]
    check_bars(read_chart(page, "#theory-parts"), stacks)


def test_worked_example_and_trial_follow_the_inputs(page: Page) -> None:
    example, trial = page.locator("#theory-residual"), page.locator("#theory-trial")
    for value, words in (
        ("0.45", "q sums to 1.1 and was normalised."),
        ("-1", "q(d) is -1, but probabilities must be at least 0."),
        ("", "q(d) must be a number, not empty."),
    ):
        enter(page, "q-d", value)
        expect(example).to_contain_text(words)
    page.locator("#theory-draw").click()
    expect(trial).to_contain_text("q(d) must be a number, not empty.")
    enter(page, "q-d", 0.35)
    expect(example).to_contain_text("β = 0.700")
    follows = "The output follows p within statistical error. This rule is exact"
    for rule, words in (("top1:", "The output differs from p. The rule is lossy."), ("rejection:", follows)):
        page.locator("#theory-rule input").click()
        page.get_by_role("option", name=rule).last.click()
        results = [drawn_again(page) for _ in range(1 if rule == "top1:" else 2)]
        assert any(words in result for result in results)  # an exact rule fails both times once in 1,000,000
    expect(page.locator("#theory-shares .bar")).to_have_count(12)


def drawn_again(page: Page) -> str:
    """Draw tokens; return the text about them."""
    words = page.locator("#theory-trial p")
    before = words.inner_text()
    page.locator("#theory-draw").click()
    expect(words).not_to_have_text(before, use_inner_text=True)
    return words.inner_text()


def test_both_rules_verify_the_same_draft(page: Page) -> None:
    text = page.locator("#theory-block")
    expect(text).to_contain_text("Both outputs follow p.")
    expect(text.locator("tbody tr")).to_have_count(5)  # four draft tokens and the target's
    for token, ratio, *_ in cells(text.locator("tbody tr"))[:-1]:
        assert agrees(ratio, P["abcd".index(token)] / Q["abcd".index(token)])
    enter(page, "block-length", 3)
    expect(text.locator("tbody tr")).to_have_count(4)
    beta = sum(map(min, P, Q))
    means = claim("On average: {} and {} of {}.", beta + beta**2 + beta**3, block_accepted(P, Q, 3), 3)
    shown = text.locator("p").first.inner_text()
    assert len(re.findall(r"\d", unexplained(shown, [means]))) == 2  # tokens that each rule accepted
    before = text.locator("tbody").inner_text()
    page.locator("#theory-verify").click()
    expect(text.locator("tbody")).not_to_have_text(before, use_inner_text=True)  # the draws differ


# --- pictures and layout ----------------------------------------------------------------------------------------------


def test_charts_are_saved_as_pictures(page: Page) -> None:
    names: list[str] = []

    def saved_bytes(selector: str) -> bytes:
        with page.expect_download() as download:
            page.locator(selector).click()
        names.append(download.value.suggested_filename)
        return Path(download.value.path()).read_bytes()

    drawn = ElementTree.fromstring(saved_bytes("#plot-speed [data-save=svg]"))
    styles = [path.get("style", "") for path in drawn.iter(f"{SVG}path")]
    assert len(styles) > 4 and all("stroke: rgb" in style for style in styles)
    assert "Speed-up" in [text.text for text in drawn.iter(f"{SVG}text")]
    assert saved_bytes("#plot-speed [data-save=png]").startswith(b"\x89PNG")
    bars = ElementTree.fromstring(saved_bytes("#theory-parts [data-save=svg]"))
    assert len(list(bars.iter(f"{SVG}rect"))) > 6
    assert names == ["specdemo-plot-speed.svg", "specdemo-plot-speed.png", "specdemo-theory-parts.svg"]


def test_narrow_page_does_not_overflow_in_both_themes(page: Page) -> None:
    resize(page, 390)
    expect(page.locator("#plot-share path.line")).to_have_count(2)
    expect(page.locator("#theory-residual table")).to_be_visible()
    expect_fit(page)
    widths = page.eval_on_selector_all("chart-view", "plots => plots.map(plot => plot.clientWidth)")
    assert min(filter(None, widths)) >= 300
    strokes = "shapes => shapes.map(shape => getComputedStyle(shape).stroke)"
    themes = []
    for dark in (False, True):  # existing plots change theme
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
        themes.append(page.eval_on_selector_all("#plot-tokens :is(path.line, .dot)", strokes))
        assert len(set(themes[-1])) >= 7 and all(colour.startswith("rgb") for colour in themes[-1])
    assert not set(themes[0]) & set(themes[1])
