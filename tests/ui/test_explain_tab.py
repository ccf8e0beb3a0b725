"""Tab that explains logs: values from the browser, charts and the diagnoses of the terminal."""

from __future__ import annotations

from pathlib import Path

from specdemo.external.diagnosis import conclusions
from specdemo.ui.tabs.explain import cost_rows, position_rows, statistics_of

LOG = (Path(__file__).parents[1] / "external" / "logs" / "vllm-window.log").read_text("utf-8")


def test_charts_contain_acceptance_by_position_and_the_cost_model() -> None:
    reported = statistics_of(LOG, 0)
    assert [row[1] for row in position_rows(reported)] == list(reported.by_position)
    assert cost_rows(reported)[0][:2] == (1.0, reported.tokens_per_step)
    assert not cost_rows(statistics_of('{"num_draft_tokens": 3, "num_accepted_draft_tokens": 1}', None))


def test_the_speed_without_drafts_enables_the_diagnosis_of_fixed_cost() -> None:
    assert any("not diagnosed" in line for line in conclusions(statistics_of(LOG, None)))
    assert statistics_of(LOG, 150).ar_tokens_per_second == 150.0
    assert not any("not diagnosed" in line for line in conclusions(statistics_of(LOG, 150)))
