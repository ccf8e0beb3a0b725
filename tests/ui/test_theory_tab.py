"""Theory tab without a browser: point of a run, worked example, timeline of model calls."""

import math
import random
import re
from typing import Any

import pytest
from fakes.figures import figure_of
from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.core.errors import UserError
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.tabs import worked_example as worked
from specdemo.ui.tabs.theory import Coefficients, call_timeline, calls, describe_run, point_of, slider_values

pytestmark = pytest.mark.slow


def ended(*lines: dict[str, Any], **head: Any) -> Run:
    run = Run((SPEC,))
    absorb(run, SPEC, header(**head), PREFILL, *lines, end())
    run.finish()
    return run


def test_costs_and_speedup_require_a_baseline_lane() -> None:
    point = point_of(ended(REJECTION, ALL_KEPT))
    at = point.coefficients
    assert all(map(math.isnan, (at.c, at.v, at.o, point.speedup, at.speedup)))
    assert point.tokens == 2.5 and not math.isnan(point.operations)
    assert "Without an AR baseline" in describe_run(point) and "×" not in describe_run(point)
    defaults = Coefficients()
    assert slider_values(at) == [0.75, defaults.c, 2, defaults.v, defaults.o, round(5 / 28, 2)]
    tree = point_of(ended(REJECTION | {"parents": [-1, -1, 0]}))
    assert not tree.chains and "trees" in describe_run(tree)


@pytest.mark.parametrize(
    ("values", "why"), [([0, 0, 0, 0], "p sums to 0"), ([1e308, 1e308, 1e308, 0], "p sums to inf")]
)
def test_invalid_probabilities_raise_an_error(values: list, why: str) -> None:
    with pytest.raises(UserError, match=why):
        worked.parse_probs("p", values)


def test_example_columns_sum_to_p() -> None:
    generator = random.Random(3)
    distributions = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0.5, 0.5, 0, 0]]
    for _ in range(20):
        weights = [generator.random() ** 3 for _ in range(4)]
        distributions.append([weight / sum(weights) for weight in weights])
    for p, q in ((p, q) for p in distributions for q in distributions):
        words = worked.describe_example(p, q)
        assert f"**β = {sum(map(min, p, q)):.3f}**" in words
        _, *rows = [line for line in words.splitlines() if line.startswith("|") and "---" not in line]
        for row, a, b in zip(rows, p, q, strict=True):
            accepted, corrected, total = map(float, re.findall(r"[\d.]+", row.strip("| ").rpartition("|")[2]))
            assert total == pytest.approx(a, abs=6e-4) and accepted == pytest.approx(min(a, b), abs=6e-4)
            assert corrected == pytest.approx(max(a - b, 0), abs=6e-4)


# --- timeline of model calls ------------------------------------------------------------------------------------------


def test_a_step_is_gamma_drafter_calls_and_a_target_pass() -> None:
    """In order and without overlap; the browser tests compare the durations with the trace."""
    found = calls(ended(REJECTION, ALL_KEPT).lanes[SPEC])
    assert [call.kind for call in found] == ["prompt", *["draft"] * 3, "target", *["draft"] * 2, "target"]
    for earlier, later in zip(found, found[1:], strict=False):
        assert earlier.start + earlier.duration <= later.start + 1e-6
    assert found[4].start + found[4].duration == pytest.approx(1000 * REJECTION["t"])


def test_a_level_of_a_tree_is_a_call_and_drafts_of_a_text_are_none() -> None:
    tree = step(1, pieces=["b", "X"], draft=("a", "b", "c"), accepted=(1,), tested=2) | {"parents": [-1, -1, 1]}
    _, first, second, target = calls(ended(tree).lanes[SPEC])
    assert (first.kind, second.kind, target.kind) == ("draft", "draft", "target")
    assert "'a' rejected, 'b' accepted" in first.tooltip and "'c'" in second.tooltip
    line = step(1, pieces=["b", "X"], draft=("b",), accepted=(0,), q=None, origin=[{"source": "n-gram"}])
    assert [call.kind for call in calls(ended(line).lanes[SPEC])] == ["prompt", "search", "target"]
    assert "encoder and first pass" in calls(ended(encoder=True).lanes[SPEC])[0].tooltip


def test_markup_in_tokens_of_the_timeline_is_escaped() -> None:
    line = step(1, pieces=['<b>"', "X"], draft=('<b>"',), accepted=(0,))
    text = call_timeline([ended(line).lanes[SPEC]], 0, 16)
    assert "<b>" not in text and "'<b>\"' accepted" in figure_of(text)["blocks"][1]["tooltip"]
