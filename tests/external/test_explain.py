"""`explain` on lines of public threads, whose addresses are the first lines of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.external.diagnosis import DIAGNOSES, describe
from specdemo.external.engine_log import EngineStatistics, read_engine_log

LOGS = {path.name: path for path in sorted((Path(__file__).parent / "logs").iterdir())}

DIAGNOSED = {
    "llama-timings.json": {"low acceptance"},
    "vllm-window.log": {"low acceptance", "acceptance ends"},
    "vllm-dflash.log": {"low acceptance", "acceptance ends"},
}


def statistics(name: str) -> EngineStatistics:
    return read_engine_log(LOGS[name].read_text("utf-8"))


LLAMA = "draft acceptance = 0.5 ( 50 accepted / 100 generated), acceptance rate per position = ({})"
VLLM = "SpecDecoding metrics: Accepted: 5 tokens, Drafted: 10 tokens, Per-position acceptance rate: {}"
TIMINGS = '{{"draft_n": {}, "draft_n_accepted": 5, "predicted_ms": {}, "predicted_n": 5}}'
STEPS = '{{"num_draft_tokens": 9, "num_accepted_draft_tokens": 5, "num_spec_steps": {}, "acceptance_histogram": {}}}'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        *((LLAMA.format(rates), "is not a list of rates") for rates in ("0.9, , 0.5", "0.8.1", "", "nan", "1e5")),
        *((LLAMA.format(rates), "is not a rate") for rates in ("999999999999", "0.9, 1.1", "9" * 400)),
        *((VLLM.format(rates), "is not a list of rates") for rates in ("0.8.1, 0.5", "0.5, .")),
        (VLLM.format("1.5, 0.5"), "is not a rate"),
        (LLAMA.replace("50 a", "500 a").format("0.5"), "500 accepted of 100 drafted tokens"),
        (LLAMA.replace("100 g", "9" * 400 + " g").format("0.5"), "drafted is not a number"),
        *((TIMINGS.format(drafted, 10), "draft_n is not a number") for drafted in ("9" * 400, "1e999", "-1", "NaN")),
        (TIMINGS.format(9, "1e-320"), "tokens_per_second is not a number"),
        (STEPS.format("1e-320", "[1]"), "tokens_per_step is not a number"),
        (STEPS.format(3, "[1, -1, 1]"), "acceptance_histogram is not a number"),
    ],
)
def test_impossible_figures_are_refused(
    text: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.log"
    file.write_text(text, "utf-8")
    assert main(["explain", str(file)]) == 2
    sentence = capsys.readouterr().err
    assert cause in sentence and ": save the output of the engine again" in sentence and len(sentence) < 300


def diagnosed(reported: EngineStatistics) -> set[str]:
    return {diagnosis.name for diagnosis in DIAGNOSES if diagnosis.explain(reported)}


@pytest.mark.parametrize("name", LOGS)
def test_lines_of_public_threads_are_diagnosed_or_not(name: str) -> None:
    assert LOGS[name].read_text("utf-8").startswith("# https://github.com/")
    assert diagnosed(statistics(name)) == DIAGNOSED.get(name, set())


FIGURES = {  # engine, drafted, accepted, tokens per step, tokens per second
    "llama-eagle3.log": ("llama.cpp", 259, 167, 2.92, 111.46),
    "llama-timings.json": ("llama.cpp", 347, 65, None, 18.05),
    "llama-mtp.log": ("llama.cpp", 144, 118, None, 13.40),
    "llama-long.log": ("llama.cpp", 9089, 5995, 4.30, None),
    "vllm-ngram.log": ("vLLM", 295, 262, 5.44, None),
    "vllm-short.log": ("vLLM", 66, 66, None, None),
    "vllm-v0.log": ("vLLM", 53716, 32594, None, None),
    "vllm-window.log": ("vLLM", 975, 89, 2.37, None),
    "vllm-dflash.log": ("vLLM", 19185, 262, 1.20, None),
    "sglang-eagle3.log": ("SGLang", None, None, 1.93, 178.86),
    "sglang-plain.log": ("SGLang", None, None, None, None),
}


@pytest.mark.parametrize("name", LOGS)
def test_figures_equal_those_that_the_engine_prints(name: str) -> None:
    reported = statistics(name)
    figures = (reported.drafted, reported.accepted, reported.tokens_per_step, reported.tokens_per_second)
    assert reported.engine == FIGURES[name][0]
    for figure, expected in zip(figures, FIGURES[name][1:], strict=True):
        assert figure == (expected if expected is None else pytest.approx(expected, abs=0.02))


def test_accepted_drafts_slower_than_decoding_without_have_a_fixed_cost() -> None:
    reported = statistics("llama-eagle3.log")
    assert diagnosed(replace(reported, ar_tokens_per_second=150.0)) == {"fixed cost per step"}
    assert diagnosed(replace(reported, ar_tokens_per_second=90.0)) == set()
    slow = replace(statistics("vllm-window.log"), tokens_per_second=10.0, ar_tokens_per_second=20.0)
    assert (
        "fixed cost per step" in diagnosed(slow)
        and diagnosed(replace(slow, length=1.2)) == DIAGNOSED["vllm-window.log"]
    )


def test_fixed_cost_is_silent_on_three_files_that_are_faster_than_without_drafts() -> None:
    for name in ("llama-eagle3.log", "llama-mtp.log", "sglang-eagle3.log"):
        reported = statistics(name)
        assert reported.tokens_per_second
        faster = replace(reported, ar_tokens_per_second=reported.tokens_per_second / 2)
        assert "fixed cost per step" not in diagnosed(faster)
        slower = replace(reported, ar_tokens_per_second=reported.tokens_per_second * 2)
        expected = (reported.acceptance or 0) >= 0.6 or (reported.tokens_per_step or 0) >= 2
        assert ("fixed cost per step" in diagnosed(slower)) == expected


def test_responses_of_this_service_and_of_vllm_are_read() -> None:
    counts = {"num_draft_tokens": 129, "num_accepted_draft_tokens": 10, "num_spec_steps": 43}
    histogram = {"acceptance_histogram": [39, 1, 0, 3]}
    text = str({"metrics": {"speculative_decoding": counts | histogram}}).replace("'", '"')
    reported = read_engine_log(text)
    assert reported.tokens_per_step == pytest.approx(1.2325581395348837)
    assert reported.by_position == pytest.approx((4 / 43, 3 / 43, 3 / 43))
    assert diagnosed(reported) == {"low acceptance"}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "{}", "draft acceptance", "Speculative metrics: x", "é\x00"])
def test_other_texts_are_refused_with_the_known_formats(text: str) -> None:
    with pytest.raises(UserError, match="known are llama.cpp .* vLLM .* SGLang .* transformers reports no acceptance"):
        read_engine_log(text)


def test_the_command_prints_figures_and_diagnoses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", str(LOGS["vllm-window.log"])]) == 0
    printed = capsys.readouterr().out
    assert "vLLM: drafted 975, accepted 89 (9 %), 2.37 tokens per step" in printed
    assert "acceptance ends: acceptance falls to 0 after position 5" in printed
    assert "cost less than 2.37 autoregressive steps" in printed
    assert main(["explain", str(LOGS["llama-eagle3.log"]), "--ar", "150"]) == 0
    assert "slower than 150 without drafts" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "missing.log")]) == 2
    assert "missing.log" in capsys.readouterr().err
    assert list(describe(statistics("sglang-plain.log")))[0].startswith("SGLang: drafted –")
