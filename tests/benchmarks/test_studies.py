"""Studies on tiny models or fakes with known results."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from benchmarks import drafting_cost, gates, layer_search, memory, page_frames, time_breakdown
from benchmarks.link import LinkRuns, gamma_for
from benchmarks.runs import StepTotals, percentile
from specdemo.core.step import Draft
from specdemo.core.theory import best_gamma_over
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec

pytestmark = pytest.mark.slow


def test_drafting_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a repetitive text are accepted; prompt lookup uses the least memory."""
    monkeypatch.setattr(drafting_cost, "NEW_TOKENS", 40)
    text = [i % 7 for i in range(300)]
    costs = {(cost.drafter, cost.history): cost for cost in drafting_cost.measure(text, sizes=(50, 200))}
    assert set(costs) == {(name, size) for name in drafting_cost.DRAFTERS for size in (50, 200)}
    for (name, size), cost in costs.items():
        assert cost.seconds_per_token > 0 and cost.accepted_per_step > 2
        assert name == "lookup" or cost.bytes_per_token > costs["lookup", size].bytes_per_token


def test_the_table_of_drafting_costs_has_a_row_per_drafter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafting_cost, "NEW_TOKENS", 40)
    monkeypatch.setattr(drafting_cost, "SIZES", (50, 200))
    monkeypatch.setattr(drafting_cost.measure, "__defaults__", ((50, 200), 4))
    assert drafting_cost.main([]) == 0
    head, _, *rows, line = capsys.readouterr().out.splitlines()
    assert "us / token at 200" in head and len(rows) == len(drafting_cost.DRAFTERS)
    assert len(json.loads(line)["drafting_cost"]) == len(rows)


def test_the_text_verifier_continues_the_text() -> None:
    verifier = drafting_cost.TextVerifier([1, 2, 3, 4, 5])
    verdict = verifier.verify([1], Draft.chain((2, 3, 9)))
    assert verdict.accepted == (0, 1) and verdict.token == 4
    assert verifier.verify([1, 2], Draft()).token == 3


def test_the_parts_of_a_step_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """All parts are positive, shares add up to 100 %, and the patched calls are restored."""
    before = [getattr(owner, name) for owner, name, _ in time_breakdown.TIMED]
    settings = ["--gamma", "2", "--temperature", "0", "0.5", "--prompts", "1", "--max-tokens", "24"]
    assert time_breakdown.main(settings) == 0
    assert [getattr(owner, name) for owner, name, _ in time_breakdown.TIMED] == before
    parts = json.loads(capsys.readouterr().out.splitlines()[-1])["time_breakdown"]
    assert len(parts) == 5
    for key in ("0", "0_5"):
        shares = {part["part"]: part[f"share_{key}"] for part in parts}
        assert min(shares.values()) >= 0 and sum(shares.values()) == pytest.approx(1)
        assert all(share > 0 for part, share in shares.items() if "passes" in part)


def test_gates_save_calls_and_lose_agreement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "PERCENTILES", (80,))
    assert gates.main(["--max-tokens", "12", "--prompts", "2"]) == 0
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


PROMPTS = ["def a", "x = [1, 1, 1,", "class B:"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer(), num_hidden_layers=4))


def test_layers_are_removed_one_by_one(model: str) -> None:
    subsets = list(layer_search.search(ModelPool().take(ModelSpec(model, device="cpu")), PROMPTS))
    assert [len(subset.skipped) for subset in subsets] == [1, 2, 3]
    assert all(set(fewer.skipped) < set(more.skipped) for fewer, more in pairwise(subsets))
    assert all(0 < subset.alpha <= 1 and subset.c > 0 and subset.speedup >= 1 for subset in subsets)


def test_a_layer_without_effect_is_removed_first(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(save_model(tmp_path / "idle", byte_level_tokenizer(), num_hidden_layers=4))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        loaded.model.layers[2].get_submodule(name).weight.data.zero_()
    loaded.save_pretrained(folder)
    first = next(layer_search.search(ModelPool().take(ModelSpec(folder, device="cpu")), ["def f(x):\n    return x"]))
    assert first.skipped == (2,) and first.alpha == pytest.approx(1.0, abs=1e-5)
    assert layer_search.main(["--target", folder, "--device", "cpu", "--prompts", "1"]) == 0


def test_a_model_with_one_layer_is_too_shallow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shallow = str(save_model(tmp_path / "shallow", byte_level_tokenizer(), num_hidden_layers=1))
    assert layer_search.main(["--target", shallow, "--device", "cpu"]) == 2
    assert "too few layers" in capsys.readouterr().err


def test_runs_of_the_page_are_summarised_by_growth_and_outliers() -> None:
    runs = [
        {"longest_ms": 17.0, "heap_mb": 5.0},
        {"longest_ms": 40.0, "heap_mb": 5.5},
        {"longest_ms": 18.0, "heap_mb": 5.2},
    ]
    first, last, largest = page_frames.summary(runs)
    assert (first["heap_mb"], last["heap_mb"], largest["run"]) == (5.0, 5.2, "largest of 3 runs")
    assert (largest["longest_ms"], largest["heap_mb"]) == (40.0, 5.5)


def test_repeated_loading_reports_the_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "repeated_loading", lambda *settings: [5_000_000, 9_000_000, 6_500_000])
    assert memory.main(["--rounds", "3"]) == 0
    assert "| 5.0 MB | 6.5 MB | 1.5 MB |" in " ".join(capsys.readouterr().out.split())
