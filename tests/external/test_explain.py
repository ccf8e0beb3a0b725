"""`explain` on lines of public threads, whose addresses are the first lines of the files."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.external.diagnosis import conclusions, figure_rows, figures_line
from specdemo.external.engine_log import EngineStatistics, read_engine_log

LOGS = {path.name: path for path in sorted((Path(__file__).parent / "logs").iterdir())}

LOW, FULL, ENDS = "low acceptance", "full acceptance", "acceptance ends"
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
DIAGNOSED = {
    "llama-timings.json": {LOW},
    "vllm-short.log": {FULL},
    "vllm-window.log": {LOW, ENDS},
    "vllm-dflash.log": {LOW, ENDS},
}


def statistics(name: str) -> EngineStatistics:
    return read_engine_log(LOGS[name].read_text("utf-8"))


def diagnosed(reported: EngineStatistics) -> set[str]:
    """Names of the diagnoses, which precede thresholds and fields."""
    return {match[1] for line in conclusions(reported) if (match := re.search(r"\. \(([a-z ]+): .+; from .+\)$", line))}


@pytest.mark.parametrize("name", LOGS)
def test_figures_equal_those_that_the_engine_prints_and_are_diagnosed(name: str) -> None:
    assert LOGS[name].read_text("utf-8").startswith("# https://github.com/")
    reported = statistics(name)
    lines = [figures_line(reported), *conclusions(reported)]
    assert not any("–" in line for line in lines)  # no dashes for unknown figures
    assert all(re.fullmatch(r".*\.( \(.*\))?", line) for line in lines) and len(lines) > 1
    figures = (reported.drafted, reported.accepted, reported.tokens_per_step, reported.tokens_per_second)
    assert reported.engine == FIGURES[name][0] and diagnosed(reported) == DIAGNOSED.get(name, set())
    for figure, expected in zip(figures, FIGURES[name][1:], strict=True):
        assert figure == (expected if expected is None else pytest.approx(expected, abs=0.02))


def test_accepted_drafts_slower_than_decoding_without_have_a_fixed_cost() -> None:
    reported = statistics("llama-eagle3.log")
    assert diagnosed(replace(reported, ar_tokens_per_second=150.0)) == {"fixed cost per step"}
    assert diagnosed(replace(reported, ar_tokens_per_second=90.0)) == set()
    slow = replace(statistics("vllm-window.log"), tokens_per_second=10.0, ar_tokens_per_second=20.0)
    assert "fixed cost per step" in diagnosed(slow)
    assert diagnosed(replace(slow, length=1.2)) == DIAGNOSED["vllm-window.log"]


def test_responses_of_this_service_and_of_vllm_are_read() -> None:
    counts = {"num_draft_tokens": 129, "num_accepted_draft_tokens": 10, "num_spec_steps": 43}
    histogram = {"acceptance_histogram": [39, 1, 0, 3]}
    reported = read_engine_log(json.dumps({"metrics": {"speculative_decoding": counts | histogram}}))
    assert reported.tokens_per_step == pytest.approx(1.2325581395348837)
    assert reported.by_position == pytest.approx((4 / 43, 3 / 43, 3 / 43))
    assert diagnosed(reported) == {LOW}


def figures(reported: EngineStatistics) -> dict[str, list[str]]:
    """Values of the figures by engine, without their formulas."""
    return {engine: [cell.partition(" (")[0] for cell in cells] for engine, *cells in figure_rows(reported)}


def test_engines_define_the_figures_of_a_run_differently() -> None:
    """The log has 256 tokens, 259 drafted and 167 accepted, 87 drafts, 300 ms for the prompt, 2,297 ms for the text."""
    found = figures(replace(statistics("llama-eagle3.log"), ar_tokens_per_second=100.0))
    printed, decoded, whole = "0.64", "1.11", "1.10"  # 0.64479 and 2.92 are printed; 2.56 / 2.30; 2.86 / 2.60 s
    assert found == {
        "llama.cpp": [printed, "2.92", "–", decoded],
        "vLLM": [printed, "2.92", "–", whole],
        "SGLang": [printed, "2.92", "2.94", whole],  # 256 / 87
        "TensorRT-LLM": [printed, "2.92", "2.91", whole],  # 88 steps, one without a draft
        "transformers": ["0.79", "1.92", "–", whole],  # 42 of 87 drafts were accepted as a whole: 212 tested
        "specdemo": [printed, "2.92", "2.90", decoded],
    }


def test_unknown_counts_leave_figures_unknown() -> None:
    window = statistics("vllm-window.log")
    for reported, expected in (
        (window, ["0.09", "2.37", "–", "–"]),  # as printed
        (statistics("llama-timings.json"), ["0.19", "–", "–", "–"]),
        (statistics("sglang-eagle3.log"), ["–", "1.93", "–", "–"]),  # the mean of 1.95, 1.80 and 2.05
    ):
        assert figures(reported)["vLLM"] == expected
    assert figures(window)["transformers"][0] == "0.58"  # 89 of 154, since no draft was complete
    assert figures(replace(window, drafted=900.0))["transformers"][0] == "–"  # other lengths
    assert not figures(statistics("sglang-plain.log"))


def test_the_document_shows_the_figures_of_a_recorded_log() -> None:
    text = (Path(__file__).parents[2] / "docs" / "other-engines.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    log = read_engine_log(LOGS["llama-eagle3.log"].read_text("utf-8"), 100.0)
    assert [row for row in rows if len(row) == 5 and "/" in row[1]] == list(figure_rows(log))


def test_other_texts_are_refused_with_the_known_formats() -> None:
    known = "known are llama.cpp .* vLLM .* SGLang .* transformers reports no acceptance"
    for text in ("", "{", "[" * 100_000, "{}", "draft acceptance", "Speculative metrics: x", "é\x00"):
        with pytest.raises(UserError, match=known):
            read_engine_log(text)


def test_the_command_prints_figures_and_diagnoses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", str(LOGS["vllm-window.log"])]) == 0
    printed = capsys.readouterr().out
    assert "vLLM: 89 of 975 drafted tokens accepted (9 %), 2.37 tokens per step." in printed
    assert "Acceptance falls to 0 after position 5" in printed
    assert "cost less than 2.37 autoregressive steps" in printed
    assert main(["explain", str(LOGS["llama-eagle3.log"]), "--ar", "150"]) == 0
    printed = capsys.readouterr().out
    assert "slower than 150 without drafts" in printed and "| transformers | 0.79 (accepted / tested)" in printed
    assert main(["explain", str(tmp_path / "missing.log")]) == 2
    assert "missing.log" in capsys.readouterr().err
    assert figures_line(EngineStatistics("vLLM", drafted=0.0, accepted=0.0)) == "vLLM: no figures."
    assert main(["explain", str(LOGS["sglang-plain.log"])]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "SGLang: 97.58 tokens per second without drafts.",
        "The log reports no drafts: turn speculative decoding on, and save it again.",
    ]
