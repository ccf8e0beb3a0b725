"""Claims of the lessons agree with the recorded runs."""

import re

import pytest

from specdemo.core.theory import expected_tokens, speedup
from specdemo.ui.lessons import _conclusion, lesson_data, lessons_markup


def test_right_choices_are_those_of_the_recorded_runs() -> None:
    data = lesson_data()
    right = [question["choices"][question["right"]] for question in data["questions"]]
    assert all(len(set(question["choices"])) == 3 for question in data["questions"])
    rejected = data["survive"][-1]["nodes"][1]
    share = rejected["p"] / rejected["q"]
    assert rejected["state"] == "rejected" and right[2] == f"In {100 * share:.0f} % of the draws"
    assert data["copied"][-1]["step"]["origin"][0]["source"] == "n-gram" and right[3] == "From the text before"
    costs, gamma = data["costs"], round(data["costs"]["gamma"])
    least = int(re.search(r"\d+", right[4])[0]) / 100
    gains = [
        speedup(expected_tokens(alpha, gamma), gamma, costs["c"], costs["v"], costs["o"])
        for alpha in (least - 0.01, least)
    ]
    assert gains[0] <= 1 < gains[1]


def test_sentences_are_short_and_formulas_are_behind_details() -> None:
    shown = re.sub(r"<details>.*?</details>", "", lessons_markup(), flags=re.DOTALL)
    assert not re.search("[α-ω]", shown)
    for paragraph in re.findall(r"<p(?! class=.lesson-text)[^>]*>(.*?)</p>", shown, re.DOTALL):
        for sentence in re.split(r"(?<=[.?!:]) ", paragraph):
            assert len(sentence.split()) <= 20, sentence


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [(0.94, 1.08, "disagree"), (1.1, 0.9, "disagree"), (1.2, 1.4, "paid"), (0.8, 0.9, "cost time")],
)
def test_the_conclusion_follows_from_both_figures(predicted: float, measured: float, words: str) -> None:
    assert words in _conclusion(predicted, measured)
