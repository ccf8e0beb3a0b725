"""Benchmarks: paired runs, losing cases included; equality of texts, questions of several turns, acceptance."""

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from contracts.models import save_pair
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.traces import bench_run

from specdemo.bench import calibration, measure, table
from specdemo.bench.calibration import PERCENTILES, Calibration, calibrate
from specdemo.bench.equality import EqualityResult, equality_table, prove
from specdemo.bench.measure import BASELINES, Acceptance, AcceptanceCount, BenchProgress
from specdemo.bench.table import category_table
from specdemo.cli import main
from specdemo.cli.arguments import parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.events import End, Event, Header, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, Origin, Source, Step, Verdict
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt, load_prompts, read_questions
from specdemo.recipe import Recipe
from specdemo.remote.gates import hard_tokens

pytestmark = pytest.mark.slow

measuring = import_module("specdemo.bench.measure")  # the package has a function of that name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return dict(zip(("target", "drafter"), save_pair(tmp_path_factory.mktemp("models")), strict=True))


def test_speedups_are_medians_of_ratios_and_losses_are_named() -> None:
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    walls = [(1.0, 1.0), (1.0, 2.5), (1.0, 4.0 / 3.0)]  # seconds for 10 and for 20 tokens: 2x, 0.8x, 1.5x
    texts = [(1, 2), (1, 2), (1, 3)]
    records = [
        {"kind": "code", "name": f"code {i}", "runs": [bench_run(plain), bench_run(fast, drafted=20, text=text)]}
        for i, ((plain, fast), text) in enumerate(zip(walls, texts, strict=True))
    ]
    plain, draft = table.table(recipes, records, bandwidth=1000.0)
    assert plain.speedup is None and draft.speedup == pytest.approx(1.5)
    assert draft.interval is None  # less than five prompts
    assert draft.slower == ("code 1 (0.80x)",)
    assert draft.same_text == 2 and plain.same_text is None
    assert plain.bandwidth == pytest.approx(0.1) and draft.bandwidth == pytest.approx(0.075)
    text = table.markdown([plain, draft])
    assert "1 of 3" in text and "0.80-2.00" not in text
    assert json.loads(table.as_json([plain, draft]))["bench"][1]["speedup"] == pytest.approx(1.5)


def test_repetitions_of_prompts_are_not_independent() -> None:
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    walls = {"code 1": (2.5, 2.5, 1.0), "code 2": (2.5, 1.0, 1.0)} | dict.fromkeys(("code 3", "code 4"), (1.0,) * 3)

    def rows(walls: dict[str, tuple[float, ...]], repeat: int) -> list[table.BenchRow]:
        changed = {"code 2": {"text": (1, 3)}}
        records = [
            {"kind": "code", "name": name, "runs": [bench_run(1.0), bench_run(seconds[i], 20, **changed.get(name, {}))]}
            for i in range(repeat)
            for name, seconds in walls.items()
        ]
        return table.table(recipes, records)

    _, four = rows(walls, 3)
    assert (four.prompts, four.slower, four.same_text) == (4, ("code 1 (0.80x)",), 3)
    assert four.speedup == pytest.approx(2.0) and four.interval is None
    walls = {f"code {i}": (seconds,) * 8 for i, seconds in enumerate((1.0, 1.25, 2.0, 2.5, 4.0))}
    (_, once), (_, repeated) = rows(walls, 1), rows(walls, 8)  # speed-ups 2, 1.6, 1, 0.8, 0.5
    assert once.interval == repeated.interval == pytest.approx((0.5, 2.0))


def test_the_best_gamma_is_selected_on_other_prompts() -> None:
    """Gamma 2 is fast on a single prompt; the other prompt selects gamma 5."""
    recipes = [Recipe(temperature=0, gamma=2), Recipe(temperature=0, gamma=5), Recipe(temperature=0, policy="auto")]
    walls = {"code 1": (0.1, 1.0, 1.0), "code 2": (2.0, 1.0, 1.0)}
    records = [
        {"kind": "code", "name": name, "runs": [bench_run(wall, drafted=20) for wall in row]}
        for name, row in [*walls.items(), *walls.items()]
    ]  # each prompt twice: both runs belong to the same prompt
    over = table.table(recipes, records)[2].over_fixed
    assert over == (1.5, None, None)  # ratios 1 and 2; less than five prompts


def test_real_models_are_measured_in_pairs(models: dict[str, str]) -> None:
    settings = {"temperature": 0, "max_tokens": 12, "device": "cpu", **models}
    recipes = [Recipe(method=method, **settings) for method in ("ar", "draft", "nasd")]
    prompts, peers = load_prompts(kinds=["adversarial"])[:2], list(BASELINES)
    items = list(measure.measure(recipes, prompts, ModelPool(), peers))
    records = [item for item in items if isinstance(item, dict)]
    assert [record["name"] for record in records] == ["adversarial 1", "adversarial 2"]
    for record in records:
        plain, draft, _, *theirs = record["runs"]
        assert plain["drafted"] == 0 < draft["drafted"] and plain["tokens"] > 0
        assert all(run["text"] == plain["text"] for run in record["runs"])  # all lanes are greedy
        assert len(theirs) == len(peers) and all(run["ttft_s"] > 0 and run["wall_s"] > 0 for run in theirs)
    rows = table.table(recipes, records, peers, bandwidth=1e9)
    assert len(rows) == 3 + len({peer.family for peer in BASELINES.values()})
    assert all(row.same_text in (None, 2) for row in rows)


@pytest.mark.parametrize("pause", [0.0, 100.0])
def test_time_of_the_caller_between_steps_is_not_measured(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of four steps of 1 s, on a clock that the caller sets forward."""
    now = 0.0

    def scripted(recipe: Recipe, text: str, pool: ModelPool) -> Iterator[Event]:
        nonlocal now
        start, metrics = now, Metrics()
        yield Loading("loading the target")
        yield Header({}, "", ())
        for i in range(4):
            now += 1
            step = Step(i, (i, i), Draft(), Verdict((), i), 0, 0.0, 0.0, 0.0, now - start)
            metrics = metrics.plus(step)
            yield StepEvent(step, ("a", "b"), metrics=metrics)
        yield End("length", None, metrics)

    monkeypatch.setattr(measuring, "generate", scripted)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now)
    recipes = [Recipe(method=method, temperature=0) for method in ("ar", "nasd")]
    records, turns = [], []
    for item in measure.measure(recipes, [Prompt("code", "code 1", "a"), Prompt("prose", "prose 1", "b")], ModelPool()):
        now += pause
        (records if isinstance(item, dict) else turns).append(item)
    runs = [run for record in records for run in record["runs"]]
    assert [run["wall_s"] for run in runs] == [3.0] * 4  # three seconds after the first token, without pauses
    assert [run["paused_s"] for run in runs] == [3 * pause] * 4
    assert table.disturbed(records) == (4 if pause else 0)
    timed = [turn for turn in turns if turn.number and "loading" not in turn.doing]
    assert [turn.number for turn in timed] == [n for n in (1, 2, 3, 4) for _ in range(5)]  # start and steps
    assert {turn.total for turn in turns} == {4} and str(turns[0]) == "warming up: ar T=0"
    assert str(timed[-1]).startswith("4 of 4: prose 1, ")


# --- equality of texts ------------------------------------------------------------------------------------------------

PROVED = [Prompt("code", f"code {i}", text) for i, text in enumerate(("def a", "x = [1, 1, 1,", "class B:"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer(), num_hidden_layers=4)
    return {"target": str(folder), "drafter": str(folder)}  # always agrees


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "rejection"), (0.7, "coupled"), (1.3, "coupled")])
def test_exact_recipes_reproduce_ar_decoding(pair: dict[str, str], temperature: float, rule: str) -> None:
    common = {**pair, "device": "cpu", "temperature": temperature, "rule": rule, "top_p": 1.0, "max_tokens": 24}
    results = [EqualityResult(Recipe(method=method, gamma=3, **common)) for method in ("draft", "nasd", "self")]
    assert len(list(prove(results, PROVED, ModelPool()))) == len(PROVED)
    for result in results:
        assert result.texts == 3 and not result.differences and result.tokens > 20
    assert results[0].accepted > 20


def test_different_texts_are_reported(pair: dict[str, str]) -> None:
    """Rejection above temperature 0 preserves the distribution but not the text."""
    recipe = Recipe(**pair, method="draft", temperature=1.0, top_p=1.0, max_tokens=24, device="cpu")
    result = EqualityResult(recipe)
    list(prove([result], PROVED, ModelPool()))
    assert result.differences and all(0 <= token < 24 for _, token in result.differences)
    assert f"{3 - len(result.differences)} of 3" in equality_table([result])


def test_the_command_prints_a_table(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", pair["target"], "--drafter", pair["drafter"], "--device", "cpu"]
    assert main(["prove", *models, "--gamma", "2", "--prompts", "2", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 of 2") == 6 and "coupled" in out  # two methods at three temperatures
    flags = ["--rule", "block", "--temperature", "0", "--method", "draft", "--prompts", "2", "--max-tokens", "8"]
    assert main(["prove", *models, "--gamma", "3", *flags]) == 0
    assert "| block | 2     |" in capsys.readouterr().out


# --- questions of several turns ---------------------------------------------------------------------------------------

LINES = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorten it."], "reference": ["x"]},
    {"question_id": "q2", "category": "qa", "turns": ["Who was Ada?"]},
]


def test_a_question_is_a_prompt_of_its_category(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)), "utf-8")
    assert read_questions(path) == [
        Prompt("writing", "writing 81", "Write a poem.", later=("Shorten it.",)),
        Prompt("qa", "qa q2", "Who was Ada?"),
    ]
    assert [prompt.kind for prompt in read_questions(path, ["qa"])] == ["qa"]


def test_figures_per_category_are_ratios_of_sums() -> None:
    """AR: 10 tokens in 1 s. The lane: 20 tokens in 10 steps and 1 s, then 20 tokens in 10 steps and 4 s."""
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    records = [
        {"kind": kind, "name": f"{kind} 1", "runs": [bench_run(1.0), bench_run(wall, drafted=20)]}
        for kind, wall in (("writing", 1.0), ("qa", 4.0))
    ]
    head, _, row = category_table(recipes, records).splitlines()[2:]
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["lane", "writing", "qa", "all"]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["draft gamma=2 T=0", "2.00, 2.00x", "2.00, 0.50x", "2.00, 0.80x"]


@pytest.mark.parametrize("chat", [True, False])
def test_later_turns_follow_the_answer_of_the_baseline(
    chat: bool, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"target": models["target"], "temperature": 0, "max_tokens": 6, "device": "cpu", "chat": chat}
    recipes = [Recipe(method=method, **common) for method in ("ar", "nasd")]
    given: list[Any] = []

    def recorded(recipe: Recipe, prompt: Any, pool: ModelPool) -> Iterator[Event]:
        given.append(prompt)
        return generate(recipe, prompt, pool)

    monkeypatch.setattr(measuring, "generate", recorded)
    prompt = Prompt("writing", "writing 1", "Write a poem.", later=("Shorten it.",))
    results = list(measure.measure(recipes, [prompt], ModelPool()))
    items = [item for item in results if isinstance(item, dict)]
    assert [item["name"] for item in items] == ["writing 1"] * 2  # one cluster of the interval
    assert any("3 of 4: writing 1, turn 2" in str(item) for item in results)
    answer = items[0]["runs"][0]["answer"]
    contents = ["Write a poem.", answer, "Shorten it."]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    assert answer
    for last in given[-2:]:
        assert list(last) == messages if chat else last == "\n".join(contents)


# --- acceptance by draft position, text length and confidence ---------------------------------------------------------


def step(i: int, draft: Draft, accepted: int, tested: int, **verdict: object) -> Step:
    n = len(draft)
    betas = tuple(0.5 if node < tested else None for node in range(n))
    judged = Verdict(tuple(range(accepted)), 7, (0.5,) * n, betas, betas, **verdict)
    return Step(i, (*draft.tokens[:accepted], 7), draft, judged, n, 0.0, 0.0, 0.0, 0.0)


STEPS = [
    step(0, Draft(), 0, 0),
    step(1, Draft.chain((1, 2, 3), (0.9, 0.5, 0.1)), accepted=1, tested=2),
    step(2, Draft.chain((1, 2), (0.9, 0.7)), accepted=2, tested=2),
    step(3, Draft.chain((1,), (0.9,), origin=(Origin("head", confidence=0.3),)), accepted=0, tested=1),
    step(4, Draft.chain((1, 2)), accepted=0, tested=1),
    step(5, Draft.chain((1, 2), (0.5, 0.5)), accepted=1, tested=2, source=Source.GATE, choices=()),
]


def test_counts_of_steps() -> None:
    """Estimates of the drafter precede q; point masses have no confidence; unverified steps do not count."""
    counts = Acceptance.of(STEPS, prompt_length=61)
    assert counts.position == {1: AcceptanceCount(4, 2, 2.1), 2: AcceptanceCount(2, 1, 1.2)}
    # Texts before the drafts: 62 (second token: 63), 64 (65), 67 and 68 tokens.
    assert {key: count.tested for key, count in counts.text_length.items()} == {0: 2, 1: 4}
    shares = {key: (count.tested, count.accepted, count.confidence) for key, count in counts.confidence.items()}
    assert shares == {1: (1, 0, 0.3), 2: (1, 0, 0.5), 3: (1, 1, 0.7), 4: (2, 2, 1.8)}
    assert Acceptance.total([counts, counts]).position[1] == AcceptanceCount(8, 4, 4.2)
    metrics = Metrics.of(STEPS[:5])
    assert [count.tested for count in counts.position.values()] == list(metrics.tested_by_position)
    assert [count.accepted for count in counts.position.values()] == list(metrics.accepted_by_position)


# --- calibration of gates ---------------------------------------------------------------------------------------------


def test_a_fifth_of_the_draft_tokens_is_hard(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked against all recorded values, by the gate itself."""
    recorded: dict[str, list[float]] = {}
    measured = Calibration.of

    def record(values: dict[str, list[float]], *more: Any) -> Calibration:
        recorded.update(values)
        return measured(values, *more)

    monkeypatch.setattr(calibration.Calibration, "of", record)
    recipe, prompts = Recipe(**models, temperature=1.0, max_tokens=40, device="cpu"), load_prompts(["code"])[:2]
    *progress, result = calibrate(recipe, prompts, ModelPool())
    assert [(item.number, item.total) for item in progress if isinstance(item, BenchProgress)] == [(1, 2), (2, 2)]
    assert isinstance(result, Calibration) and result.thresholds.keys() == PERCENTILES.keys() and result.texts == 2
    count = result.tokens
    assert count > 50 and {len(values) for values in recorded.values()} == {count}
    for name, threshold in result.thresholds.items():
        share = sum(hard_tokens({name: recorded[name]}, {name: threshold})) / count
        assert share == pytest.approx(0.2, abs=2 / count + 1e-3), name


def test_the_remedies_for_a_pair_without_a_drafter_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--pair", CHAT_PAIR]) == 2
    refused = capsys.readouterr().err
    assert "choose pair bundled" in refused and "nasd" not in refused


def test_the_terminal_prints_flags_of_run(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--target", models["target"], "--drafter", models["drafter"], "--device", "cpu"]
    assert main(["calibrate", *names, "--prompts", "1", "--max-tokens", "12", "--kind", "code"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| nll, nats +\| 80 +\| [\d.]+ +\| 80th percentile \|", shown)
    assert re.search(r"\| margin +\| 20 +\| [\d.]+ +\| 0.2 +\|", shown)
    (flags,) = re.findall(r"flags: (.*)", shown)
    chosen = recipe_of_flags(parser().parse_args(["run", "x", *names, "--remote", "http://a:1", *shlex.split(flags)]))
    assert chosen.cloud.gates == tuple(PERCENTILES) and f"--gate-nll {chosen.cloud.gate_nll:g}" in flags
