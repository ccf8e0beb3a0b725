"""Saved web page, step player and time axis, opened from a file without a server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from e2e.page_fixtures import PATIENCE, QUICK, counted, drawn, exported, grave, show
from specdemo.core.explain import explain
from specdemo.core.step import Outcome, Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run, in_plain_words, read_traces
from specdemo.ui.lane import BASELINE, SPEC

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PROMPT = "def fibonacci(n):\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\ndef fibonacci"
SAMPLED = {"temperature": 0.8, "seed": 3}
RECIPES: dict[str, dict[str, Any]] = {
    "rejection": {"method": "draft", **SAMPLED},
    "block": {"method": "draft", "rule": "block", **SAMPLED},
    "typical": {"method": "draft", "rule": "typical", **SAMPLED},
    "tree": {"method": "tree", **SAMPLED},
    "greedy": {"method": "draft", "temperature": 0.0},
    "nasd": {"method": "nasd", "temperature": 0.0},
    "sampled nasd": {"method": "nasd", **SAMPLED},
}
OTHER_LANES = {"block": ["typical", "sampled nasd"]}  # of the page of a run
RECORDED = "recorded"


@pytest.fixture(scope="module")
def runs(pool: ModelPool) -> dict[str, Run]:
    runs = {}
    for name, values in RECIPES.items():
        runs[name] = Run()
        recipe = Recipe(pair="bundled", gamma=4, max_tokens=40, top=5, **values)
        for event in generate(recipe, PROMPT, pool):
            runs[name].add_event(SPEC, event)
        runs[name].finish()
    trace = ASSETS / "traces" / "draft, temperature 0.7.jsonl"
    return {**runs, RECORDED: read_traces(trace.read_text("utf-8"))}


@pytest.fixture(scope="module")
def save_page(file_tab: Page, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Open the traces of runs on the page and save it as a web page."""
    folder = tmp_path_factory.mktemp("saved")

    def save(*runs: Run) -> Path:
        lines = "".join(filter(None, (run.trace(lane) for run in runs for lane in run.plan))).splitlines()
        file_tab.bring_to_front()
        show(file_tab, *map(json.loads, lines))
        path = folder / f"{runs[0].id}.html"
        path.write_text(exported(file_tab, file_tab.locator("#save-page")), "utf-8")
        return path

    return save


HEIGHT = 844
# The modules of the page with its run.
SCRIPTS = "window.scripts = () => import(document.querySelector('script[type=module]').src)"


@pytest.fixture(scope="module")
def open_run(
    runs: dict[str, Run], chromium: BrowserContext, save_page: Callable[..., Path]
) -> Iterator[Callable[..., Page]]:
    """Open the saved page of a run; those of `runs` are opened once, with the inspector closed."""
    pages, by_name, problems = [], dict[str, Page](), []

    def open_page(run: str | Run, width: int = 1366) -> Page:
        if isinstance(run, Run):
            return load(run)
        if run not in by_name:
            by_name[run] = load(*(runs[name] for name in (run, *OTHER_LANES.get(run, ()))))
        page = by_name[run]
        page.bring_to_front()
        page.set_viewport_size({"width": width, "height": HEIGHT})
        if page.locator("#inspector").is_visible():
            page.locator("#round-close").click()
        return page

    def load(*runs: Run) -> Page:
        path = save_page(*runs)
        page = chromium.new_page()
        pages.append(page)
        page.set_default_timeout(PATIENCE * 1000)
        page.on("pageerror", lambda error: problems.append(error.stack))
        page.on("request", lambda request: request.url.startswith("http") and problems.append(request.url))
        page.set_viewport_size({"width": 1366, "height": HEIGHT})
        page.add_init_script(SCRIPTS)
        page.goto(path.as_uri())
        expect(page.locator("#lane-spec .tok").first).to_be_visible()
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not problems


def inspect(page: Page, selector: str = "[data-kind=rejected]", lane: str = "spec") -> None:
    page.locator(f"#lane-{lane} {selector}").first.click()
    expect(page.locator("#inspector")).to_be_visible()


# Recomputes every step: without changes, and with all values replaced by their recorded ones. Returns the number of
# lanes, and different outcomes.
RECOMPUTE = """async () => {
    const { decideStep, editable, stepDetails, lanes } = await scripts();
    const different = [], shown = Object.values(lanes).filter(lane => lane.records.length);
    for (const details of shown.flatMap(lane => lane.records.map((_, i) => stepDetails(lane, i)))) {
        const edits = Object.fromEntries(details.nodes.flatMap((node, n) => {
            const names = node.state === "ignored" ? [] : editable(details, n);
            return names.length ? [[n, Object.fromEntries(names.map((name) => [name, node[name]]))]] : [];
        }));
        const decision = decideStep(details, edits);
        if (decideStep(details).changed || decision.changed || String(decision.path) !== String(details.path))
            if (Object.keys(edits).length) different.push([details.t, decision.states]);
    }
    return [shown.length, different];
}"""


@pytest.mark.parametrize("name", ["rejection", "block", "tree", "greedy", "nasd"])
def test_recomputed_outcomes_equal_the_recorded_ones(name: str, open_run: Callable[..., Page]) -> None:
    assert open_run(name).evaluate(RECOMPUTE) == [1 + len(OTHER_LANES.get(name, ())), []]


# Acceptance as a function of a changed draw, p or q, by the definitions of the rules.
DECIDE = """async ([i, edits]) => {
    const { decideStep, stepDetails, lanes } = await scripts();
    return decideStep(stepDetails(lanes.spec, i), edits);
}"""


def steps_of(run: Run) -> list[Step]:
    return [event.step for event in run.lanes[SPEC].steps]


def test_changed_draws_decide_as_the_definition(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    page = open_run("rejection")
    checked = 0
    for step in [step for step in steps_of(runs["rejection"]) if len(step.draft) > 2][:8]:
        nodes = range(len(step.draft))
        shares = [p / q for p, q in zip(step.verdict.p, step.draft.token_probs, strict=True)]
        for draw in (0.0, 0.3, 0.999):
            edits = {str(n): {"draw": draw} for n in nodes}
            kept = next((n for n in nodes if draw >= min(1, shares[n])), len(nodes))
            assert page.evaluate(DECIDE, [step.i, edits])["path"] == list(range(kept))
            checked += 1
        certain = {str(n): {"draw": 0.5, "p": 0.6, "q": 0.5} for n in nodes}
        assert page.evaluate(DECIDE, [step.i, certain])["path"] == list(nodes)
        rejected = certain | {"1": {"draw": 0.5, "p": 0.2, "q": 0.5}}
        assert page.evaluate(DECIDE, [step.i, rejected])["states"][:3] == ["accepted", "rejected", "ignored"]
    assert checked > 8


def test_blocks_keep_up_to_the_last_draw_below_its_bound(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    page = open_run("block")
    step = next(step for step in steps_of(runs["block"]) if len(step.draft) == 4)
    bounds = step.verdict.bound
    last = max(range(4), key=lambda n: bounds[n])
    edits = {str(n): {"draw": bounds[n] / 2 if n == last else 1.0} for n in range(4)}
    assert page.evaluate(DECIDE, [step.i, edits])["path"] == list(range(last + 1))


def test_greedy_steps_keep_the_most_probable_token(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    page = open_run("greedy")
    steps = (step for step in steps_of(runs["greedy"]) if step.draft.tokens)
    step = next(step for step in steps if step.outcome(0) is Outcome.REJECTED)
    rival = max(p for token, p in step.verdict.target_top[0].top if token != step.draft.tokens[0])
    for p, kept in ((rival + 0.01, True), (rival - 0.01, False)):
        path = page.evaluate(DECIDE, [step.i, {"0": {"p": p}}])["path"]
        assert (path[:1] == [0]) is kept
    inspect(page)
    expect(page.locator("#round-nodes .track .q")).to_have_count(0)  # a point mass has no distribution


def test_player_shows_the_phases_of_a_step(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    page = open_run("rejection")
    inspect(page)
    player = page.locator("#player")
    i = int(page.locator("#round-at").input_value())
    lane = runs["rejection"].lanes[SPEC]
    step = lane.steps[i].step
    states = [step.outcome(node) for node in range(len(step.draft))]
    assert page.locator("#player .row").evaluate_all("rows => rows.map(r => r.dataset.state)") == states
    player.focus()
    page.keyboard.press("Home")
    expect(player).to_have_attribute("data-phase", "guess")
    expect(page.locator("#player .narration")).to_contain_text(f"The helper guessed {len(states)} tokens.")
    assert set(page.locator("#player .row").evaluate_all("rows => rows.map(r => r.dataset.state)")) == {"guess"}
    expect(page.locator("#player .figures").first).to_have_text(f"q {step.draft.token_probs[0]:.3f}")
    phases = ["pass", *["test"] * (len(states) - states.count("ignored")), "end", *["rest"] * ("ignored" in states)]
    for phase in phases:
        page.keyboard.press("ArrowRight")
        expect(player).to_have_attribute("data-phase", phase)
    expect(page.locator("#player .next")).to_be_disabled()
    expect(page.locator("#player .result")).to_contain_text(in_plain_words(explain(step, None, lane.recipe)))
    page.locator("h1").click()  # keys act only while the player has the focus
    page.keyboard.press("Home")
    expect(player).to_have_attribute("data-phase", phases[-1])
    player.focus()
    page.keyboard.press("Escape")
    expect(page.locator("#inspector")).to_be_hidden()
    expect(page.locator(f"#lane-spec .round:nth-of-type({i + 2}) .tok").first).to_be_focused()


def test_nodes_of_a_tree_are_reached_with_the_keyboard(open_run: Callable[..., Page]) -> None:
    page = open_run("tree")
    inspect(page)
    chips = page.locator("#player .row .tok")  # each beside its figures, also blanks and commas
    assert set(chips.evaluate_all("chips => chips.map((chip) => getComputedStyle(chip).position)")) == {"static"}
    leaves = page.locator("#round-tree .leaf")
    last = leaves.count() - 1
    assert leaves.evaluate_all("leaves => leaves.filter(leaf => leaf.tabIndex === 0).length") == 1
    leaves.first.focus()
    for _ in range(last):
        page.keyboard.press("ArrowDown")
    expect(leaves.last).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#round-nodes .node").last).to_be_in_viewport()
    assert not grave(page, "#inspector")


def test_dragging_the_draw_changes_the_outcome_and_can_be_undone(open_run: Callable[..., Page]) -> None:
    page = open_run("rejection")
    inspect(page)
    row = page.locator("#player .row[data-state=rejected]")
    node = row.get_attribute("data-node")
    row = page.locator(f"#player .row[data-node='{node}']")
    slider = row.locator("input.mark")
    slider.hover()  # scrolled by an animation
    box = slider.bounding_box()
    assert box is not None
    value = float(slider.input_value())
    page.mouse.move(box["x"] + 3 + value * (box["width"] - 6), box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] - 20, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert float(slider.input_value()) == 0
    expect(row).to_have_attribute("data-state", "accepted")
    page.locator("#player .reset").click()
    expect(row).to_have_attribute("data-state", "rejected")
    expect(page.locator("#player .reset")).to_be_hidden()


def test_play_runs_through_all_phases(open_run: Callable[..., Page]) -> None:
    page = open_run("rejection")
    inspect(page)
    page.locator("#player .first").click()
    page.locator("#player .play").click()
    expect(page.locator("#player .play")).to_have_text("❚❚ Pause")
    page.evaluate(QUICK)
    expect(page.locator("#player .play")).to_have_text("▶ Play")
    expect(page.locator("#player .next")).to_be_disabled()


COPIED = """async () => { // first step with a copied place
    const { stepDetails, lanes: { spec } } = await scripts();
    const sources = spec.records.map((_, i) => stepDetails(spec, i).source);
    const i = sources.findIndex((source) => source?.copied.length && source.excerpt);
    return [i, sources[i]];
}"""


def test_copied_guesses_are_highlighted_where_they_came_from(
    open_run: Callable[..., Page], runs: dict[str, Run]
) -> None:
    page = open_run("nasd")
    lane = runs["nasd"].lanes[SPEC]
    text = lane.header.prompt + "".join(event.text for event in lane.steps)
    i, source = page.evaluate(COPIED)
    (start, end), *_ = source["copied"]
    page.locator("#lane-spec .round").nth(i).locator(".tok").first.click()
    expect(page.locator("#round-source")).to_contain_text("Copied from the ")
    expect(page.locator("#round-source mark.copied")).to_have_text(text[start:end].replace("\n", "⏎"))
    ranges = "name => [...CSS.highlights.get(name)].map(String)"
    assert page.evaluate(ranges, "specdemo-copied")[0] == text[start:end]
    drafted = "".join(lane.steps[i].draft_texts)
    assert drafted.startswith(text[start:end])
    contexts = page.evaluate(ranges, "specdemo-context")
    assert len(contexts) == 2 and len(set(contexts)) == 1 and text[:start].endswith(contexts[0])
    page.locator("#round-close").click()
    assert page.evaluate("CSS.highlights.size") == 0


MIDDLES = "parts => parts.map(part => part.getBoundingClientRect()).map(box => box.top + box.height / 2)"


@pytest.mark.parametrize(("width", "place"), [(390, "drawer"), (1366, "right"), (1800, "column")])
def test_inspector_leaves_the_inspected_text_visible(width: int, place: str, open_run: Callable[..., Page]) -> None:
    page = open_run(RECORDED, width)
    token = page.locator("#lane-spec [data-kind=rejected]").first
    token.click()
    expect(page.locator("#inspector")).to_be_in_viewport()
    back, at, following = page.locator("#round-back, #round-at, #round-on").evaluate_all(MIDDLES)
    assert abs(back - at) < 5 and abs(following - at) < 5  # in a line
    fixed = page.evaluate("getComputedStyle(document.getElementById('inspector')).position === 'fixed'")
    assert place == "drawer" if fixed else page.locator(".stage").get_attribute("data-inspector") == place
    page.wait_for_function(  # scrolled by an animation
        """() => {
            const [token, inspector] = ["#lane-spec .current", "#inspector"].map(
                (name) => document.querySelector(name).getBoundingClientRect());
            return token.right <= inspector.left || token.left >= inspector.right || token.top < inspector.top;
        }"""
    )
    if place == "right":  # the display options below stay usable
        below = page.locator(".switches").bounding_box()
        panel = page.locator("#inspector").bounding_box()
        assert below and panel and panel["y"] + panel["height"] <= below["y"]
        page.locator("#round-close").click()
        inspect(page, ".tok", "ar")
        expect(page.locator(".stage")).to_have_attribute("data-inspector", "left")


def test_saved_page_replays_the_run_offline(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    """96 tokens in two lanes with recorded distributions."""
    run, page = runs[RECORDED], open_run(RECORDED)
    text = Path(page.evaluate("decodeURIComponent(location.pathname)")).read_text("utf-8")
    assert len(text.encode()) < 300_000
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    for name in (SPEC, BASELINE):
        assert drawn(page, name) == counted([json.loads(line) for line in run.trace(name).splitlines()])
    expect(page.locator("#verdict")).to_contain_text(json.loads(run.frame(0))["verdict"])
    total = page.locator("#lane-spec .round").count()
    page.locator("#race-at").focus()
    for key, shown in (("Home", 1), ("End", total)):
        page.keyboard.press(key)
        assert page.locator("#lane-spec .round:not([hidden])").count() == shown
    inspect(page)
    page.evaluate("document.getElementById('figures').open = true")
    expect(page.locator("#rounds tbody tr")).to_have_count(total)
    assert not grave(page, "#figures", schemes=["light"])
    expect(page.locator(".box .menu").first).to_be_hidden()  # its buttons need a server


def seconds(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2}f} s"


def test_time_axis_links_blocks_tokens_and_sentence(open_run: Callable[..., Page], runs: dict[str, Run]) -> None:
    run = runs[RECORDED]
    page = open_run(RECORDED)
    event = run.lanes[SPEC].steps[4]
    start = run.lanes[SPEC].steps[3].metrics.decode_s
    words = f"Step 4 of {len(run.lanes[SPEC].steps) - 1}, {seconds(start)} to {seconds(event.metrics.decode_s)}: "
    words += f"{len(event.pieces)} tokens {json.dumps(event.text)}."
    page.locator("#lane-spec .round").nth(4).locator(".tok").first.hover()
    expect(page.locator("#time-words")).to_have_text(words)
    page.mouse.move(0, 0)  # scrolling to the focus would move other tokens below the pointer
    bar = page.locator("[data-row=spec] .time-bar")
    bar.focus()
    expect(bar).to_have_attribute("aria-valuetext", words)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#lane-spec .linked-step")).to_have_count(1)
    expect(page.locator("#time-words")).to_contain_text("Step 5 of")
    page.keyboard.press("Enter")
    expect(page.locator("#round-number")).to_contain_text("5 of")
    assert not grave(page)


def test_plots_are_saved_as_complete_svg(open_run: Callable[..., Page]) -> None:
    page = open_run(RECORDED)
    page.evaluate("document.getElementById('figures').open = true")
    expect(page.locator("#chart-whatif svg")).to_be_visible()
    for plot, colour, *words in (
        ("chart-positions", ".accepted", "Guesses kept, by position"),
        ("chart-times", ".verify", "Time per step", "guessing ", "checking ", "the rest "),
        ("chart-whatif", ".line", "by number of guesses"),
        ("time-rows", ".run", "Speculative 0.086 s", "Baseline 0.093 s"),
    ):
        with page.expect_download() as download:
            page.locator(f"[data-plot={plot}]").click()
        assert download.value.suggested_filename == f"specdemo-{plot}.svg"
        root = ElementTree.fromstring(Path(download.value.path()).read_text("utf-8"))
        texts = " ".join(filter(None, (node.text for node in root.iter())))
        assert all(word in texts for word in words)
        drawn_shapes = [node for node in root.iter() if colour.lstrip(".") in node.get("class", "").split()]
        shown = page.locator(f"#{plot} {colour}").first.evaluate("n => getComputedStyle(n).fill")
        assert drawn_shapes and f"fill: {shown}" in drawn_shapes[0].get("style", "")
