"""Sentences about a run: advice, meaning of alpha, result line, badges of lanes, comparison over a link."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.core.events import Header
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC, lanes_of, name_lanes
from specdemo.ui.run_figures import pass_costs, tiles
from specdemo.ui.summary import verdict

AR_S = 0.01
PLAIN_STEPS = [step(i, pieces=["x"], draft_s=0.0, verify_s=AR_S) for i in range(1, 9)]


def words_after(
    beta: float, draft_s: float, verify_s: float, accepted: int = 1, gamma: int = 4, **recipe: Any
) -> tuple[str, str]:
    """Verdict and acceptance note after steps of `gamma` drafts; seconds are per step, AR steps take `AR_S`."""
    run, draft = Run((SPEC, PLAIN)), tuple("abcdefgh"[:gamma])
    made = header()
    made["recipe"] = made["recipe"] | {"gamma": gamma, "rule": "rejection", "policy": "fixed"} | recipe
    tested = min(accepted + 1, gamma)
    more = {"beta": [beta] * tested + [None] * (gamma - tested), "draft_s": draft_s, "verify_s": verify_s}
    pieces, path = ["x"] * (accepted + 1), tuple(range(accepted))
    drafted = [step(i, pieces=pieces, draft=draft, accepted=path, tested=tested, **more) for i in range(1, 9)]
    absorb(run, SPEC, made, PREFILL, *drafted, end())
    absorb(run, PLAIN, header("ar"), PREFILL, *PLAIN_STEPS, end())
    run.finish()
    return verdict(run.lanes, {}), tiles(run.lanes, {})["acceptance"][1]


@pytest.mark.parametrize(
    ("figures", "recipe", "advice"),
    [
        (
            (0.3, 0.02, 0.01),
            {},
            "Acceptance (mean overlap β 0.30) does not exceed c 0.50: confirm with Repeat, then disable",
        ),
        ((0.4, 0.004, 0.04), {}, "γ 0 is estimated at"),
        ((0.5, 0.008, 0.014), {"gamma": 8}, "γ 2 is estimated at"),
        (
            (0.3, 0.02, 0.01),
            {"method": "tree"},
            "lower “Nodes per draft”, or confirm with Repeat and disable",
        ),
        ((0.3, 0.0, 0.03), {"method": "lookahead"}, "lower “Window, positions” or “Order n”"),
    ],
)
def test_advice_names_a_change_that_helps(figures: tuple, recipe: dict, advice: str) -> None:
    words, _ = words_after(*figures, **recipe)
    assert "slower with drafts in this run" in words and advice in words
    assert "shorter draft" not in words


def test_alpha_is_accepted_over_tested_on_the_whole_page() -> None:
    """Half of the tested tokens are accepted; the mean of sum min(p, q) is 0.6."""
    words, note = words_after(0.6, 0.001, 0.01)
    assert note == "8 of 32 drafted · α 0.50 · mean overlap β 0.60" and "With mean overlap β 0.60," in words
    words, note = words_after(0.6, 0.001, 0.01, rule="match")
    assert note == "8 of 32 drafted · α 0.50" and "With α 0.50," in words
    assert "β" not in words + note
    words, note = words_after(0.6, 0.001, 0.01, rule="block")
    assert note == "8 of 32 drafted · mean overlap β 0.60" and "α" not in words


LINK = {"cloud": {"mode": "speculative"}}


def compared(plain_s: float, verify_s: float = 0.01, temperature: float = 0.0, **recipe: Any) -> Run:
    run = decoded(plain_s, verify_s, temperature, **recipe)
    run.finish()
    return run


def decoded(plain_s: float, verify_s: float = 0.01, temperature: float = 0.0, texts: float = 1.0, **recipe: Any) -> Run:
    """Two lanes of 17 tokens: 8 steps of 2 tokens, and 16 AR steps of `plain_s` seconds."""
    run = Run((SPEC, PLAIN))
    drafted = [
        step(i, pieces=["x", "y"], draft=("x", "z"), accepted=(0,), tested=2, draft_s=0.0, verify_s=verify_s)
        for i in range(1, 9)
    ]
    drafted[-1]["policy"] = {"texts": texts}
    plain = [step(i, pieces=["x"], draft_s=0.0, verify_s=plain_s) for i in range(1, 17)]
    tokens = [token for line in drafted for token in line["tokens"]]
    for line, token in zip(plain, tokens, strict=True):
        line["tokens"] = [token]
    for name, method, lines in ((SPEC, "draft", drafted), (PLAIN, "ar", plain)):
        made = header(method)
        made["recipe"] = made["recipe"] | {"temperature": temperature} | recipe
        for line in lines:
            line["t"] = 0.5 + 0.01 * line["i"]
        absorb(run, name, made, PREFILL | {"t": 0.5}, *lines, end())
    return run


def line_of(run: Run) -> dict[str, Any]:
    return json.loads(run.frame(0))["headline"]


def test_passes_shared_with_other_runs_are_named() -> None:
    run = decoded(plain_s=0.005, texts=2.0)
    run.finish()
    reason = "A step gave 2.0 tokens and took 2.0 times as long as a step of the baseline."
    assert line_of(run)["reason"] == f"{reason} Other runs shared its passes, which takes longer."


def test_a_loss_is_named_with_one_suggestion() -> None:
    shown = line_of(compared(plain_s=0.004))
    assert shown["text"].startswith("0.8×, slower with drafts in this run, same text.") and shown["tone"] == "bad"
    assert shown["suggestion"] == {"label": "Try γ 1", "set": {"gamma": 1}}


@pytest.mark.parametrize(
    ("ratios", "words", "tone"),
    [
        ((1.1, 1.5, 2.0, 1.2, 4.0), "1.5× faster with drafts in all 5 pairs", "good"),
        ((0.6, 0.7, 0.8, 0.9, 0.95), "0.8×, slower with drafts in all 5 pairs", "bad"),
        ((0.9, 1.2, 1.3, 1.4, 1.5), "No clear difference: 1.3×", "even"),
    ],
)
def test_repeats_decide_by_all_pairs(ratios: tuple[float, ...], words: str, tone: str) -> None:
    run = decoded(plain_s=0.01)
    run.speeds = {SPEC: list(ratios), PLAIN: [1.0] * 5}
    run.finish()
    assert line_of(run)["text"].startswith(words) and line_of(run)["tone"] == tone
    assert line_of(run)["reason"].startswith("In the displayed pair, a step gave 2.0 tokens")
    assert tone != "bad" or line_of(run)["suggestion"] == {"label": "Turn speculation off", "set": {"method": "ar"}}


def test_lanes_over_a_link_are_compared_by_total_time() -> None:
    """The remote baseline streams its tokens: without the first token it would be 20 times as fast."""
    run = compared(plain_s=0.0005, **LINK)
    state = json.loads(run.frame(0))
    spec, plain = (0.5 + 8 * 0.01, 0.5 + 16 * 0.0005)
    assert state["tiles"]["speedup"] == [f"{plain / spec:.1f}×", "one run, total time"]
    assert f"{spec:.2f} against {plain:.2f} s in total" in state["verdict"] and "streams its tokens" in state["verdict"]
    assert state["headline"]["text"].startswith("0.9×, slower with drafts in total time in this run")


def test_a_lane_says_how_its_text_relates_to_the_baseline() -> None:
    texts = json.loads(compared(plain_s=0.01).frame(0))["texts"]
    assert texts == {SPEC: ["same text", "All 17 tokens equal the baseline's.", "good"]}
    run = decoded(plain_s=0.01, temperature=0.8)
    run.lanes[PLAIN].lines[2] = run.lanes[PLAIN].lines[2].replace('"tokens": [100]', '"tokens": [99]')
    run.finish()
    state = json.loads(run.frame(0))
    badge, why, tone = state["texts"][SPEC]
    assert badge == "other random text" and "own random numbers" in why and not tone
    assert "another random draw of the text" in state["headline"]["text"]


def test_passes_are_compared_by_their_measured_times() -> None:
    costs = pass_costs(compared(plain_s=0.01, verify_s=0.013).lanes)
    assert costs == {
        "words": "Why: checking 3 tokens takes 1.3 times as long as writing 1.",
        "bars": [["writing 1", 0.01], ["checking 3", 0.013]],
    }
    disturbed = pass_costs(compared(plain_s=0.01, verify_s=0.002).lanes)
    words = "Other programs disturbed the times of the passes: checking 3 tokens cannot be faster than writing 1. "
    assert disturbed and disturbed["words"] == f"{words}Press Repeat."
    assert "Why: " in (pass_costs(compared(plain_s=0.01, verify_s=0.0095).lanes) or {})["words"]
    assert pass_costs(compared(plain_s=0.01, **LINK).lanes) is None  # a pass includes the link
    assert pass_costs({SPEC: compared(plain_s=0.01).lanes[SPEC]}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repetition_penalty": 1.3}, "draft, γ 4, repetition penalty 1.3"),
        ({"top_p": 0.9, "seed": 7}, "draft, γ 4, top p 0.9, seed 7"),
        ({"bad_words": ("if", "x" * 99)}, "draft, γ 4, bad words if/xxxxxxxxxxxxxxxxx"),
        ({"method": "nasd", "drafter_top_p": 0.5}, "n-grams, γ 4"),
        ({"gamma": 5, "policy": "dynamic"}, "draft, γ by dynamic, gamma 5"),
        ({"drafter": "same"}, "draft by int8 copy, γ 4"),
        ({"use_cache": False}, "draft, γ 4, use cache off"),
        ({}, "draft, γ 4"),
    ],
)
def test_titles_of_added_lanes_name_the_options_that_differ(changes: dict[str, Any], words: str) -> None:
    first, run = Recipe(), Run((SPEC, PLAIN, "third"))
    added = replace(first, **changes)
    for name, recipe in lanes_of(first, True, [added]).items():
        run.absorb(name, Header(asdict(recipe), "def", (5, 6)))
    assert [lane.title for lane in run.lanes.values()] == ["draft, γ 4", "target only", words]
    assert name_lanes([first, added]) == f"draft, γ 4 (); {words} ()"
