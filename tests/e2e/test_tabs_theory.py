"""Theory tab in a real browser, compared with the trace and the closed forms."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.shown_figures import RunFigures
from fakes.trace_lines import golden
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, end, header
from playwright.sync_api import Locator, Page, expect

from e2e.page_fixtures import resize, run, show, spans, stop

pytestmark = [pytest.mark.slow, pytest.mark.browser]

DOT = "var(--dot-set)"


@pytest.fixture
def page(file_tab: Page) -> Page:
    """Tab of the browser, at the tab of the page."""
    file_tab.bring_to_front()
    file_tab.get_by_role("tab", name="Theory").click()
    expect(file_tab.locator("#theory-words li")).to_have_count(2)
    return file_tab


def enter(page: Page, name: str, value: str) -> None:
    field = page.locator(f"#theory-{name} input[type=number]")
    field.fill(value)
    field.blur()


def dot(page: Page, plot: str, colour: str) -> Locator:
    return page.locator(f'#plot-{plot} .dot[fill="{colour}"]')


def forms(page: Page, gamma: str) -> Locator:
    """Row of a draft length: its label, shares, tokens, speed-ups by Theorem 3.8 and with v and o."""
    return page.locator("#theory-by-gamma tbody tr").filter(has=page.get_by_role("cell", name=gamma, exact=True).first)


def test_sliders_update_texts_and_curves(page: Page) -> None:
    words = page.locator("#theory-words")
    for name, value in (("alpha", "0.8"), ("c", "0.1"), ("gamma", "4")):
        enter(page, name, value)
    expect(forms(page, "4").locator("td").nth(3)).to_have_text("2.40")
    expect(words).to_contain_text("Best γ: 6 with v and o (2.47×)")
    chosen = dot(page, "speed", DOT)
    before = chosen.get_attribute("cy") or ""
    enter(page, "v", "2")
    expect(forms(page, "4").locator("td").nth(4)).to_have_text("1.40")
    expect(chosen).not_to_have_attribute("cy", before)
    enter(page, "alpha", "0.05")
    expect(words).to_contain_text("Use autoregressive decoding")
    page.locator("#theory-alpha input[type=number]").fill("")  # incomplete number
    enter(page, "alpha", "0.7")
    expect(words).to_contain_text("α > c")


def test_the_sliders_can_be_set_to_the_run(page: Page) -> None:
    lines = golden("draft", "ar")
    figures = RunFigures.of(lines).first
    show(page, *lines)
    page.locator("#theory-set").click()
    expect(page.locator("#theory-alpha input[type=number]")).to_have_value(f"{figures.overlap:.2f}".rstrip("0"))
    gamma = round(figures.all_drafted / (len(figures.steps) - 1))
    expect(page.locator("#theory-gamma input[type=number]")).to_have_value(str(gamma))


def test_timeline_shows_the_displayed_run(page: Page) -> None:
    show(page, header(), PREFILL, REJECTION, ALL_KEPT, end())
    enter(page, "calls-first", "100")
    expect(page.locator("#theory-calls")).to_contain_text("choose an earlier first token")
    enter(page, "calls-first", "0")
    expect(page.locator("#theory-calls .draft title").first).to_contain_text("drafter call 1 of 3: 'b' accepted")


def test_charts_are_saved_as_pictures(page: Page) -> None:
    names: list[str] = []

    def saved_bytes(selector: str) -> bytes:
        with page.expect_download() as download:
            page.locator(selector).click()
        names.append(download.value.suggested_filename)
        return Path(download.value.path()).read_bytes()

    curves = ElementTree.fromstring(saved_bytes("#plot-speed [data-save=svg]"))
    styles = [path.get("style", "") for path in curves.iter("{http://www.w3.org/2000/svg}path")]
    assert len(styles) > 4 and all("stroke: rgb" in style for style in styles)
    assert saved_bytes("#plot-speed [data-save=png]").startswith(b"\x89PNG")
    bars = ElementTree.fromstring(saved_bytes("#theory-parts [data-save=svg]"))
    assert len(list(bars.iter("{http://www.w3.org/2000/svg}rect"))) > 6
    assert names == ["specdemo-plot-speed.svg", "specdemo-plot-speed.png", "specdemo-theory-parts.svg"]
    assert "Speed-up" in [text.text for text in curves.iter("{http://www.w3.org/2000/svg}text")]


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
    enter(page, "alpha", "0.36")  # a moved slider redraws, as the events of earlier runs can
    expect(page.locator("#theory-by-gamma")).to_contain_text("α = 0.36")
    expect(page.locator("#theory-run")).to_contain_text("A run is in progress")
    page.evaluate("""() => {
        const watch = new MutationObserver((changes) => { window.touched += changes.length; });
        for (const plot of document.querySelectorAll(".curves")) watch.observe(plot, {childList: true, subtree: true});
    }""")
    assert 0 in [touched_during(page, 40) for _ in range(3)]
    stop(page)


def test_worked_example_and_trial_follow_the_inputs(page: Page) -> None:
    example = page.locator("#theory-residual")
    expect(example).to_contain_text("β = 0.700")
    expect(page.locator("#theory-parts .bar").first).to_be_visible()
    enter(page, "q-d", "0.45")
    expect(example).to_contain_text("q sums to 1.1 and was normalised.")
    enter(page, "q-d", "-1")
    expect(example).to_contain_text("q(d) is -1, but probabilities must be at least 0.")
    enter(page, "q-d", "")
    expect(example).to_contain_text("q(d) must be a number, not empty.")
    page.locator("#theory-draw").click()
    expect(page.locator("#theory-trial")).to_contain_text("q(d) must be a number, not empty.")
    enter(page, "q-d", "0.35")
    expect(example).to_contain_text("β = 0.700")
    expect(example.locator("tbody tr")).to_have_count(4)
    exact = "The output follows p within statistical error. This rule is exact"  # fails once in 1,000 test runs
    for rule, words in (("top1:", "The output differs from p. The rule is lossy."), ("rejection:", exact)):
        page.locator("#theory-rule input").click()
        page.get_by_role("option", name=rule).last.click()
        page.locator("#theory-draw").click()
        expect(page.locator("#theory-trial")).to_contain_text(words)
    expect(page.locator("#theory-shares .bar")).to_have_count(12)


def test_both_rules_verify_the_same_draft(page: Page) -> None:
    text = page.locator("#theory-block")
    expect(text).to_contain_text("Both outputs follow p.")
    expect(text.locator("tbody tr")).to_have_count(5)  # four draft tokens and the target's
    enter(page, "p-a", "0.55")
    expect(page.locator("#theory-residual")).to_contain_text("p sums to 1.1 and was normalised.")
    enter(page, "p-a", "0.45")
    enter(page, "block-length", "3")
    expect(text).to_contain_text("On average: 1.533 and 1.583 of 3.")
    expect(text.locator("tbody tr")).to_have_count(4)
    before = text.inner_text()
    page.locator("#theory-verify").click()
    expect(text).not_to_have_text(before)  # the draws differ


def test_narrow_page_does_not_overflow_in_both_themes(page: Page) -> None:
    resize(page, 390)
    expect(page.locator("#plot-share path.line")).to_have_count(2)
    expect(page.locator("#theory-residual table")).to_be_visible()
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    widths = page.eval_on_selector_all("chart-view", "plots => plots.map(plot => plot.clientWidth)")
    assert min(filter(None, widths)) >= 300
    strokes = "shapes => shapes.map(shape => getComputedStyle(shape).stroke)"
    themes = []
    for dark in (False, True):  # existing plots change theme
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
        themes.append(page.eval_on_selector_all("#plot-tokens :is(path.line, .dot)", strokes))
        assert len(set(themes[-1])) >= 7 and all(colour.startswith("rgb") for colour in themes[-1])
    assert not set(themes[0]) & set(themes[1])
