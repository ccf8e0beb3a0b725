"""The theory tab without a browser: the run's point, curves, words, tables, the worked example."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import astuple, replace
from typing import Any

import pytest
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.theory import best_gamma, expected_tokens, operations, walltime_improvement
from specdemo.ui import theory_curves as understand
from specdemo.ui import theory_tables as tables
from specdemo.ui import worked_example as worked
from specdemo.ui.frames import Run
from specdemo.ui.lane import PLAIN, SPEC
from specdemo.ui.tabs.theory import DRAWINGS
from specdemo.ui.theory_curves import BOUNDS, DOT, RUN, SET, Settings, set_words, settings_from, settings_of
from specdemo.ui.theory_point import TheoryPoint, point_of, point_words

STEP = {"draft_s": 0.0, "verify_s": 0.02, "host_s": 0.005}  # of plain decoding: 25 ms


def ended(spec: list[dict] | None = None, plain: bool = True, head: dict | None = None) -> Run:
    """Two rounds: 5 tokens drafted, 3 of them accepted, 4 tested, 5 committed; beside it two plain steps."""
    run = Run((SPEC, PLAIN) if plain else (SPEC,))
    for event in (head or header(), *(spec or [PREFILL, REJECTION, ALL_KEPT]), end()):
        absorb(run, SPEC, event)
    if plain:
        for event in (header("ar"), PREFILL, *(step(i, pieces=["x"], **STEP) for i in (1, 2)), end()):
            absorb(run, PLAIN, event)
    run.finish()
    return run


def test_the_point_is_what_the_trace_says() -> None:
    point = point_of(ended())
    assert (point.alpha, point.share, point.gamma, point.tokens) == pytest.approx((0.75, 3 / 5, 2.5, 2.5))
    assert (point.c, point.v, point.o) == pytest.approx((0.004 / 0.025, 0.02 / 0.025, 0))
    assert point.speedup == pytest.approx((5 / 0.06) / (1 / 0.025))
    assert point.speedup == pytest.approx(point.tokens / (point.v + point.gamma * point.c + point.o))
    assert point.c_hat == pytest.approx(5 / 28)
    assert point.operations == pytest.approx((2 + 5 + 5 * 5 / 28) / 5)  # rows and drafts of two rounds, for 5 tokens
    assert point.theorem == pytest.approx(walltime_improvement(0.75, 2.5, 0.16))
    assert point.model == pytest.approx(expected_tokens(0.75, 2.5) / (0.8 + 2.5 * 0.16))
    words = point_words(point)
    assert all(word in words for word in ("α = 0.750", "= 0.600", "γ = 2.50", "**2.50**", "c = 0.160", "**2.08×**"))
    assert "trees" not in words


def test_without_a_plain_lane_only_what_needs_no_clock_is_known() -> None:
    point = point_of(ended(plain=False))
    assert (point.c, point.v, point.o, point.speedup, point.theorem, point.model) == (None,) * 6
    assert point.tokens == 2.5 and point.operations is not None
    assert "Without an AR baseline" in point_words(point) and "×" not in point_words(point)


def test_other_rules_count_their_acceptance() -> None:
    head = header()
    head["recipe"]["rule"] = "match"
    point = point_of(ended(head=head))
    assert point.alpha == 3 / 4 and point.counted and "accepted / tested" in point_words(point)


def test_trees_are_said_to_be_off_the_curves() -> None:
    tree = REJECTION | {"parents": [-1, -1, 0]}
    point = point_of(ended([PREFILL, tree]))
    assert not point.chains and "trees" in point_words(point)


def test_operations_of_a_draft() -> None:
    masses = REJECTION | {"q": None}
    assert point_of(ended([PREFILL, masses])).c_hat == 0  # n-grams multiply nothing
    assert point_of(ended([PREFILL, masses, ALL_KEPT])).c_hat == pytest.approx(5 / 28 * 2 / 5)  # a hybrid
    unlike = header()
    unlike["recipe"] |= {"quantization": "nf4", "drafter_quantization": "none"}
    for head in (unlike, header(environment={"target_bytes": 28e6, "drafter_bytes": None})):
        point = point_of(ended(head=head))
        assert point.c_hat is point.operations is None
        assert understand.operation_curves(Settings(), point)[-1] == (None, None, RUN)


def test_where_there_is_no_point_it_is_said_why() -> None:
    going = Run()
    for event in (header(), PREFILL, REJECTION):
        absorb(going, SPEC, event)
    plain = Run((PLAIN,))
    absorb(plain, PLAIN, header("ar"))
    plain.finish()
    for run, why in (
        (None, "No run available"),
        (going, "in progress"),
        (plain, "AR decoding"),
        (ended([PREFILL]), "tested no draft"),
        (ended([PREFILL, step(1, pieces=["x"])]), "tested no draft"),
    ):
        with pytest.raises(UserError, match=why):
            point_of(run)


@pytest.mark.parametrize("alpha", [0.0, 0.43, 0.8, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_every_drawing_has_its_dots_and_colours(alpha: float, known: bool) -> None:
    at, point = Settings(alpha=alpha, c=0.1, gamma=4, v=1.3, o=0.1), point_of(ended()) if known else None
    for curves, *_, colours, named, _, _ in itertools.chain(*DRAWINGS):
        rows = curves(at, point)
        assert {part for *_, part in rows} <= set(colours) and set(named) <= {part for *_, part in rows}
        dots = {part: [row[:2] for row in rows if row[2] == part] for part in (DOT, RUN)}
        assert len(dots[DOT]) == len(dots[RUN]) == 1
        assert (dots[RUN][0] == (None, None)) == (not known)
        numbers = [value for *place, _ in rows for value in place if value is not None]
        assert all(map(math.isfinite, numbers)) and numbers


def test_the_run_s_dots_are_its_figures() -> None:
    at, point = Settings(), point_of(ended())
    dots = {curves.__name__: curves(at, point)[-1] for curves, *_ in itertools.chain(*DRAWINGS)}
    assert dots == {
        "token_curves": (point.alpha, point.tokens, RUN),
        "speed_curves": (point.alpha, point.speedup, RUN),
        "operation_curves": (point.alpha, point.operations, RUN),
        "gamma_curves": (point.gamma, point.speedup, RUN),
        "best_curves": (point.alpha, point.gamma, RUN),
        "share_curves": (point.gamma, point.share, RUN),
    }


def test_curves_are_the_closed_forms() -> None:
    at = Settings(alpha=0.6, c=0.1, gamma=3, c_hat=0.2)
    tokens = {(x, part): y for x, y, part in understand.token_curves(at, None)}
    assert tokens[0.8, "3"] == tokens[0.8, SET] == expected_tokens(0.8, 3)
    assert tokens[0.6, DOT] == expected_tokens(0.6, 3) and tokens[0.9, "∞"] == pytest.approx(10)
    speed = {(x, part): y for x, y, part in understand.speed_curves(at, None)}
    assert speed[0.6, "3"] == speed[0.6, SET] == walltime_improvement(0.6, 3, 0.1)  # v = 1, o = 0
    dear = {(x, part): y for x, y, part in understand.speed_curves(replace(at, v=2, o=0.5), None)}
    assert dear[0.6, SET] == pytest.approx(2.176 / (2 + 0.3 + 0.5)) and dear[0.6, "3"] == speed[0.6, "3"]
    assert (0.6, operations(0.6, 3, 0.2), DOT) in understand.operation_curves(at, None)
    best = {(x, part): y for x, y, part in understand.best_curves(at, None)}
    assert best[0.6, "0.2"] == 2 and best[0.6, SET] == best_gamma(0.6, 0.1) == 3
    by_gamma = {(x, part): y for x, y, part in understand.gamma_curves(replace(at, v=1.6), None)}
    assert by_gamma[0, SET] == 1 and by_gamma[3, SET] == by_gamma[3, DOT] == pytest.approx(2.176 / 1.9)
    assert by_gamma[6, SET] == pytest.approx(expected_tokens(0.6, 6) / (1 + 0.6 * 6 / 3 + 0.6))  # rows cost evenly


def test_a_pass_below_one_step_does_not_get_cheaper_by_the_row() -> None:
    at = Settings(gamma=4, v=0.9)
    assert [at.rows(rows) for rows in (1, 2, 5, 17)] == [1, 0.9, 0.9, 0.9]
    assert [replace(at, v=1.4).rows(rows) for rows in (1, 3, 5, 9)] == pytest.approx([1, 1.2, 1.4, 1.8])


def test_sliders_go_where_the_run_is_as_far_as_they_reach() -> None:
    point = point_of(ended())
    assert settings_of(point) == Settings(alpha=0.75, c=0.16, gamma=2, v=0.8, o=0.0, c_hat=0.18)
    far = replace(point, alpha=1.0, c=7.0, gamma=40.0, v=0.1, o=None, c_hat=None)
    assert settings_of(far) == Settings(alpha=1, c=2, gamma=16, v=0.5, o=0, c_hat=Settings().c_hat)
    for one in (point, far):
        assert settings_from(astuple(settings_of(one))) == settings_of(one)


@pytest.mark.parametrize("bad", [None, "0.5", True, math.nan, -0.1, 2.1])
def test_a_half_typed_number_draws_nothing(bad: Any) -> None:
    good = list(astuple(Settings()))
    assert settings_from(good) == Settings()
    for i in range(len(BOUNDS)):
        if not (bad == 2.1 and list(BOUNDS)[i] in ("gamma", "v")):  # which reach that far
            assert settings_from([*good[:i], bad, *good[i + 1 :]]) is None


def test_the_words_name_the_best_draft() -> None:
    words = set_words(Settings(alpha=0.8, c=0.1, gamma=4, c_hat=0.1))
    assert "**3.36 tokens**" in words and "**2.40×** by Theorem 3.8" in words and "**6** with v and o (2.47×)" in words
    assert "says 3.0" in words and "1.64×" in words
    dear = set_words(Settings(alpha=0.8, c=0.1, gamma=4, v=2.0))
    assert "**2.40×** by Theorem 3.8" in dear and "**1.40×** once v" in dear
    hopeless = set_words(Settings(alpha=0.3, c=0.5))
    assert "Decode plainly" in hopeless and "none, decode plainly" in hopeless
    free = set_words(Settings(alpha=1.0, c=0.0))
    assert "no answer" in free and "64 or more" in free


def cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]


def test_the_papers_tables_and_the_run_s_own_rows() -> None:
    point = point_of(ended())
    _, *rows = cells(tables.leviathan_1(point))
    assert [row[2:] for row in rows[:-1]] == [
        ["1.53", "1.96"], ["1.58", "2.53"], ["1.23", "2.44"], ["1.63", "3.69"], ["1.11", "2.71"], ["1.60", "6.86"],
    ]  # fmt: skip
    assert rows[-1][0] == "**this run**, 0.75" and rows[-1][3] == "2.08"
    _, *rows = cells(tables.leviathan_2(point))
    shares = [int(row[-1].rstrip("%")) for row in rows[:-1]]
    assert len(shares) == 12 and (min(shares), max(shares)) == (68, 129)
    assert rows[-1][0] == "**this run**, draft" and rows[-1][5] == "2.08"
    _, *rows = cells(tables.guide(point))
    assert [row[3] for row in rows[:-1]] == ["2.17", "2.71", "2.88", "2.78"]
    assert all(row[3] == row[5] for row in rows) and rows[-1][1] == "0.60"
    head, *rows = cells(tables.by_gamma(Settings(alpha=0.8, c=0.1, gamma=5), point))
    assert [row[1] for row in rows[:-1]] == sorted((row[1] for row in rows[:-1]), reverse=True)  # that alpha falls
    assert {"5", "**this run**, 2.50"} <= {row[0] for row in rows} and all(len(row) == len(head) for row in rows)


def test_tables_without_a_run_or_without_a_clock() -> None:
    for made in (tables.guide(None), tables.leviathan_1(None), tables.leviathan_2(None)):
        assert "this run" not in made
    point = point_of(ended(plain=False))
    assert cells(tables.guide(point))[-1][2:4] == ["–", "–"]
    assert cells(tables.leviathan_2(point))[-1][4:] == ["–"] * 4


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([0.5, None, 0.3, 0.2], r"p\(b\) must be a number, not empty"),
        ([0.5, math.nan, 0.3, 0.2], r"p\(b\) must be a number"),
        ([0.5, 0.3, 0.3, -0.1], r"p\(d\) is -0.1: a probability is not below 0"),
        ([0, 0, 0, 0], "p adds up to 0"),
        ([1e308, 1e308, 1e308, 0], "p adds up to inf"),
    ],
)
def test_what_is_no_law_is_refused(values: list, why: str) -> None:
    with pytest.raises(UserError, match=why):
        worked.reference_probs("p", values)


def test_what_does_not_add_up_is_normalised_and_said() -> None:
    assert worked.reference_probs("q", [0.1, 0.2, 0.3, 0.4]) == (pytest.approx([0.1, 0.2, 0.3, 0.4]), "")
    probs, note = worked.reference_probs("q", [0.3, 0.4, 0.1, 0.3])
    assert sum(probs) == pytest.approx(1) and probs[1] == pytest.approx(0.4 / 1.1)
    assert note == "q adds up to 1.1, so it was divided by that. "


def some_laws() -> list[tuple[list[float], list[float]]]:
    chance = random.Random(3)
    distributions = [[chance.random() ** 3 for _ in range(4)] for _ in range(20)]
    distributions = [[x / sum(probs) for x in probs] for probs in distributions] + [
        [1.0, 0, 0, 0],
        [0, 1.0, 0, 0],
        [0.5, 0.5, 0, 0],
    ]
    return [(p, q) for p in distributions for q in distributions]


def test_the_example_adds_up_to_p() -> None:
    for p, q in some_laws():
        words = worked.example_words(p, q)
        beta = 1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert f"**β = {abs(beta):.3f}**" in words
        for row, a, b in zip(cells(words)[1:], p, q, strict=True):
            kept, corrected, total = map(float, re.findall(r"[\d.]+", row[-1]))
            assert total == pytest.approx(a, abs=6e-4) and kept == pytest.approx(min(a, b), abs=6e-4)
            assert corrected == pytest.approx(max(a - b, 0), abs=6e-4)
        heights: dict[str, float] = {}
        for label, height, part in worked.example_bars(p, q):
            assert height >= 0 and part in ("kept", "correction", "rejected")
            heights[label] = heights.get(label, 0) + height
        assert list(heights) == worked.PARTS_ORDER
        assert list(heights.values()) == pytest.approx([x for pair in zip(p, q, strict=True) for x in pair])


def test_the_bound_that_is_none_is_told_apart() -> None:
    assert "It fails here" in worked.example_words(worked.P, worked.Q)
    assert "It holds here" in worked.example_words(worked.P, worked.P)
    assert "KL(p‖q) = ∞" in worked.example_words([0.5, 0.5, 0, 0], [1.0, 0, 0, 0])


def test_a_trial_of_every_rule_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds are fixed; by chance one in a thousand would fail an exact rule."""
    monkeypatch.setattr(worked, "COUNT", 2_000)
    assert len(worked.choices()) == len(RULES) + 1
    for choice, (name, adjust) in worked.choices().items():
        done = worked.try_rule(choice, worked.P, worked.Q, 3, seed=5)
        words = worked.trial_words(choice, done, worked.P, worked.Q)
        exact = "exact" in choice and "lossy" not in choice
        assert exact == (adjust and name in ("rejection", "match", "coupled"))
        assert words.startswith("**The law is p**" if exact else "**The law is not p.** The rule is lossy.")
        drawn = {label: height for label, height, part in worked.trial_bars(done, worked.P, worked.Q)}
        assert list(drawn) == worked.SHARES_ORDER and sum(drawn.values()) == pytest.approx(3)
        assert drawn["a drawn"] == done.tokens.count(0) / worked.COUNT


def test_a_lossy_rule_is_not_called_exact_where_it_happens_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worked, "COUNT", 500)
    choice = next(choice for choice in worked.choices() if choice.startswith("ratio"))
    done = worked.try_rule(choice, worked.P, worked.P, 1, seed=5)
    words = worked.trial_words(choice, done, worked.P, worked.P)
    assert words.startswith("**No difference seen**") and "lossy all the same" in words
    with pytest.raises(UserError, match="unknown rule"):
        worked.try_rule("best", worked.P, worked.Q, 1, 0)


def test_a_point_has_a_field_for_every_slider() -> None:
    assert set(BOUNDS) <= set(TheoryPoint.__dataclass_fields__) and list(BOUNDS) == list(Settings.__dataclass_fields__)
