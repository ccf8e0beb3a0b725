"""Claims of the lessons agree with the recorded runs."""

import re

from specdemo.core.theory import expected_tokens, speedup
from specdemo.ui.lessons import lesson_data, lessons_markup


def predicted(alpha: float) -> float:
    costs = lesson_data()["costs"]
    gamma = round(costs["gamma"])
    return speedup(expected_tokens(alpha, gamma), gamma, costs["c"], costs["v"], costs["o"])


def test_right_choices_are_those_of_the_recorded_runs() -> None:
    data = lesson_data()
    right = re.findall(r"<button [^>]*data-right>(.*?)</button>", lessons_markup())
    assert float(right[0].removesuffix(" ms")) == round(1000 * data["passes"]["several"], 2)
    assert right[1] == f"{len(data['race'][0][1]) - 1} passes"
    rejected = data["survive"][-1]["nodes"][1]
    share = rejected["p"] / rejected["q"]
    assert rejected["state"] == "rejected" and right[2] == f"In {100 * share:.0f} % of the draws"
    assert data["copied"][-1]["step"]["origin"][0]["source"] == "n-gram" and right[3] == "From the text before"
    least = int(re.search(r"\d+", right[4])[0]) / 100
    assert predicted(least - 0.01) <= 1 < predicted(least)


def test_the_conclusion_follows_from_both_figures() -> None:
    shown = re.search(r"This predicts ([\d.]+)×; measured were ([\d.]+)×. (.*?)<", lessons_markup())
    assert shown and (float(shown[1]) > 1) != (float(shown[2]) > 1) and "disagree" in shown[3]
