"""Figures, bars and statements about steps on the page, compared with the lines of the traces they describe."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from contracts.traces import golden_traces
from fakes.chart_figures import Axis, check_bars, check_curves, estimates, read_chart
from fakes.properties import holds_for
from fakes.shown_claims import BARS, ROWS, chat_line, claims, displayed_part, step_rows
from fakes.shown_figures import PARTS, RunFigures, agrees, claim, unexplained
from fakes.traces import (
    PREFILL,
    SIZES,
    arbitrary_traces,
    end,
    golden,
    header,
    jsonl,
    read_lines,
    step,
    trace_lines,
)
from playwright.sync_api import Page, Request, Route, expect

from e2e.page_fixtures import CODE, cells, explained, exported, lane_action, saved_page, show
from specdemo.core.explain import figure
from specdemo.core.rules import RULES
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui.frames import read_traces
from specdemo.ui.lane import baseline_of
from specdemo.ui.visitors import answer_footer

pytestmark = [pytest.mark.slow, pytest.mark.browser]

POOL = ModelPool()


@pytest.fixture(scope="module")
def file_tab(new_tab: Page) -> Page:
    """A tab that has not been loaded again."""
    return new_tab


Line = dict[str, Any]
RUNS: dict[str, dict[str, Any]] = {
    "chain": {},
    "n-grams": {"method": "nasd", "ngram": 2, "max_tokens": 24},
    "tree": {"method": "tree", "tree_nodes": 8},
    "guesses": {"method": "lookahead"},
    "greedy chain": {"temperature": 0.0},
    "greedy tree": {"method": "tree", "tree_nodes": 8, "temperature": 0.0},
    "tree, top1": {"method": "tree", "tree_nodes": 8, "rule": "top1"},
    **{rule: {"rule": rule} for rule in RULES if rule not in ("rejection", "threshold")},
    "threshold": {"rule": "threshold", "max_tokens": 24},  # it accepts few tokens
}
SAMPLED = ("chain", "tree", "guesses", "match", "greedy chain")  # one of each kind; the others are exhaustive


@cache
def recorded(name: str) -> list[Line]:
    settings = {"temperature": 1.0, "top_p": 1.0, "gamma": 3, "top": 5, "max_tokens": 14, "device": "cpu", "seed": 2}
    if RUNS[name].get("method") == "lookahead":
        del settings["gamma"]  # it has no effect
    return [line for line in trace_lines(Recipe(**settings | RUNS[name]), CODE, POOL) if "phase" not in line]


TIPS = """lane => [...lane.querySelectorAll(".round")].map((step) => [...step.querySelectorAll(".tok")].map((token) => {
    token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
    const tip = document.getElementById("tip");
    const rows = [...tip.querySelectorAll("dt")].map((name) => [name.textContent, name.nextSibling.textContent]);
    return { kind: token.dataset.kind, rows: Object.fromEntries(rows), why: tip.querySelector("p").textContent };
}))"""
CARDS = """async (steps) => {
    const width = (node) => node.getBoundingClientRect().width;
    const [slider, at] = ["round-at", "round-number"].map((id) => document.getElementById(id)), found = [];
    for (const i of steps) {
        slider.value = i;
        slider.dispatchEvent(new Event("input"));
        while (!at.textContent.startsWith(`${i} of`)) await new Promise(requestAnimationFrame);
        const last = document.querySelectorAll("#player .result .node");
        found.push([...document.querySelectorAll("#round-nodes .node"), ...last].map((card) => ({
            kind: card.dataset.state,
            token: card.querySelector("h3 .tok").textContent,
            why: card.querySelector(".why").textContent,
            facts: card.querySelector("details .quiet")?.textContent,
            legend: card.querySelector(".laws > p")?.textContent,
            bars: [...card.querySelectorAll(".law")].map((row) => ({
                token: row.querySelector("code").textContent,
                mass: row.querySelector(".mass").textContent.split(" ").map(Number),
                track: width(row.querySelector(".track")),
                widths: [...row.querySelectorAll(".track > :not(.both)")].map(width),
            })),
        })));
    }
    return found;
}"""

INSIDE = """() => [...document.querySelectorAll("#round-nodes, #inspector")]
    .every((part) => part.scrollWidth <= part.clientWidth)"""


def steps_of(trace: list[Line]) -> list[Line]:
    return [line for line in trace if line.get("draft")]


@dataclass(frozen=True)
class Displayed:
    """A trace and what the page shows of it: tooltips and cards by step with a draft, and the tree of the last step."""

    trace: list[Line]
    tips: list[list[dict[str, Any]]]
    cards: list[list[dict[str, Any]]]
    leaves: list[str]
    inside: bool  # the cards are within the inspector


@pytest.fixture(scope="module")
def displayed(file_tab: Page) -> Callable[[str], Displayed]:
    """Show a recorded run and open the inspector, once."""

    def read_page(name: str) -> Displayed:
        trace = recorded(name)
        show(file_tab, *trace)
        tips = file_tab.eval_on_selector("#lane-spec", TIPS)
        file_tab.locator("#lane-spec .tok").last.click()
        expect(file_tab.locator("#inspector")).to_be_visible()
        steps = [line["i"] for line in steps_of(trace)]
        cards = file_tab.evaluate(CARDS, steps)
        leaves = file_tab.locator("#round-tree .leaf title").all_text_contents()
        inside = file_tab.evaluate(INSIDE)
        return Displayed(trace, [tips[i] for i in steps], cards, leaves, inside)

    return cache(read_page)


def check_decision(line: Line, node: int, card: dict[str, Any], rule: str, greedy: bool) -> None:
    """The displayed figures decide the displayed outcome, and are those of the trace."""
    accepted, draw, bound = node in line["accepted"], line["draw"][node], line["bound"][node] if line["bound"] else None
    assert card["kind"] == ("accepted" if accepted else "rejected")
    assert card["why"].startswith("Accepted" if accepted else "Rejected"), card
    if greedy or rule == "top1":
        assert f"large model choice {line['rank'][node]} · its p" in card["facts"] and accepted == (
            line["rank"][node] == 1
        )
        assert not re.search("β|draw|accepted", card["facts"])  # neither decides
        assert accepted or f"choice number {line['rank'][node]}, with " in card["why"]
    elif rule in ("match", "coupled"):
        assert "the large model sampled" in card["why"]
    elif draw is None:
        assert f"bound {figure(bound)}." in card["why"] and "accepted from p" in card["facts"]
        assert accepted == (line["p"][node] >= bound)
    else:
        shown = re.search(r"accepted below (?:< )?(\S+) · draw (?:< )?(\S+) ", card["facts"])
        share, shown_draw = map(float, shown.groups())
        deciding = range(node, len(line["draft"])) if rule == "block" else [node]  # a later token rescues earlier ones
        passed = any(line["draw"][i] < line["bound"][i] for i in deciding)
        assert (share, shown_draw) == pytest.approx((bound, draw), abs=1e-3) and accepted == passed
        elders = [other for other in range(node) if line["parents"][other] == line["parents"][node]]
        assert ("the rest that earlier guesses left" in card["why"]) == bool(elders)


def check_untested(line: Line, node: int, card: dict[str, Any]) -> None:
    siblings = {other for other, parent in enumerate(line["parents"]) if parent == line["parents"][node]}
    assert card["kind"] == "ignored" and card["why"].startswith("Thrown away: ")
    if siblings & {*line["accepted"]}:
        assert "another continuation was accepted at this position" in card["why"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.exhaustive) for name in RUNS]
)
def test_tooltip_and_card_of_every_token_give_the_figures_that_decided(
    displayed: Callable[[str], Displayed], name: str
) -> None:
    page = displayed(name)
    recipe = page.trace[0]["recipe"]
    outcomes: Counter[str] = Counter()
    for line, tips, shown in zip(steps_of(page.trace), page.tips, page.cards, strict=True):
        drafted = shown[: len(line["draft"])]
        for node, card in enumerate(drafted):
            outcomes[card["kind"]] += 1
            if line["beta"][node] is None:
                check_untested(line, node, card)
            else:
                check_decision(line, node, card, recipe["rule"], recipe["temperature"] == 0)
        assert Counter((tip["kind"], tip["why"]) for tip in tips) == Counter(
            (card["kind"], card["why"]) for card in shown
        )
        for tip in tips:
            figures = [f"{label.partition(',')[0]} {value}" for label, value in tip["rows"].items()]
            facts = " · ".join(figures[2:])  # without token and step
            assert any(card["facts"].startswith(facts) for card in drafted if card["why"] == tip["why"]) or not facts
    assert page.inside  # no card is cut at the right edge
    assert outcomes["rejected"] and (outcomes["accepted"] or name in ("guesses", "n-grams"))
    if recipe["method"] == "tree":
        assert [leaf.partition(": ")[2] for leaf in page.leaves] == [card["why"] for card in drafted]


@pytest.mark.parametrize("name", ["chain", "tree", "n-grams", "greedy chain"])
def test_charts_contain_their_token_and_the_rest_and_share_a_scale(
    displayed: Callable[[str], Displayed], name: str
) -> None:
    page = displayed(name)
    residuals, tracks = 0, set()
    for line, shown in zip(steps_of(page.trace), page.cards, strict=True):
        for card in shown:
            bars, drafted = card["bars"], card is not shown[-1] or len(shown) == len(line["draft"])
            masses = [bar["mass"] for bar in bars]
            assert card["token"] in [bar["token"] for bar in bars]
            assert [sum(column) for column in zip(*masses, strict=True)] == pytest.approx(
                [1] * len(masses[0]), abs=6e-3
            )
            others = [bar["token"] for bar in bars].index("others") if "others" in str(bars) else len(bars)
            assert others >= len(bars) - 1  # the last row
            largest = [max(mass) for mass in masses[:others]]
            hidden = [bar["token"] for bar in bars if not any(bar["mass"])]
            if drafted:
                assert card["legend"] in ("p large model q helper both", "p")  # point masses have no bar q
            else:
                assert largest == sorted(largest, reverse=True) and {*hidden} <= {card["token"]}
                residuals += card["legend"] == "residual"
            for bar in bars:
                tracks.add(round(bar["track"], 1))
                shares = [width / bar["track"] for width in bar["widths"]]
                assert shares == pytest.approx([min(1, mass) for mass in bar["mass"]], abs=2e-3)
    assert len(tracks) == 1
    assert residuals or name == "greedy chain"


VISITED = """() => [...document.querySelectorAll(".box:not([hidden])")].map((box) => {
    const token = box.querySelector(".tok"), slider = document.getElementById("round-at");
    token?.click();
    for (let i = 0; token && i <= slider.max; i++) {
        slider.value = i;
        slider.dispatchEvent(new Event("input"));
    }
    for (const file of ["csv", "svg"]) document.getElementById(`${file}-${box.dataset.lane}`).click();
    return token && document.getElementById("round-number").textContent;
})"""


@holds_for(4, lines=arbitrary_traces())
def test_all_steps_of_arbitrary_traces_are_displayed_and_exported(file_tab: Page, lines: list[Line]) -> None:
    """`file_tab` fails after an error of a script."""
    show(file_tab, *lines)
    traces = "".join("H" if "specdemo" in line else "S" if "i" in line else "" for line in lines).split("H")[1:]
    counts = {f"{len(steps) - 1} of {len(steps) - 1}" for steps in traces}
    assert {*filter(None, file_tab.evaluate(VISITED))} <= counts


# --- every figure of a run ---------------------------------------------------------------------------------------

REMOTE = {"mode": "speculative", "remote": "http://127.0.0.1:1", "rtt_ms": 10.0}
EDGE = REMOTE | {"gates": ["nll"]}


def default_run() -> list[Line]:
    recipe = Recipe(max_tokens=24, top=5, device="cpu")
    return [
        line for each in (recipe, baseline_of(recipe)) for line in trace_lines(each, CODE, POOL) if "phase" not in line
    ]


def disturbed(lines: list[Line]) -> list[Line]:
    """Times of a baseline beside another program."""
    baseline = next(i for i, line in enumerate(lines) if line.get("recipe", {}).get("method") == "ar")
    return [line | {"verify_s": 0.02} if "i" in line and k > baseline else line for k, line in enumerate(lines)]


def slow_drafts(lines: list[Line]) -> list[Line]:
    """Drafts that cost more than they give: all times of the first lane are three times as long."""
    baseline = next(i for i, line in enumerate(lines) if line.get("recipe", {}).get("method") == "ar")
    times = ("t", "draft_s", "verify_s", "host_s")
    return [
        line | {name: 3 * line[name] for name in times} if "i" in line and k < baseline else line
        for k, line in enumerate(lines)
    ]


def over_a_link() -> list[Line]:
    """Drafts over a link with a delay and a gate, and the cloud alone."""
    sampling = {"seed": 0, "top_p": 1.0, "max_tokens": 9}
    gated = recipe_line(cloud=EDGE, **sampling) | {"vocab_size": 300}
    alone = recipe_line("ar", cloud=EDGE | {"mode": "cloud_only", "gates": []}, **sampling) | {"exact": True}
    link = LINK | {"up_s": 0.001, "down_s": 0.002}
    steps = [PREFILL, *(verified(i, link | {"hard_ratio": 0.25}) for i in (1, 2)), unverified(3, escalated=0.0)]
    plain = [PREFILL, *(step(i, pieces=["x"]) for i in (1, 2))]
    steps[0] = steps[0] | {"remote": link}
    return [gated, *steps, end(), alone, *(line | {"remote": link} for line in plain), end()]


TRACES: dict[str, Callable[[], list[Line]]] = {
    **{name: partial(golden, name, "ar") for name in golden_traces() if name != "ar"},
    "ar": partial(golden, "ar"),
    "four lanes": partial(golden, "hybrid", "ar", "nasd", "suffix"),
    "disturbed": lambda: disturbed(golden("draft", "ar")),
    "default": default_run,
    "over a link": over_a_link,
    **{path.stem: partial(read_lines, path) for path in sorted(ASSETS.glob("*/*.jsonl"))},
}
SHOW_STEP = """(i) => {
    for (const id of ["details", "figures"]) document.getElementById(id).open = true;
    const slider = document.getElementById("round-at");
    slider.max = i;
    slider.value = i;
    slider.dispatchEvent(new Event("input"));
    const step = document.querySelectorAll(".box:not([hidden]) .lane")[0].querySelectorAll(".round")[i];
    step.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
}"""

SEEK = """(t) => {
    const slider = document.getElementById("race-at");
    slider.value = t;
    slider.dispatchEvent(new Event("input"));
}"""

FILL = "path => getComputedStyle(path).fill"


@pytest.mark.parametrize("name", TRACES)
def test_every_figure_of_a_run_is_that_of_its_traces(file_tab: Page, name: str) -> None:
    lines = TRACES[name]()
    run = RunFigures.of(lines)
    file_tab.mouse.move(0, 0)  # a resting pointer would mark the step below it
    show(file_tab, *lines)
    lane = run.first
    drafted = [line["i"] for line in lane.steps if line["i"] and line["draft"]]
    i = drafted[len(drafted) // 2] if drafted else 1
    file_tab.evaluate(SHOW_STEP, i)
    parts = explained(file_tab, ".cockpit", lambda part: claims(run, part, i), run)
    required = {"headline", "race-clock", "run-table", "tile tokens_per_second", "inspector", "round-words", "ledger"}
    assert required <= parts
    assert run.withheld() == ("not measurable" in file_tab.locator("#headline").inner_text())
    for lane_name, end_of_bar in file_tab.evaluate(BARS):
        assert end_of_bar == pytest.approx(run.lanes[lane_name].at[-1] / run.end, abs=1e-3)
    for texts, row in zip(file_tab.evaluate(ROWS), step_rows(lane), strict=True):
        for shown, value in zip(texts, row, strict=True):
            assert shown == (value or "–") if isinstance(value, str | None) else agrees(shown, value), (texts, row)
    footer = answer_footer(read_traces(jsonl(*lines)).lanes, {})  # of the conversation
    assert not re.search(r"\d", unexplained(footer, chat_line(run)))
    file_tab.evaluate(SEEK, run.end / 2)
    shown = sum(at <= run.end / 2 for at in lane.at)
    if shown < len(lane.steps):
        explained(file_tab, ".tiles", lambda _: displayed_part(lane, shown), run)


MARKED, FASTEST = "#time-rows [data-disturbed]", "#time-rows [data-fastest]"


def test_the_bar_of_the_faster_run_is_in_ink(file_tab: Page) -> None:
    for lines, fastest in ((golden("draft", "ar"), "spec"), (slow_drafts(golden("draft", "ar")), "ar")):
        show(file_tab, *lines)
        expect(file_tab.locator(FASTEST)).to_have_attribute("data-row", fastest)
        other = file_tab.locator("#time-rows .time-row:not([data-fastest]) .run")
        assert file_tab.locator(f"{FASTEST} .run").evaluate(FILL) != other.evaluate(FILL)


def test_disturbed_times_are_marked_on_the_page_and_in_exports(file_tab: Page, tmp_path: Path) -> None:
    show(file_tab, *golden("draft", "ar"))
    expect(file_tab.locator(MARKED)).to_have_count(0)
    coloured = file_tab.locator("#time-rows [data-row=spec] .run").evaluate(FILL)
    show(file_tab, *disturbed(golden("draft", "ar")))
    expect(file_tab.locator(MARKED)).to_have_text([re.compile("times disturbed")] * 2)
    fills = file_tab.locator(f"{MARKED} .run").evaluate_all(f"paths => paths.map({FILL})")
    assert len({*fills}) == 1 and coloured not in fills
    expect(file_tab.locator(FASTEST)).to_have_count(0)
    for lane in ("spec", "ar"):
        expect(file_tab.locator(f"[data-lane={lane}] .rate")).to_contain_text("times disturbed")
        assert "times disturbed" in exported(file_tab, lane_action(file_tab, "svg", lane))
    expect(file_tab.locator("#pass-costs")).to_be_hidden()
    expect(file_tab.locator("#chart-whatif")).to_have_text("No estimate: times disturbed.")
    with saved_page(file_tab, tmp_path) as page:
        expect(page.locator(MARKED)).to_have_count(2)
        expect(page.locator("#headline")).to_contain_text("Speed not measurable now")


VIEWS = 4  # requests for another displayed run: two of the theory, one of the link, and the last of the memory


def test_a_tab_that_is_selected_during_an_earlier_event_is_drawn(file_tab: Page) -> None:
    """Gradio repeats the earlier event instead."""
    file_tab.get_by_role("tab", name="Method").click()
    requests: list[Route] = []

    def of_the_first_tab(request: Request) -> bool:
        return '"tab":"Method"' in (request.post_data or "")

    def hold_the_last(route: Route) -> None:
        if of_the_first_tab(route.request):
            requests.append(route)
        if len(requests) < VIEWS or route is not requests[-1]:
            route.continue_()

    file_tab.route("**/run/predict", hold_the_last)
    with file_tab.expect_request(lambda request: len(requests) == VIEWS - 1 and of_the_first_tab(request)):
        show(file_tab, *golden("draft", "ar"))
    file_tab.get_by_role("tab", name="Memory").click()
    requests[-1].continue_()
    expect(file_tab.locator("#memory-run")).to_contain_text("weights of the target")
    file_tab.unroute("**/run/predict")


def test_tabs_show_the_figures_of_the_run(file_tab: Page) -> None:
    lines = over_a_link()
    run = RunFigures.of(lines)
    show(file_tab, *lines)
    for tab, parts in {"Memory": {"memory-run"}, "Edge-cloud": {"edge-run", "edge-timeline", "edge-best"}}.items():
        file_tab.get_by_role("tab", name=tab).click()
        expect(file_tab.locator(f"#{min(parts)}")).to_contain_text("edge and cloud" if tab == "Memory" else "best k")
        assert (
            explained(file_tab, ", ".join(f"#{part}" for part in parts), lambda part: claims(run, part, 1), run)
            == parts
        )


# --- unverified tokens, waiting, advice ---------------------------------------------------------------------------

LINK = {"escalated": 1.0, "cloud_s": 0.004, "rtt_s": 0.01, "sent": 1.0, "bytes_up": 300.0, "bytes_down": 200.0}


def recipe_line(method: str = "draft", **changes: Any) -> Line:
    return header(method, {"rule": "rejection", "policy": "fixed", "temperature": 1.0, **changes})


def verified(i: int, notes: dict[str, float] | None = None, **more: Any) -> Line:
    """Three drafted, two tested, one accepted."""
    return step(i, pieces=["b", "X"], draft=("b", "c", "d"), accepted=(0,), tested=2, **more) | (
        {"remote": notes} if notes else {}
    )


def unverified(i: int, **notes: float) -> Line:
    unknown = dict.fromkeys(("p", "draw", "beta"), [None] * 3)
    line = step(i, pieces=["b", "c", "d"], draft=("b", "c", "d"), accepted=(0, 1, 2), **unknown)
    return line | {"token": None, "choices": [], "remote": notes}


def plain_lane(count: int, seconds: float) -> list[Line]:
    steps = (step(i, pieces=["x"], draft_s=0.0, verify_s=seconds) for i in range(1, count))
    return [header("ar"), PREFILL, *steps, end()]


def test_unverified_tokens_are_counted_apart(file_tab: Page) -> None:
    gated = [unverified(i, escalated=0.0) for i in (3, 4)]
    steps = [PREFILL | {"remote": LINK}, *(verified(i, LINK) for i in (1, 2)), *gated]
    show(file_tab, recipe_line(cloud=REMOTE | {"gates": ["nll"]}, gamma=3), *steps, end())
    expect(file_tab.locator("[data-kpi=acceptance]")).to_contain_text("2 of 6 drafted")
    expect(file_tab.locator("[data-kpi=acceptance]")).to_contain_text("6 unverified")
    expect(file_tab.locator("#lane-spec [data-by=gate] .tok")).to_have_count(6)
    file_tab.locator("#lane-spec [data-by=gate] .tok").first.hover()
    expect(file_tab.locator("#tip strong")).to_have_text("not checked")
    expect(file_tab.locator("#tip")).to_contain_text("the gates accepted the guesses, so the cloud was not queried")
    for name in ("Method", "Edge-cloud"):  # a tab is updated when it is selected
        file_tab.get_by_role("tab", name=name).click()
    expect(file_tab.locator("#edge-best")).to_contain_text("mean overlap β 0.75 for α")
    alone = recipe_line(cloud=REMOTE | {"mode": "edge_only"})
    show(
        file_tab,
        alone,
        *(step(i, pieces=["x"]) | {"remote": {"escalated": 0.0}, "choices": []} for i in range(4)),
        end(),
    )
    expect(file_tab.locator("[data-kpi=tokens_per_pass]")).to_contain_text(
        "3 passes of the helper, none of the large model"
    )
    file_tab.locator("#lane-spec .tok").last.hover()
    expect(file_tab.locator("#tip")).not_to_contain_text("target")


def test_waiting_and_second_round_trips_are_labelled(file_tab: Page) -> None:
    notes = LINK | {"rows": 1.0, "sent": 2.0}
    trace = [recipe_line(cloud=REMOTE), PREFILL | {"remote": LINK}, verified(1, LINK), verified(2, notes), end()]
    cloud_only = recipe_line("ar", cloud=REMOTE | {"mode": "cloud_only"}) | {"exact": True}
    plain = [cloud_only, PREFILL | {"remote": LINK}, *(step(i, pieces=["x"]) | {"remote": LINK} for i in (1, 2)), end()]
    show(file_tab, *trace, *plain)
    expect(file_tab.locator("#race-lengths")).to_have_text(re.compile("5 and 3 tokens.*tokens per second are compared"))
    tip = file_tab.locator("#tip")
    for i, trips in ((1, 0), (2, 1)):
        file_tab.locator("#lane-spec .round").nth(i).locator(".tok").first.hover()
        expect(tip.get_by_text("round trips")).to_have_count(trips)
    file_tab.locator("#lane-spec .tok").last.click()
    expect(file_tab.locator("#round-words")).to_contain_text("The rejection needed a second round trip")
    for name in ("Method", "Edge-cloud"):  # a tab is updated when it is selected
        file_tab.get_by_role("tab", name=name).click()
    expect(file_tab.locator("#edge-run")).to_contain_text(re.compile(r"Second round trips after rejections.*: 1\."))
    expect(file_tab.locator("#edge-run")).to_contain_text(re.compile(r"The link took \d+ % of it"))
    expect(file_tab.locator("#edge-timeline .key span", has_text="waiting")).to_have_count(1)
    expect(file_tab.locator("#edge-table").get_by_role("gridcell", name="two round trips")).to_have_count(1)


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("draft", "(mean overlap β 0.30 does not exceed c 0.50): confirm with Repeat, then disable"),
        ("tree", "lower “Nodes per draft”, or confirm with Repeat and disable"),
        ("lookahead", "lower “Window, positions” or “Order n”, or confirm with Repeat and disable"),
    ],
)
def test_advice_after_a_slow_run_can_help(file_tab: Page, method: str, advice: str) -> None:
    slow = [verified(i, draft_s=0.03, verify_s=0.04) | {"beta": [0.3, 0.3, None]} for i in range(1, 6)]
    show(file_tab, recipe_line(method), PREFILL, *slow, end(), *plain_lane(6, 0.02))
    expect(file_tab.locator("#verdict")).to_contain_text("slower with drafts")
    expect(file_tab.locator("#verdict")).to_contain_text(advice)
    expect(file_tab.locator("#verdict")).not_to_contain_text("shorter")


# --- charts ---------------------------------------------------------------------------------------------------------


def losing() -> list[Line]:
    """A run with too many guesses: its passes take twice as long as those of its baseline."""
    times = {"draft_s": 0.001, "verify_s": 0.01, "beta": [0.8, 0.2, None]}
    steps = [step(i, pieces=["x", "y"], draft=("x", "z", "w"), accepted=(0,), **times) for i in range(1, 41)]
    plain = [step(i, pieces=["x"], draft_s=0.0, verify_s=0.0045) for i in range(1, 81)]
    return [header(), PREFILL, *steps, end(), header("ar"), PREFILL, *plain, end()]


def unlucky() -> list[Line]:
    """A run whose recorded probabilities do not describe its outcomes."""
    costs = {"environment": {**SIZES, "parity": {"cost": {"1": 1.0, "2": 1.1, "5": 1.3, "9": 1.6}}}}
    rejected = {"draft": ("b", "c", "d"), "accepted": (), "tested": 1, "beta": [1.0, None, None]}
    steps = [step(i, pieces=["X"], **rejected) for i in range(1, 30)]
    plain = [step(i, pieces=["x"], draft_s=0.0, verify_s=0.02) for i in range(1, 30)]
    return [header() | costs, PREFILL, *steps, end(), header("ar"), PREFILL, *plain, end()]


CHARTED = TRACES | {"losing": losing, "unlucky": unlucky}


def opened(page: Page, name: str) -> RunFigures:
    lines = CHARTED[name]()
    page.evaluate("document.getElementById('figures').open = true")
    show(page, *lines)  # draws the open figures
    return RunFigures.of(lines)


@pytest.mark.parametrize("name", ["draft", "hybrid", "nasd"])
def test_bars_of_a_run_are_its_figures_on_the_axes(file_tab: Page, name: str) -> None:
    run = opened(file_tab, name)
    positions = read_chart(file_tab, "#chart-positions")
    shares = [[100 * passed / tested] for passed, tested in run.first.positions]
    check_bars(positions, shares, " %")
    names = [f"{k} (n {tested})" for k, (_, tested) in enumerate(run.first.positions, 1)]
    assert [text for _, text in positions["across"]] == names
    times = read_chart(file_tab, "#chart-times")
    check_bars(times, [[1000 * line[part] for part in PARTS] for line in run.first.steps[1:]])
    across = Axis.of(times["across"])
    centres = [across(x + width / 2) for x, _, width, *_ in times["bars"]]
    assert centres == pytest.approx([*range(1, len(run.first.steps))] * len(PARTS), abs=across.error())


@pytest.mark.parametrize("name", ["draft", "draft-egag", "losing", "unlucky"])
def test_estimates_of_other_lengths_follow_from_the_trace(file_tab: Page, name: str) -> None:
    """Speeds exactly; the limits of 95 % of the runs within the spread of an own simulation."""
    run = opened(file_tab, name)
    rows = cells(file_tab.locator("#chart-whatif tr:not(:first-child)"))
    known = estimates(run, len(rows) - 1)
    drawn = read_chart(file_tab, "#chart-whatif")
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
    no_advice = "No advice" in file_tab.locator("#chart-whatif p").inner_text()
    assert (advised or name != "losing") and (no_advice or name != "unlucky")


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
    explanations = [
        claim(f"Estimated best: {guesses}, {{}}–{{}} tokens/s.", *((best, low, high) if advised else (None,) * 3)),
        claim("Measured (+): {} guesses, {} tokens/s.", gamma, speed),
        claim("Measured: {} tokens/s.", speed),
    ]
    assert not re.search(r"\d", unexplained(words, explanations)), words
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
