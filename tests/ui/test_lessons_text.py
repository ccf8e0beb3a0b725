"""Claims of the lessons agree with the recorded runs."""

from __future__ import annotations

import pytest

from specdemo.ui.lessons import _conclusion, lesson_data, lessons_markup


def test_a_pass_over_several_tokens_takes_less_than_as_many_passes() -> None:
    passes = lesson_data()["passes"]
    ratio = passes["several"] / passes["single"]
    assert 1 < ratio < passes["rows"]
    assert f"{ratio:.2f} times as long, for {passes['rows']} times as many tokens" in lessons_markup()
    assert ratio < 2 or "most of the time" not in lessons_markup(), "reading is less than half of the longer pass"


def test_prediction_and_measurement_are_concluded() -> None:
    costs = lesson_data()["costs"]
    words = f"predicts {costs['predicted']:.2f}×; measured were {costs['measured']:.2f}×."
    assert f"{words} {_conclusion(costs['predicted'], costs['measured'])}" in lessons_markup()


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [(0.94, 1.08, "disagree"), (1.1, 0.9, "disagree"), (1.2, 1.4, "paid"), (0.8, 0.9, "cost time")],
)
def test_the_conclusion_follows_from_both_figures(predicted: float, measured: float, words: str) -> None:
    assert words in _conclusion(predicted, measured)
