"""Read acceptance, drafts and speed from log lines and responses of llama.cpp, vLLM and SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specdemo.core.errors import UserError, plain_text

ENGINE_FORMATS = (
    "llama.cpp (draft acceptance, timings with draft_n), vLLM (SpecDecoding metrics, metrics.speculative_decoding) "
    "and SGLang (Decode batch); transformers reports no acceptance"
)
_MOST_LINE = 4096  # characters; longer lines are no log lines
_LARGEST = 1e15
_AGAIN = "save the output of the engine again"
_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)"


@dataclass(frozen=True)
class EngineStatistics:
    """Sums over a file; None where the engine does not report a figure."""

    engine: str
    drafted: float | None = None
    accepted: float | None = None
    steps: float | None = None  # verified drafts
    by_position: tuple[float, ...] = ()  # accepted / drafts at each position
    length: float | None = None  # mean tokens per step
    tokens_per_second: float | None = None
    ar_tokens_per_second: float | None = None
    tokens: float | None = None
    prompt_s: float | None = None

    @property
    def acceptance(self) -> float | None:
        return quotient(self.accepted, self.drafted)

    @property
    def tested(self) -> float | None:
        """Return the number of accepted and rejected tokens, if nearly all drafts have the same length."""
        if not self.steps or not self.by_position or self.accepted is None:
            return None
        if abs(self.steps * len(self.by_position) - (self.drafted or 0)) > self.steps / 10:
            return None
        return self.accepted + self.steps * (1 - self.by_position[-1])

    @property
    def all_steps(self) -> float | None:
        """Return the number of steps after the first token; a step adds a token to the accepted ones."""
        return max(0.0, self.tokens - 1 - self.accepted) if self.tokens and self.accepted is not None else None

    @property
    def tokens_per_step(self) -> float | None:
        if self.length is not None:
            return self.length
        return 1 + self.accepted / self.steps if self.steps and self.accepted is not None else None


def quotient(part: float | None, total: float | None) -> float | None:
    return part / total if total and part is not None else None


def read_engine_log(text: str) -> EngineStatistics:
    """Return the statistics of the first format with matching lines. Raises `UserError` for other texts."""
    if (statistics := _read_json(text)) is not None:
        return _checked(statistics)
    lines = "\n".join(line for line in text.splitlines() if len(line) <= _MOST_LINE)
    for read in (_llama_lines, _vllm_lines, _sglang_lines):
        if (statistics := read(lines)) is not None:
            return _checked(statistics)
    raise UserError(f"the file contains no statistics of a known engine: known are {ENGINE_FORMATS}")


def _checked(reported: EngineStatistics) -> EngineStatistics:
    numbers = ("drafted", "accepted", "steps", "length", "tokens_per_step", "tokens_per_second", "tokens", "prompt_s")
    for name in numbers:
        _check_number(name, getattr(reported, name))
    for rate in reported.by_position:
        if not 0 <= rate <= 1:
            raise UserError(f"the acceptance {rate:g} of a position is not a rate from 0 to 1: {_AGAIN}")
    if reported.acceptance is not None and reported.acceptance > 1:
        counts = f"{reported.accepted:g} accepted of {reported.drafted:g} drafted tokens"
        raise UserError(f"the file reports {counts}: {_AGAIN}")
    return reported


def _check_number(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= _LARGEST:
        raise UserError(f"{name} is not a number from 0 to {_LARGEST:g}: {_AGAIN}")


def _read_json(text: str) -> EngineStatistics | None:
    for value in _objects(text):
        if "draft_n" in value and "draft_n_accepted" in value:
            milliseconds, tokens = _figure(value, "predicted_ms"), _figure(value, "predicted_n")
            speed = 1000 * tokens / milliseconds if milliseconds and tokens else None
            prompt_ms = _figure(value, "prompt_ms")
            return EngineStatistics(
                "llama.cpp",
                drafted=_figure(value, "draft_n"),
                accepted=_figure(value, "draft_n_accepted"),
                tokens_per_second=speed,
                tokens=tokens,
                prompt_s=None if prompt_ms is None else prompt_ms / 1000,
            )
        if "num_draft_tokens" in value and "num_accepted_draft_tokens" in value:
            return EngineStatistics(
                "vLLM",
                drafted=_figure(value, "num_draft_tokens"),
                accepted=_figure(value, "num_accepted_draft_tokens"),
                steps=_figure(value, "num_spec_steps"),
                by_position=_positions(value.get("acceptance_histogram")),
            )
    return None


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    try:
        values = [json.loads(text[text.index("{") :])]
    except (ValueError, RecursionError):
        return
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
            values += value.values()


def _figure(value: Mapping[str, Any], name: str) -> float | None:
    number = value.get(name)
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    _check_number(name, number)
    return float(number)


def _positions(histogram: Any) -> tuple[float, ...]:
    if not isinstance(histogram, list) or not all(isinstance(count, int) for count in histogram) or not sum(histogram):
        return ()
    for count in histogram:
        _check_number("acceptance_histogram", count)
    return tuple(sum(histogram[n:]) / sum(histogram) for n in range(1, len(histogram)))


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def _rates(text: str) -> tuple[float, ...]:
    numbers = [number.strip() for number in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) for number in numbers):
        raise UserError(f"{plain_text(text, 60)!r} is not a list of rates: {_AGAIN}")
    return tuple(map(float, numbers))


def _llama_lines(text: str) -> EngineStatistics | None:
    counts = re.findall(rf"draft acceptance(?: rate)? = [0-9.]+ \({_NUMBER} accepted /{_NUMBER} generated\)", text)
    if not counts:
        return None
    accepted, drafted = (sum(map(float, column)) for column in zip(*counts, strict=True))
    lengths = _numbers(rf"generated\), mean (?:acceptance length|len) ={_NUMBER}", text)
    steps = accepted / (lengths[0] - 1) if len(lengths) == 1 == len(counts) and lengths[0] > 1 else None
    rates = re.findall(r"acceptance rate per position = \(([^()\n]*)\)", text)
    positions = _rates(rates[0]) if len(rates) == 1 else ()
    times = re.findall(rf"(?<!prompt )eval time ={_NUMBER} ms /{_NUMBER} tokens", text)
    milliseconds, tokens = (sum(map(float, column)) for column in zip(*times, strict=True)) if times else (0.0, 0.0)
    speed = 1000 * tokens / milliseconds if milliseconds else None
    prompt_s = sum(_numbers(rf"prompt eval time ={_NUMBER} ms", text)) / 1000
    count = tokens if len(times) == 1 == len(counts) else None  # of a single text
    return EngineStatistics(
        "llama.cpp", drafted, accepted, steps, positions, None, speed, tokens=count, prompt_s=prompt_s or None
    )


def _vllm_lines(text: str) -> EngineStatistics | None:
    lines = re.findall(r"(?:SpecDecoding|Speculative) metrics: (.*)", text)
    accepted = _numbers(rf"(?:Accepted|Number of accepted tokens):{_NUMBER}(?! tokens/s)", "\n".join(lines))
    drafted = _numbers(rf"(?:Drafted|Number of draft tokens):{_NUMBER}(?! tokens/s)", "\n".join(lines))
    if not lines or len(accepted) != len(drafted) or not drafted:
        return None
    rates = [re.search(r"Per-position acceptance rate: ([0-9.]+(?:, [0-9.]+)*)", line) for line in lines]
    rows = [_rates(rate[1]) for rate in rates if rate]
    if len(rows) < len(lines) or len({len(row) for row in rows}) != 1 or len(rows) != len(drafted):
        return EngineStatistics("vLLM", sum(drafted), sum(accepted))
    drafts = [tokens / len(rows[0]) for tokens in drafted]  # each interval has its own number of drafts
    means = zip(*([n * rate for rate in row] for n, row in zip(drafts, rows, strict=True)), strict=True)
    positions = tuple(sum(column) / sum(drafts) for column in means) if sum(drafts) else ()
    return EngineStatistics("vLLM", sum(drafted), sum(accepted), sum(drafts), positions)


def _sglang_lines(text: str) -> EngineStatistics | None:
    lines = re.findall(r"Decode batch\b.*gen throughput \(token/s\): [0-9.]+", text)
    if not lines:
        return None
    drafting = [line for line in lines if "accept len" in line]
    lengths = _numbers(rf"accept len:{_NUMBER}", "\n".join(drafting))
    speeds = {flag: _median_speed([line for line in lines if ("accept len" in line) == flag]) for flag in (True, False)}
    length = sum(lengths) / len(lengths) if lengths else None
    return EngineStatistics("SGLang", length=length, tokens_per_second=speeds[True], ar_tokens_per_second=speeds[False])


def _median_speed(lines: list[str]) -> float | None:
    speeds = sorted(_numbers(rf"gen throughput \(token/s\):{_NUMBER}", "\n".join(lines)))
    return speeds[len(speeds) // 2] if speeds else None
