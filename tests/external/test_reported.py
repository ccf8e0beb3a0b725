"""Steps of other engines: pure functions of recorded events. `recorded/` are responses of real servers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdemo.core.metrics import Metrics
from specdemo.core.step import Outcome, Step
from specdemo.external.dialects import DIALECTS

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))
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


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_steps_add_up_to_the_totals_of_the_engine_unless_some_are_unknown(path: Path) -> None:
    engine = "llama.cpp" if path.stem.startswith("llama") else "vllm"
    events = [tuple(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
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
