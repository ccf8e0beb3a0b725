"""Recordings of other engines: `explain` on logs of public threads, and steps from events of streamed texts."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document_tables import recorded_logs
from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.core.step import Outcome, Step
from specdemo.external.dialects import DIALECTS
from specdemo.external.engine_log import EngineStatistics, conclusions, figure_rows, figures_line, read_engine_log

LOGS = recorded_logs()

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
    return read_engine_log(LOGS[name])


def diagnosed(reported: EngineStatistics) -> set[str]:
    """Names of the diagnoses, which precede thresholds and fields."""
    return {match[1] for line in conclusions(reported) if (match := re.search(r"\. \(([a-z ]+): .+; from .+\)$", line))}


@pytest.mark.parametrize("name", LOGS)
def test_figures_equal_those_that_the_engine_prints_and_are_diagnosed(name: str) -> None:
    assert LOGS[name].startswith("# https://github.com/")
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
    log = read_engine_log(LOGS["llama-eagle3.log"], 100.0)
    assert [row for row in rows if len(row) == 5 and "/" in row[1]] == list(figure_rows(log))


def test_other_texts_are_refused_with_the_known_formats() -> None:
    known = "known are llama.cpp .* vLLM .* SGLang .* transformers reports no acceptance"
    for text in ("", "{", "[" * 100_000, "{}", "draft acceptance", "Speculative metrics: x", "é\x00"):
        with pytest.raises(UserError, match=known):
            read_engine_log(text)


def test_the_command_prints_figures_and_diagnoses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("vllm-window.log", "llama-eagle3.log", "sglang-plain.log"):
        (tmp_path / name).write_text(LOGS[name], "utf-8")
    assert main(["explain", str(tmp_path / "vllm-window.log")]) == 0
    printed = capsys.readouterr().out
    assert "vLLM: 89 of 975 drafted tokens accepted (9 %), 2.37 tokens per step." in printed
    assert "Acceptance falls to 0 after position 5" in printed
    assert "cost less than 2.37 autoregressive steps" in printed
    assert main(["explain", str(tmp_path / "llama-eagle3.log"), "--ar", "150"]) == 0
    printed = capsys.readouterr().out
    assert "slower than 150 without drafts" in printed and "| transformers | 0.79 (accepted / tested)" in printed
    assert main(["explain", str(tmp_path / "missing.log")]) == 2
    assert "missing.log" in capsys.readouterr().err
    assert figures_line(EngineStatistics("vLLM", drafted=0.0, accepted=0.0)) == "vLLM: no figures."
    assert main(["explain", str(tmp_path / "sglang-plain.log")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "SGLang: 97.58 tokens per second without drafts.",
        "The log reports no drafts: turn speculative decoding on, and save it again.",
    ]


RECORDED: dict[str, list[tuple[float, str]]] = {}  # events of real servers: seconds and JSON, by name
for line in (Path(__file__).parent / "recorded.jsonl").read_text("utf-8").splitlines():
    name, *event = json.loads(line)
    RECORDED.setdefault(name, []).append(tuple(event))
BIRD = [10813, 234, 116]  # ids of a character in `llama-smollm2`, whose stream names the last one only


def no_text(text: str) -> Sequence[int]:
    raise AssertionError("no token is hidden")


def steps(engine: str, events: Sequence[Any], encode: Any = no_text) -> tuple[list[Step], str]:
    """Steps and the reason of the end; an event without a time is received a second after the one before."""
    timed = [event if isinstance(event, tuple) else (float(i), json.dumps(event)) for i, event in enumerate(events)]
    *found, reason = DIALECTS[engine].steps(timed, encode)
    return found, reason


def outcomes(found: Sequence[Step]) -> list[tuple[tuple[int, ...], str, int]]:
    return [(step.tokens, step.kind.value, step.draft.undisclosed or 0) for step in found]


# --- llama.cpp ---------------------------------------------------------------------------------------------------


def llama(token: int, n: int, drafted: int = 0, accepted: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    return {"content": "x", "tokens": [token], "stop": False, "timings": {"predicted_n": n, **counts}, **more}


LLAMA = [
    llama(1, 1),
    *(llama(token, n, 3, 2) for n, token in enumerate((2, 3, 4), 2)),  # 2 of 3 accepted
    llama(5, 5, 3, 2),  # without a draft
    *(llama(token, n, 5, 4) for n, token in enumerate((6, 7, 8), 6)),  # 2 of 2 accepted
    llama(9, 9, 9, 4),  # 0 of 4 accepted
    {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "timings": {"predicted_n": 9}},
]


def test_differences_of_totals_are_the_counts_of_a_step() -> None:
    found, reason = steps("llama.cpp", LLAMA)
    assert reason == "length"
    assert outcomes(found) == [
        ((1,), "plain", 0),
        ((2, 3, 4), "correction", 1),
        ((5,), "plain", 0),
        ((6, 7, 8), "bonus", 0),
        ((9,), "correction", 4),
    ]
    assert [step.t for step in found] == [0.0, 3.0, 4.0, 7.0, 8.0]
    metrics = Metrics.of(found)
    assert (metrics.drafted, metrics.accepted, metrics.tested) == (9, 4, 6)
    assert metrics.tested_by_position == (3, 2, 1) and metrics.accepted_by_position == (2, 2, 0)
    assert metrics.acceptance_rate == pytest.approx(4 / 9) and metrics.mean_beta is None
    assert metrics.draft_s is metrics.verify_s is metrics.host_s is None
    assert metrics.decode_s == 8.0 and metrics.tokens_per_second == 1.0


def test_a_text_that_ends_within_accepted_tokens_has_no_target_token() -> None:
    found, reason = steps("llama.cpp", [*LLAMA[:3], {**LLAMA[-1], "stop_type": "eos"}])
    assert reason == "stop" and outcomes(found)[-1] == ((2, 3), "correction", 1)
    assert found[-1].verdict.token is None and found[-1].tested == 2


def test_tokens_of_incomplete_characters_are_encoded_again() -> None:
    hidden = [llama(1, 1), llama(7, 4, 6, 2, content="🙂"), llama(8, 5, 6, 2), LLAMA[-1]]
    found, _ = steps("llama.cpp", hidden, lambda text: [5, 6, 7])
    assert [step.tokens for step in found] == [(1,), (5,), (6,), (7,), (8,)]
    assert [step.kind.value for step in found] == ["plain", *["unknown"] * 4]  # the totals do not divide them
    with pytest.raises(ValueError, match="of a character are not reported"):
        steps("llama.cpp", hidden, lambda text: [5, 6, 8])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_add_up_to_the_totals_of_the_engine_unless_some_are_unknown(name: str) -> None:
    engine = "llama.cpp" if name.startswith("llama") else "vllm"
    events = RECORDED[name]
    values = [json.loads(text) for _, text in events]
    found, _ = steps(engine, events, {"🐦": BIRD}.__getitem__)
    metrics = Metrics.of(found)
    if engine == "llama.cpp":
        totals = next(value["timings"] for value in reversed(values) if value["tokens"])
        counts = (totals["predicted_n"], totals["draft_n"], totals["draft_n_accepted"])
        assert (metrics.tokens, metrics.drafted, metrics.accepted) == counts
        return
    totals, kinds = values[-1]["metrics"]["speculative_decoding"], {step.kind for step in found}
    assert metrics.tokens == values[-1]["usage"]["completion_tokens"]
    assert (metrics.drafted > 0, metrics.accepted > 0) == (totals["num_spec_steps"] > 0,) * 2
    assert metrics.drafted <= totals["num_draft_tokens"]
    assert (metrics.drafted == totals["num_draft_tokens"]) == (Outcome.UNKNOWN not in kinds)


# --- vLLM ----------------------------------------------------------------------------


def vllm(sizes: Sequence[int], drafts: Sequence[tuple[int, int]] | None, reason: str = "length") -> list[Any]:
    ids = iter(range(100))
    chunks: list[Any] = [{"choices": [{"token_ids": [next(ids) for _ in range(size)]}]} for size in sizes]
    chunks[-1]["choices"][0]["finish_reason"] = reason
    accepted, drafted = zip(*drafts, strict=True) if drafts else ((), ())
    counts = {"per_step_accepted": accepted, "per_step_drafted": drafted, "num_spec_steps": len(accepted)}
    return [*chunks, {"choices": [], "usage": {}, "metrics": {"speculative_decoding": counts if drafts else None}}]


def test_counts_of_all_steps_divide_the_text() -> None:
    found, reason = steps("vllm", vllm([1, 2, 4, 1], [(1, 3), (3, 3), (0, 3)], "stop"))
    assert reason == "stop"
    assert outcomes(found) == [
        ((0,), "plain", 0),
        ((1, 2), "correction", 2),
        ((3, 4, 5, 6), "bonus", 0),
        ((7,), "correction", 3),
    ]
    assert [step.t for step in found] == [0.0, 1.0, 2.0, 3.0]


def test_chunks_are_steps_if_some_have_no_draft() -> None:
    def kinds(sizes: Sequence[int], drafts: Sequence[tuple[int, int]]) -> list[str]:
        return [step.kind.value for step in steps("vllm", vllm(sizes, drafts))[0]]

    assert kinds([1, 1, 3, 1, 2], [(2, 3), (1, 1)]) == ["plain", "plain", "correction", "plain", "bonus"]
    ambiguous = ["plain", "unknown", "correction", "unknown", "correction"]
    assert kinds([1, 1, 3, 1, 2], [(2, 3), (0, 2), (4, 4)]) == ambiguous  # the last step is cut
    assert kinds([1, 1, 5], [(2, 3), (1, 1)]) == ["plain", *["unknown"] * 6]  # merged chunks


def test_without_counts_every_token_is_unknown() -> None:
    found, _ = steps("vllm", vllm([1, 2], None))
    assert [step.kind for step in found] == [Outcome.PLAIN, Outcome.UNKNOWN, Outcome.UNKNOWN]
    assert Metrics.of(found).drafted == 0


# --- SGLang, from its documented fields; not run -----------------------------------------------------------------


def sglang(sizes: Sequence[int], cumulative: bool) -> Iterator[dict[str, Any]]:
    ids: list[int] = []
    for i, size in enumerate(sizes):
        new = list(range(len(ids), len(ids) + size))
        ids += new
        last = {"finish_reason": {"type": "length"}} if i == len(sizes) - 1 else {}
        yield {"output_ids": [*ids] if cumulative else new, "meta_info": {"completion_tokens": len(ids), **last}}


@pytest.mark.parametrize("cumulative", [True, False])
def test_texts_of_sglang_have_unknown_steps(cumulative: bool) -> None:
    found, reason = steps("sglang", list(sglang([1, 3], cumulative)))
    assert reason == "length"
    assert outcomes(found) == [((0,), "plain", 0), *(((token,), "unknown", 0) for token in (1, 2, 3))]


def test_a_stream_without_an_end_is_cut_off() -> None:
    for engine, events in (
        ("llama.cpp", LLAMA[:4]),
        ("vllm", vllm([1, 2], None)[:1]),
        ("sglang", [*sglang([1, 2], True)][:1]),
    ):
        with pytest.raises(ValueError, match="ended before the text"):
            steps(engine, events)
