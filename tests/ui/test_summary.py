"""Sentences about runs: advice, result line, explanations of steps and logs, quantised copies, predictions."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fakes.figures import figure_of, values
from fakes.trace_records import ALL_KEPT, CUT, PREFILL, REJECTION, absorb, end, header, step, step_event

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
from specdemo.ui.tabs.explain import cost_chart, position_chart, statistics_of
from specdemo.ui.tabs.prediction import SpeedupPrediction, contradicted_prediction
from specdemo.ui.text_comparison import compare_weight_formats

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


# --- explanations of steps and logs -----------------------------------------------------------------------------------

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


LOG = (Path(__file__).parents[1] / "external" / "logs" / "vllm-window.log").read_text("utf-8")


def test_charts_contain_acceptance_by_position_and_the_cost_model() -> None:
    reported = statistics_of(LOG, 0)
    assert figure_of(position_chart(reported))["x"].endswith(f"(n {reported.steps:.0f} drafts)")
    assert values(position_chart(reported), "") == pytest.approx(dict(enumerate(reported.by_position, 1)), rel=1e-4)
    assert values(cost_chart(reported), "speed-up")[1.0] == pytest.approx(reported.tokens_per_step, rel=1e-4)
    totals = statistics_of('{"num_draft_tokens": 3, "num_accepted_draft_tokens": 1}', None)
    assert position_chart(totals) == cost_chart(totals) == ""


# --- a quantised copy as drafter --------------------------------------------------------------------------------------


def test_the_comparison_names_the_first_difference_of_the_quantised_text() -> None:
    """Token 2 of the third lane differs."""
    forms = {SPEC: "none", BASELINE: "none", LANES[2]: "nf4"}
    run = Run(tuple(forms))
    for lane, form in forms.items():
        lines = [step(i, pieces=["x"], tokens=[7 if i == 1 and form == "nf4" else i]) for i in range(3)]
        absorb(run, lane, header("ar", {"quantization": form}), *lines, end())
    assert compare_weight_formats(run.lanes[LANES[2]], run.lanes[BASELINE]) == ", text differs from token 2 on"


# --- predictions, which a run may contradict --------------------------------------------------------------------------

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


# --- estimates of other draft lengths from a recorded run -------------------------------------------------------------


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
