"""The theory tab in a real browser: what it shows is what the trace and the closed forms say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from e2e.page_fixtures import CODE, run, saved, spans, status

PLOTS = ("tokens", "speed", "gamma", "best", "ops", "share")
DOT, RUN = "var(--dot-set)", "var(--dot-run)"


@pytest.fixture
def page(tab: Any) -> Page:
    """A page with the tab open."""
    return opened(tab())


def opened(page: Page) -> Page:
    page.get_by_role("tab", name="Theory").click()
    expect(page.locator("#theory-words li")).to_have_count(5)
    return page


def put(page: Page, name: str, value: str) -> None:
    field = page.locator(f"#theory-{name} input[type=number]")
    field.fill(value)
    field.blur()


def path(page: Page, plot: str, colour: str) -> list[list[float]]:
    """The places of a curve in its plot, in pixels from the plot's corner."""
    curve = page.locator(f'#plot-{plot} .mark-line path[stroke="{colour}"]')
    expect(curve).to_have_count(1)
    return [
        [float(n) for n in at.split(",")] for at in re.findall(r"[-\d.e]+,[-\d.e]+", curve.get_attribute("d") or "")
    ]


def test_the_run_s_point_is_on_every_curve(page: Page) -> None:
    """A real run: the tab's figures and the dots' places against the trace that the page saved."""
    expect(page.locator("#theory-run")).to_contain_text("No run available")
    assert all(path(page, plot, RUN) == [] for plot in PLOTS)
    page.locator("#compare input").check()
    run(page, CODE, tokens=48)
    status(page, "done: 48 tokens")
    spec, plain = saved(page), saved(page, "ar")
    page.locator("#theory-set").click()
    m, steps = spec[-1]["metrics"], [line for line in spec if "i" in line]
    betas = [beta for line in steps for beta in line["beta"] if beta is not None]
    alpha, rounds = sum(betas) / len(betas), len(steps) - 1
    gamma = sum(len(line["draft"]) for line in steps) / rounds
    step = plain[-1]["metrics"]["decode_s"] / (plain[-1]["metrics"]["steps"] - 1)
    ratio = m["tokens_per_second"] / plain[-1]["metrics"]["tokens_per_second"]
    said = page.locator("#theory-run")
    for words in (
        f"α = {alpha:.3f}",
        f"γ = {gamma:.2f}",
        f"accepted / drafted = {m['accepted'] / m['drafted']:.3f}",
        f"c = {m['draft_s'] / m['drafted'] / step:.3f}",
        f"v = {m['verify_s'] / rounds / step:.2f}",
        f"The run was {ratio:.2f}×",
    ):
        expect(said).to_contain_text(words)
    expect(page.locator("#theory-alpha input[type=number]")).to_have_value(f"{alpha:.2f}".rstrip("0"))
    expect(page.locator("#theory-gamma input[type=number]")).to_have_value(str(round(gamma)))
    for plot in PLOTS:
        dot = page.locator(f'#plot-{plot} .mark-line path[stroke="{RUN}"]')
        expect(dot).to_have_attribute("d", re.compile("^M[^L]+$"))  # one place, and a cap that makes it a dot
        assert dot.evaluate("dot => getComputedStyle(dot).strokeLinecap") == "round"
    ((x, y),), curve = path(page, "tokens", RUN), path(page, "tokens", "var(--curve-set)")
    (left, low), (right, high) = curve[0], curve[-1]  # alpha 0, one token; alpha 1, gamma + 1 tokens
    assert (x - left) / (right - left) == pytest.approx(alpha, abs=0.005)
    assert 1 + round(gamma) * (y - low) / (high - low) == pytest.approx(m["tokens_per_target_pass"], abs=0.02)
    page.get_by_role("button", name="The papers' tables, and this run").click()
    expect(page.locator(".figures strong", has_text="this run")).to_have_count(4)


def test_sliders_move_words_and_curves(page: Page) -> None:
    words = page.locator("#theory-words")
    for name, value in (("alpha", "0.8"), ("c", "0.1"), ("gamma", "4")):
        put(page, name, value)
    expect(words).to_contain_text("2.40× by Theorem 3.8")
    expect(words).to_contain_text("Best γ: 6 with v and o (2.47×)")
    dot = page.locator(f'#plot-speed .mark-line path[stroke="{DOT}"]')
    before = dot.get_attribute("d") or ""
    put(page, "v", "2")
    expect(words).to_contain_text("1.40× once v and o are paid")
    expect(dot).not_to_have_attribute("d", before)
    put(page, "alpha", "0.05")
    expect(words).to_contain_text("Decode plainly")
    page.locator("#theory-alpha input[type=number]").fill("")  # half typed: nothing breaks
    put(page, "alpha", "0.7")
    expect(words).to_contain_text("α is above c")
    page.locator("#theory-set").click()
    expect(page.get_by_text("No run available").nth(1)).to_be_visible()  # and the sliders stay
    expect(page.locator("#theory-alpha input[type=number]")).to_have_value("0.7")


def test_nothing_is_drawn_while_tokens_stream(page: Page) -> None:
    expect(page.locator(f'.curves .mark-line path[stroke="{DOT}"]')).to_have_count(6)  # all that was to be drawn is
    page.evaluate("""() => {
        window.touched = 0;
        const watch = new MutationObserver((changes) => { window.touched += changes.length; });
        for (const plot of document.querySelectorAll(".curves")) watch.observe(plot, {childList: true, subtree: true});
    }""")
    run(page, "endless")
    spans(page, 60)
    assert page.evaluate("window.touched") == 0
    put(page, "alpha", "0.61")  # unless something is moved
    expect(page.locator("#theory-run")).to_contain_text("A run is in progress")
    page.locator("#stop").click()
    status(page, "stopped")


def test_the_worked_example_and_the_trial_follow_what_is_typed(page: Page) -> None:
    said = page.locator("#theory-residual")
    expect(said).to_contain_text("β = 0.700")
    expect(page.locator("#theory-parts .mark-rect path").first).to_be_visible()
    put(page, "q-d", "0.45")
    expect(said).to_contain_text("q adds up to 1.1, so it was divided by that.")
    put(page, "q-d", "-1")
    expect(said).to_contain_text("q(d) is -1: a probability is not below 0.")
    put(page, "q-d", "")
    expect(said).to_contain_text("q(d) must be a number, not empty.")
    page.locator("#theory-draw").click()
    expect(page.locator("#theory-trial")).to_contain_text("q(d) must be a number, not empty.")
    put(page, "q-d", "0.35")
    expect(said).to_contain_text("β = 0.700")
    expect(said.locator("tbody tr")).to_have_count(4)
    tried = page.locator("#theory-trial")  # by chance, one run in a thousand would find an exact rule off
    page.locator("#theory-draw").click()
    expect(tried).to_contain_text("The law is p, as far as so many tokens can tell. This rule is exact")
    expect(page.locator("#theory-shares .mark-rect path")).to_have_count(12)
    page.locator("#theory-rule input").click()
    page.get_by_role("option", name="top1").last.click()
    page.locator("#theory-draw").click()
    expect(tried).to_contain_text("The law is not p. The rule is lossy.")


def test_a_narrow_page_holds_together_in_both_themes(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    expect(page.locator("#plot-share .mark-line path")).to_have_count(4)
    expect(page.locator("#theory-residual table")).to_be_visible()
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    strokes = "paths => paths.map(path => getComputedStyle(path).stroke)"
    themes = []
    for dark in (False, True):  # a plot that is there takes on the other theme
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
        themes.append(page.eval_on_selector_all("#plot-tokens .mark-line path", strokes))
        assert len(set(themes[-1])) == 7 and all(colour.startswith("rgb") for colour in themes[-1])
    assert not set(themes[0]) & set(themes[1])
