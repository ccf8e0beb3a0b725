"""Studies on tiny models or fakes with known results."""

from __future__ import annotations

import json

import pytest

from benchmarks import edge_cloud, larger_target, memory, page_cost, pass_cost
from benchmarks.edge_cloud import LinkRuns, gamma_for
from benchmarks.runs import StepTotals
from specdemo.core.metrics import percentile
from specdemo.core.theory import best_gamma_over

pytestmark = pytest.mark.slow


def test_the_parts_of_a_step_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """All parts are positive, shares add up to 100 %, and the patched calls are restored."""
    before = [getattr(owner, name) for owner, name, _ in pass_cost.TIMED]
    settings = ["breakdown", "--gamma", "2", "--temperature", "0", "0.5", "--prompts", "1", "--max-tokens", "24"]
    assert pass_cost.main(settings) == 0
    assert [getattr(owner, name) for owner, name, _ in pass_cost.TIMED] == before
    parts = json.loads(capsys.readouterr().out.splitlines()[-1])["time_breakdown"]
    assert len(parts) == 5
    for key in ("0", "0_5"):
        shares = {part["part"]: part[f"share_{key}"] for part in parts}
        assert min(shares.values()) >= 0 and sum(shares.values()) == pytest.approx(1)
        assert all(share > 0 for part, share in shares.items() if "passes" in part)


def test_predicted_speedups_follow_the_cost_model() -> None:
    """Without costs of rows the longest draft is best; where the second row costs a pass, the shortest."""
    free = larger_target.predicted([1.0, 1.0, 1.0, 1.0], draft_s=0.0)
    assert free["alpha_50"] == "1.88 (3)" and free["alpha_90"] == "3.44 (3)"
    assert larger_target.predicted([1.0, 2.0, 3.0, 4.0], draft_s=0.5)["alpha_50"] == "0.60 (1)"


@pytest.mark.exhaustive
def test_random_models_of_a_shape_run_on_the_native_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WIDTH": 64, "INNER": 128, "LAYERS": 2, "HEADS": 2}.items():
        monkeypatch.setattr(larger_target, name, value)
    assert larger_target.main(["--context", "16", "--rows", "1", "2", "--rounds", "1"]) == 0
    records = json.loads(capsys.readouterr().out.splitlines()[-1])["larger_target-gain"]
    assert [record["form"] for record in records] == ["Q4_1", "Q8_0"]
    entries = 49152 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of all matrices
    assert [record["gb"] for record in records] == pytest.approx([entries * 0.625e-9, entries * 1.0625e-9], rel=0.02)


def test_gates_save_calls_and_lose_agreement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_cloud, "PERCENTILES", (80,))
    assert edge_cloud.main(["gates", "--max-tokens", "12", "--prompts", "2"]) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["gates"]
    always, never = points[0], points[-1]
    assert (always["signal"], always["saved"], always["agreement"], always["beta"]) == ("verify always", 0, 1, 1)
    assert len(points) == 6 and never["saved"] > 0.5 and never["agreement"] < 1 > never["beta"]


def totals(step_s: float, drafted: tuple[int, ...] = (4,) * 10, beta: float = 1.0, tokens: int = 50) -> StepTotals:
    """Steps of `step_s` seconds: a tenth for drafting, a fifth on the link, the rest in the cloud."""
    total_s = step_s * len(drafted)
    return StepTotals(
        tokens, drafted, (beta,) * sum(drafted), 0.1 * total_s, 0.7 * total_s, 0.2 * total_s, 0.0, 0, 0, 0
    )


def test_link_predictions_are_exact_for_a_link_that_adds_only_its_rtt() -> None:
    """Medians ignore two disturbed runs of seven."""
    local, delayed = [totals(0.01)] * 5 + [totals(0.5)] * 2, [totals(3.0)] * 2 + [totals(0.04)] * 5
    record = LinkRuns(0.03, local, delayed).record()
    assert record["s_net"] == pytest.approx(125) and record["predicted"] == pytest.approx(125)
    assert record["measured"] == pytest.approx(125) and record["steps"] == 70
    assert LinkRuns(0.03, local, [totals(0.05)] * 3).record()["ratio"] == pytest.approx(0.8)


def test_link_predictions_average_over_draft_lengths() -> None:
    """E[tokens] for 1 and 3 draft tokens at alpha 0.5 is 1.5 and 1.875; for the mean length it would be 1.75."""
    record = LinkRuns(0.0, [totals(0.01)], [totals(0.01, (1, 3), 0.5, 3)]).record()
    assert record["gamma"] == 2 and record["s_net"] == pytest.approx((1.5 + 1.875) / 2 / 0.01)


def test_the_closed_form_length_grows_with_the_rtt() -> None:
    """A draft token costs 0.025 of a step; the fixed overhead is a fifth of a step."""
    four = totals(0.01, beta=0.7)
    lengths = [gamma_for(rtt_s, 0.007, four) for rtt_s in (0.0, 0.01, 0.1)]
    assert lengths == [best_gamma_over(0.7, 1 / 28, (rtt_s + 0.002) / 0.007, 24) for rtt_s in (0.0, 0.01, 0.1)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_percentiles_are_values_by_rank() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0, 0.5, 0.95, 1)] == [1, 3, 4, 4]


def test_runs_of_the_page_are_summarised_by_growth_and_outliers() -> None:
    runs = [
        {"longest_ms": 17.0, "heap_mb": 5.0},
        {"longest_ms": 40.0, "heap_mb": 5.5},
        {"longest_ms": 18.0, "heap_mb": 5.2},
    ]
    first, last, largest = page_cost.summary(runs)
    assert (first["heap_mb"], last["heap_mb"], largest["run"]) == (5.0, 5.2, "largest of 3 runs")
    assert (largest["longest_ms"], largest["heap_mb"]) == (40.0, 5.5)


def test_repeated_loading_reports_the_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "repeated_loading", lambda *settings: [5_000_000, 9_000_000, 6_500_000])
    assert memory.main(["--rounds", "3"]) == 0
    assert "| 5.0 MB | 6.5 MB | 1.5 MB |" in " ".join(capsys.readouterr().out.split())
