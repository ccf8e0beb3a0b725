"""Explanations and palette of steps, and the tab that explains logs: terminal, inspector and tooltip agree."""

import json
import re
from pathlib import Path

import pytest
from fakes.figures import values
from fakes.trace_records import ALL_KEPT, CUT, PREFILL, REJECTION, absorb, header, step, step_event

from specdemo.core.explain import explain, figure
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.step_views import decided_by, in_plain_words
from specdemo.ui.tabs.explain import cost_chart, position_chart, statistics_of

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
    head, record = (json.loads(record.text) for record in run.records)
    step = step_event(line).step
    words = [filled(head["head"], node["why"], node) for node in record["nodes"]]
    assert words == [in_plain_words(explain(step, node, recipe)) for node in range(len(step.draft))]
    assert filled(head["head"], record["why"], {}) == in_plain_words(explain(step, None, recipe))
    assert not re.search("target|draft|residual|committed|point mass", " ".join(head["head"]["reasons"]))


LOG = (Path(__file__).parents[1] / "external" / "logs" / "vllm-window.log").read_text("utf-8")


def test_charts_contain_acceptance_by_position_and_the_cost_model() -> None:
    reported = statistics_of(LOG, 0)
    assert values(position_chart(reported), "") == pytest.approx(dict(enumerate(reported.by_position, 1)), rel=1e-4)
    assert values(cost_chart(reported), "speed-up")[1.0] == pytest.approx(reported.tokens_per_step, rel=1e-4)
    totals = statistics_of('{"num_draft_tokens": 3, "num_accepted_draft_tokens": 1}', None)
    assert position_chart(totals) == cost_chart(totals) == ""


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_player_does_not_change_decisions_of_lenient_rules(temperature: float) -> None:
    """Its bounds have no threshold."""
    assert decided_by({"rule": "lenient", "temperature": temperature}) == "none"
    assert decided_by({"rule": "rejection", "temperature": 0.7}) == "draw"
