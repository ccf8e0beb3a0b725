"""Sentences and figures about runs: advice, result line, explanations, quantised copies, predictions; agreement."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from fakes.page import figure_of, values
from fakes.properties import holds_for
from fakes.shown_claims import chat_line, claims, without_names
from fakes.shown_figures import LEAST_PASS, MOST_PER_PASS, Line, RunFigures, unexplained
from fakes.traces import ALL_KEPT, CUT, PREFILL, REJECTION, absorb, end, header, step, step_event
from hypothesis import strategies as st

from benchmarks.document_tables import recorded_logs
from specdemo.core.explain import explain, figure
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.preflight import Estimate, Preflight
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run, in_plain_words, read_traces
from specdemo.ui.lane import BASELINE, LANES, SPEC, baseline_of
from specdemo.ui.run_figures import estimate_lengths, pass_costs, tiles
from specdemo.ui.service import Service
from specdemo.ui.summary import DRAFT_AT_THE_EDGE, PRESS_REPEAT, REPETITIVE
from specdemo.ui.tabs.edge import describe_link, edge_lane
from specdemo.ui.tabs.explain import cost_chart, position_chart, statistics_of
from specdemo.ui.tabs.prediction import SpeedupPrediction, contradicted_prediction
from specdemo.ui.text_comparison import compare_weight_formats
from specdemo.ui.visitors import answer_footer

LINK = {"cloud": {"mode": "speculative"}}


def decoded(
    plain_s: float,
    verify_s: float = 0.01,
    texts: float = 1.0,
    speeds: dict[str, list[float]] | None = None,
    **recipe: Any,
) -> Run:
    """Two lanes of 17 tokens: 8 steps of 2 tokens, and 16 AR steps of `plain_s` seconds."""
    run = Run((SPEC, BASELINE))
    drafted = [
        step(i, pieces=["x", "y"], draft=("x", "z"), accepted=(0,), tested=2, draft_s=0.0, verify_s=verify_s)
        for i in range(1, 9)
    ]
    drafted[-1]["policy"] = {"texts": texts}
    plain = [step(i, pieces=["x"], draft_s=0.0, verify_s=plain_s) for i in range(1, 17)]
    tokens = [token for line in drafted for token in line["tokens"]]
    for line, token in zip(plain, tokens, strict=True):
        line["tokens"] = [token]
    for name, method, lines in ((SPEC, "draft", drafted), (BASELINE, "ar", plain)):
        for line in lines:
            line["t"] = 0.5 + 0.01 * line["i"]
        absorb(run, name, header(method, recipe), PREFILL | {"t": 0.5}, *lines, end())
    run.speeds = speeds or run.speeds
    run.finish()
    return run


def line_of(run: Run) -> dict[str, Any]:
    return json.loads(run.frame(0))["headline"]


ONE_GUESS = {"label": "Try 1 guess at a time", "set": {"gamma": 1}}
REWRITE = {"label": "Try a text that repeats: Rewrite a text", "example": "Rewrite a text"}


@pytest.mark.parametrize(
    ("values", "text", "suggestions"),
    [
        ({"plain_s": 0.004}, "0.8× the speed, slower with drafts, same text.", [ONE_GUESS, PRESS_REPEAT]),
        ({"plain_s": 0.005, "pair": "smollm2-135m"}, "No clear difference: 1.0×", [REWRITE, PRESS_REPEAT]),
        # 2 tokens per pass and a speed-up of 3; a pass over 3 tokens that is faster than one over 1
        ({"plain_s": 0.03}, "not measurable", [PRESS_REPEAT]),
        ({"plain_s": 0.01, "verify_s": 0.009}, "not measurable", [PRESS_REPEAT]),
    ],
)
def test_suggestions_follow_from_the_result(values: dict[str, Any], text: str, suggestions: list[Any]) -> None:
    shown = line_of(decoded(**values))
    assert text in shown["text"] and shown["suggestions"] == suggestions
    assert shown["reason"].startswith("Another program used the processor") == (text == "not measurable")


def test_suggested_examples_exist() -> None:
    titles = {example["title"] for example in json.loads((ASSETS / "examples.json").read_text("utf-8"))["ready"]}
    assert titles >= {*REPETITIVE.values(), DRAFT_AT_THE_EDGE["example"]}


def test_an_edge_without_guesses_is_offered_the_draft_method() -> None:
    run = Run((SPEC, BASELINE))
    for name, method in ((SPEC, "hybrid"), (BASELINE, "ar")):
        lines = [step(i, pieces=["x"], draft_s=0.0, verify_s=0.01) | {"t": 0.5 + 0.01 * i} for i in range(1, 9)]
        absorb(run, name, header(method, LINK), PREFILL | {"t": 0.5}, *lines, end())
    run.finish()
    assert line_of(run)["reason"] == "Nothing was guessed: no phrase of the text fits."
    assert line_of(run)["suggestions"] == [DRAFT_AT_THE_EDGE, PRESS_REPEAT]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"plain_s": 0.004},
            "8 of 16 guesses were kept, and checking 3 tokens costs 2.50 times the time of writing 1.",
        ),
        ({"verify_s": 0.015}, "2.00 tokens for the time of 1.50 single tokens. {}: below 1.50 per check."),
        ({"verify_s": 0.0098}, "2.00 tokens for the time of 0.98 single tokens."),
        ({"verify_s": 0.0195}, "checking 3 tokens costs 1.95 times the time of writing 1. {}: below 1.95"),
        ({"verify_s": 0.021}, "checking 3 tokens costs 2.10 times the time of writing 1."),
        ({"plain_s": 0.009, "texts": 2.0}, "{}: below 1.11 per check. Other runs shared its passes"),
        ({"plain_s": 0.005, "texts": 2.0}, "the time of writing 1. Other runs shared its passes"),
    ],
)
def test_reasons_name_what_would_make_a_gain_a_loss(values: dict[str, Any], words: str) -> None:
    """A check gives at least one token, so a check that takes less time than one token cannot lose."""
    reason = line_of(decoded(**{"plain_s": 0.01, **values}))["reason"]
    assert words.format("Slower with more wrong guesses") in reason
    assert ("Slower" in reason) == ("{}" in words)


def test_figures_that_would_mislead_are_left_out() -> None:
    """A pass over a link includes the link; under rule block the acceptance of a token depends on the rest."""
    assert pass_costs(decoded(plain_s=0.01, **LINK).lanes) is None
    assert pass_costs({SPEC: decoded(plain_s=0.01).lanes[SPEC]}) is None
    note = tiles(decoded(plain_s=0.01, rule="block").lanes, {})["acceptance"][1]
    assert note == "8 of 16 drafted · mean overlap β 0.75"


def test_the_fastest_of_several_methods_is_named_in_the_table() -> None:
    run = Run((SPEC, BASELINE, "third"))
    for name, method, seconds in ((SPEC, "draft", 0.012), (BASELINE, "ar", 0.01), ("third", "nasd", 0.011)):
        guesses = {} if name == BASELINE else {"draft": ("x",), "accepted": (0,), "tested": 1}
        times = {"draft_s": 0.0, "verify_s": seconds}
        lines = [step(i, pieces=["x"] * (1 + bool(guesses)), **guesses, **times) for i in range(1, 9)]
        absorb(run, name, header(method), PREFILL, *lines, end())
    run.finish()
    speedups = [row[2] for row in json.loads(run.frame(0))["table"][1:]]
    assert speedups == ["1.7× (one run)", "1 (baseline)", "1.8× (one run, fastest)"]
    assert json.loads(run.frame(0))["names"] == {SPEC: "draft", "third": "n-grams, fastest"}


def test_the_displayed_one_of_several_pairs_is_explained() -> None:
    speeds = {SPEC: [160.0, 150.0, 170.0], BASELINE: [100.0, 100.0, 100.0]}
    verdict = json.loads(decoded(plain_s=0.01, verify_s=0.0125, speeds=speeds).frame(0))["verdict"]
    words = verdict.partition("3 alternating pairs. The first pair, which is displayed: ")[2]
    assert "Each check gave 2.00 tokens for the time of 1.25" in words and "The theory expects" in words


def test_a_disturbed_pair_that_is_displayed_is_explained_beside_the_factor_of_the_others() -> None:
    speeds = {SPEC: [300.0, 150.0, 170.0], BASELINE: [100.0, 100.0, 100.0]}
    shown = json.loads(decoded(plain_s=0.03, speeds=speeds).frame(0))
    assert shown["disturbed"] == [SPEC, BASELINE]
    assert shown["headline"]["text"].startswith("1.6× faster with drafts, 1.50 to 1.70 in 2 pairs")
    assert "bars are grey" in shown["headline"]["reason"] and shown["headline"]["suggestions"] == [PRESS_REPEAT]
    assert "2 of 3 alternating pairs" in shown["verdict"] and "Each check" not in shown["verdict"]


# --- explanations of steps and logs ----------------------------------------------------------------------------------

TREE = step(1, pieces=["b", "X"], draft=("a", "b"), accepted=(1,), tested=2) | {"parents": [-1, -1]}
UNVERIFIED = step(1, pieces=["a"], draft=("a", "b"), accepted=(0,)) | {
    "p": [None] * 2, "beta": [None] * 2, "draw": [None] * 2, "choices": [], "q": None, "remote": {"provisional": 1.0},
}  # fmt: skip


def filled(head: dict, why: int, figures: dict) -> str:
    """Fill in a template as the page does."""
    shown = {name: figure(figures.get(name)) for name in ("p", "q", "draw", "bound", "best")}
    return head["reasons"][why].format(**shown, rank=figures.get("rank"))


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled", "top1", "typical", "lenient"])
@pytest.mark.parametrize("line", [PREFILL, REJECTION, ALL_KEPT, CUT, TREE, UNVERIFIED])
def test_the_page_gives_the_explanation_of_the_terminal_in_plain_words(line: dict, rule: str) -> None:
    run, recipe = Run(), {"method": "draft", "gamma": 3, "temperature": 0.7, "rule": rule}
    absorb(run, SPEC, header(recipe=recipe), line)
    head, record = map(json.loads, run.records)
    step = step_event(line).step
    words = [filled(head["head"], node["why"], node) for node in record["nodes"]]
    assert words == [in_plain_words(explain(step, node, recipe)) for node in range(len(step.draft))]
    assert filled(head["head"], record["why"], {}) == in_plain_words(explain(step, None, recipe))
    assert not re.search("target|draft|residual|committed|point mass", " ".join(head["head"]["reasons"]))


def test_charts_contain_acceptance_by_position_and_the_cost_model() -> None:
    reported = statistics_of(recorded_logs()["vllm-window.log"], 0)
    assert figure_of(position_chart(reported))["x"].endswith(f"(n {reported.steps:.0f} drafts)")
    assert values(position_chart(reported), "") == pytest.approx(dict(enumerate(reported.by_position, 1)), rel=1e-4)
    assert values(cost_chart(reported), "speed-up")[1.0] == pytest.approx(reported.tokens_per_step, rel=1e-4)
    totals = statistics_of('{"num_draft_tokens": 3, "num_accepted_draft_tokens": 1}', None)
    assert position_chart(totals) == cost_chart(totals) == ""


# --- a quantised copy as drafter -------------------------------------------------------------------------------------


def test_the_comparison_names_the_first_difference_of_the_quantised_text() -> None:
    """Token 2 of the third lane differs."""
    forms = {SPEC: "none", BASELINE: "none", LANES[2]: "nf4"}
    run = Run(tuple(forms))
    for lane, form in forms.items():
        lines = [step(i, pieces=["x"], tokens=[7 if i == 1 and form == "nf4" else i]) for i in range(3)]
        absorb(run, lane, header("ar", {"quantization": form}), *lines, end())
    assert compare_weight_formats(run.lanes[LANES[2]], run.lanes[BASELINE]) == ", text differs from token 2 on"


# --- predictions, which a run may contradict -------------------------------------------------------------------------

PROMPT = "def quicksort(items):"
RECIPE = Recipe(pair="bundled", gamma=1, temperature=0.0)


def run_of(recipe: Recipe, prompt: str = PROMPT) -> Run:
    """Two tokens per step in the time of 1.25 steps of the baseline: 1.6 times as fast."""
    run = Run((SPEC, BASELINE), visitor="visitor")
    for name, own, pieces, guesses in ((SPEC, recipe, ["x", "y"], ("x",)), (BASELINE, baseline_of(recipe), ["x"], ())):
        times = {"draft_s": 0.0, "verify_s": 0.0125 if guesses else 0.01, "host_s": 0.0}
        lines = [step(i, pieces=pieces, draft=guesses, accepted=(0,) * len(guesses)) | times for i in range(1, 9)]
        made = header(recipe=asdict(own), prompt=prompt)
        absorb(run, name, made, PREFILL, *lines, end())
    run.finish()
    return run


def predicted(low: float, high: float) -> SpeedupPrediction:
    rows = tuple(Estimate(gamma, 2.0, 1.3, low, high) for gamma in (1, 2))
    return SpeedupPrediction(RECIPE, PROMPT, Preflight(RECIPE, 0.5, 0.1, {1: 1.0, 9: 2.0}, rows, 1, 1, "1 sampled", 48))


@pytest.mark.parametrize(
    ("low", "high", "changes", "prompt", "contradicted"),
    [
        (1.1, 1.58, {}, PROMPT, True),
        (1.1, 1.7, {}, PROMPT, False),
        (1.1, 1.58, {"gamma": 3}, PROMPT, False),  # other settings
        (1.1, 1.58, {"max_tokens": 9, "seed": 3}, PROMPT, True),
        (1.1, 1.58, {}, "another prompt", False),
    ],
)
def test_a_run_outside_the_interval_is_named(
    low: float, high: float, changes: dict[str, Any], prompt: str, contradicted: bool
) -> None:
    run = run_of(replace(RECIPE, **changes), prompt)
    words = predicted(low, high).describe(run)
    assert ("The last run measured 1.60×, outside this interval." in words) == contradicted
    service = Service(ModelPool(), engine=lambda *_: iter(()))
    service.visitors.get_or_add("visitor").prediction = predicted(low, high)
    assert (contradicted_prediction(service, run) == words) == contradicted
    service.worker.close()


# --- estimates of other draft lengths from a recorded run ------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ASSETS.glob("traces/*.jsonl")), ids=lambda path: path.stem)
def test_suggestion_advice_and_chart_use_one_estimate(path: Any) -> None:
    run = read_traces(path.read_text("utf-8"))
    frame = json.loads(run.frame(0))
    shown = frame["figures"][run.plan[0]]["what_if"]
    estimate = estimate_lengths(run.lanes[run.plan[0]], run.lanes.get(BASELINE))
    assert (shown is None) == isinstance(estimate, str)
    if isinstance(estimate, str):
        return
    assert [row[0] for row in shown["rows"]] == [row.gamma for row in estimate.rows]
    better, suggestions = estimate.better, frame["headline"]["suggestions"]
    gammas = {suggestion["set"]["gamma"] for suggestion in suggestions if "gamma" in suggestion.get("set", {})}
    assert gammas <= {better and better.gamma}
    assert "is estimated at" not in frame["verdict"] or f"γ {better and better.gamma} is estimated" in frame["verdict"]


# --- no pair of displayed figures contradicts the other, in quiet times and beside another program -------------------

NOISE = 0.02  # of quiet times
REMOTE = {"sent": 1.0, "bytes_up": 300.0, "bytes_down": 200.0, "escalated": 1.0}


@st.composite
def compared_runs(draw: st.DrawFn, quiet: bool) -> list[Line]:
    """Return two traces. In disturbed times some passes take longer by a factor."""
    linked, pass_s, row_s = draw(st.booleans()), draw(st.floats(1e-3, 0.1)), draw(st.floats(0, 1))
    steady = st.floats(1 - NOISE, 1 + NOISE)
    slow = st.just(draw(st.floats(1, 1.5) | st.floats(1, 10)))
    disturbances = (steady,) if quiet else (steady, slow, steady | slow)  # of no, all or some passes of a lane
    lanes: list[list[Line]] = []
    length = draw(st.integers(3, 12))
    for method in ("draft", "ar"):
        factors = draw(st.sampled_from(disturbances))
        steps = [timed(step(0, pieces=["a"]), pass_s, 0.0, draw(factors))]
        for i in range(1, length):
            guesses = draw(st.integers(0, 4)) if method == "draft" else 0
            kept = draw(st.integers(0, guesses))
            line = step(
                i, pieces=["x"] * (kept + 1), draft=("x",) * guesses, accepted=tuple(range(kept)), tested=guesses
            )
            line = timed(line, pass_s * (1 + row_s * guesses), 0.1 * pass_s * guesses, draw(factors))
            steps.append(line | {"policy": {}})
        length = 1 + sum(len(line["tokens"]) for line in steps[1:])
        lanes.append(steps)
    text = [token for line in lanes[0] for token in line["tokens"]]
    for plain, token in zip(lanes[1], text, strict=True):
        plain["tokens"] = [token]
    if draw(st.booleans()):
        lanes[1].pop()
    return [
        line for method, steps in zip(("draft", "ar"), lanes, strict=True) for line in written(method, steps, linked)
    ]


def timed(line: Line, verify_s: float, draft_s: float, factor: float) -> Line:
    return line | {"draft_s": draft_s, "verify_s": factor * verify_s, "host_s": 0.01 * verify_s}


def written(method: str, steps: list[Line], linked: bool) -> list[Line]:
    """Return the lines of a trace, with the times at which its steps end."""
    cloud = {"mode": "speculative" if method == "draft" else "cloud_only", "remote": "http://cloud"} if linked else None
    made = header(method, {"seed": 0, "max_tokens": 99, "top_p": 1.0, "cloud": cloud}, vocab_size=300)
    now, lines = 0.3, []
    for line in steps:
        now += sum(line[part] for part in ("draft_s", "verify_s", "host_s"))
        share = line["verify_s"] / 8
        link = {"remote": REMOTE | {"cloud_s": share, "up_s": share, "down_s": share, "rtt_s": 7 * share}}
        lines.append(line | {"t": now} | (link if linked else {}))
    return [made, *lines, end()]


def shown(lines: list[Line]) -> tuple[Run, dict[str, Any]]:
    run = Run((SPEC, BASELINE))
    name = ""
    for line in lines:
        if "specdemo" in line:
            name = BASELINE if line["recipe"]["method"] == "ar" else SPEC
        absorb(run, name, line)
    run.finish()
    return run, json.loads(run.frame(0))


TILES = {
    "acceptance": "guesses kept",
    "tokens_per_pass": "tokens / pass",
    "tokens_per_second": "tokens / s",
    "speedup": "speed-up",
    "memory": "memory",
}


def check(lines: list[Line]) -> RunFigures:
    run, state = shown(lines)
    figures = RunFigures.of(lines)
    ledger = " ".join(" ".join(cells) for _, *cells in state["figures"][SPEC]["ledger"]["rows"])
    texts = {
        "headline": state["headline"]["text"],
        "advice": " ".join(state["headline"][name] for name in ("reason", "loss")),
        "verdict": state["verdict"],
        "race-lengths": state["lengths"],
        "pass-costs": (state["passes"] or {"words": ""})["words"],
        "ledger": ledger,
        **{f"lane {name}": f"{rate} {state['texts'].get(name, '')}" for name, rate in state["rates"].items()},
        **{f"tile {name}": f"{TILES.get(name, '')} {value} {note}" for name, (value, note) in state["tiles"].items()},
    }
    parts = [*texts.items(), *(("run-table", " ".join(row)) for row in state["table"][1:])]
    for part, text in parts:
        rest = unexplained(without_names(text, figures), claims(figures, part, 1))
        assert not re.search(r"\d", rest), (part, text)
    assert not re.search(r"\d", unexplained(answer_footer(run.lanes, run.speeds), chat_line(figures)))
    check_rules(figures, state)
    return figures


def check_rules(figures: RunFigures, state: dict[str, Any]) -> None:
    """Relations between figures that a visitor could compute from the screen."""
    speedup = re.search(r"([\d.]+)×", state["headline"]["text"])
    assert (speedup is None) == figures.withheld()
    if state["passes"]:
        ratio, (single, several) = number(r"costs ([\d.]+) times", state["passes"]["words"]), state["passes"]["bars"]
        assert ratio >= LEAST_PASS - 0.005 and several[1] / single[1] == pytest.approx(ratio, abs=0.005)
    if speedup is None:
        texts = [state["headline"]["text"], state["verdict"], state["table"], state["tiles"]]
        assert "×" not in json.dumps(texts, ensure_ascii=False)
        return
    value = float(speedup[1])
    spec, plain = (re.findall(r"([\d.]+) tok/s", state["rates"][name])[0] for name in (SPEC, BASELINE))
    quotient = float(spec) / float(plain)
    rounded = half_digit(speedup[1]) + quotient * (half_digit(spec) / float(spec) + half_digit(plain) / float(plain))
    assert value == pytest.approx(quotient, abs=1.01 * rounded)
    if not figures.first.linked:
        gain = number(r"([\d.]+)", state["tiles"]["tokens_per_pass"][0])
        assert value <= MOST_PER_PASS * gain + 0.06
    if costs := re.search(r"gave ([\d.]+) tokens for the time of ([\d.]+) single", state["headline"]["reason"]):
        gave, took = map(float, costs.groups())
        assert gave / took == pytest.approx(value, abs=0.051 + 0.01 * value / took)
        parts = re.search(
            r"time of ([\d.]+) \(guessing ([\d.]+), checking ([\d.]+), the rest ([\d.]+)\)", state["verdict"]
        )
        total, *shares = map(float, parts.groups())
        assert sum(shares) == pytest.approx(total, abs=0.021)


def half_digit(text: str) -> float:
    """Return the largest error of a rounded figure."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1])


@pytest.mark.slow
@holds_for(30, lines=compared_runs(quiet=True))
def test_figures_of_quiet_times_agree_and_are_shown(lines: list[Line]) -> None:
    assert not check(lines).withheld()


@pytest.mark.slow
@holds_for(30, lines=compared_runs(quiet=False))
def test_figures_of_disturbed_times_agree_or_are_withheld(lines: list[Line]) -> None:
    check(lines)


@pytest.mark.slow
@holds_for(10, lines=compared_runs(quiet=False).filter(lambda lines: lines[0]["recipe"]["cloud"]))
def test_shares_of_the_link_sum_to_the_whole(lines: list[Line]) -> None:
    run, _ = shown(lines)
    words = describe_link(edge_lane(run))
    times = re.search(r"Time: (.*?)\. The link took (\d+) %", words)
    assert times
    shares = dict(re.findall(r"([a-z' ]+?) (\d+) %", times[1]))
    assert sum(map(int, shares.values())) == pytest.approx(100, abs=0.5 * len(shares))
    link = sum(int(value) for name, value in shares.items() if name.strip() in ("sending", "link delay", "receiving"))
    assert int(times[2]) == pytest.approx(link, abs=2)
