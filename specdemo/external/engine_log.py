"""Explain the speed of llama.cpp, vLLM and SGLang: read acceptance and drafts from logs and responses, and diagnose.

Figures are shown as each engine defines them; diagnoses name their fields and thresholds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median_high
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from specdemo.core.errors import UserError, plain_text
from specdemo.core.formats import NOTHING, number, percent

ENGINE_FORMATS = (
    "llama.cpp (draft acceptance, timings with draft_n), vLLM (SpecDecoding metrics, metrics.speculative_decoding) "
    "and SGLang (Decode batch); transformers reports no acceptance"
)
_MOST_LINE = 4096  # characters; longer lines are no log lines
_AGAIN = "save the output of the engine again"
_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)"
_Figure = Annotated[float, Field(ge=0, le=1e15)] | None
_Rate = Annotated[float, Field(ge=0, le=1)]
FIGURES = ("engine", "acceptance rate", "mean acceptance length", "tokens per step", "speed-up")
_LEAST_DRAFTED = 100  # fewer drafted tokens are no evidence
_LOW, _HIGH = 0.2, 0.6  # accepted / drafted
_ENDED, _BEFORE = 0.005, 0.05  # acceptance after and before the position where it ends


@dataclass(frozen=True, config=ConfigDict(strict=True))
class EngineStatistics:
    """Sums over a file; None where the engine does not report a figure."""

    engine: str
    drafted: _Figure = None
    accepted: _Figure = None
    steps: _Figure = None  # verified drafts
    by_position: tuple[_Rate, ...] = ()  # accepted / drafts at each position
    length: _Figure = None  # mean tokens per step
    tokens_per_second: _Figure = None
    ar_tokens_per_second: _Figure = None
    tokens: _Figure = None
    prompt_s: _Figure = None

    @property
    def acceptance(self) -> float | None:
        return quotient(self.accepted, self.drafted)

    @property
    def tokens_per_step(self) -> float | None:
        per_draft = quotient(self.accepted, self.steps)
        return self.length if per_draft is None or self.length is not None else 1 + per_draft


def quotient(part: float | None, total: float | None) -> float | None:
    return part / total if total and part is not None else None


def read_engine_log(text: str, ar_tokens_per_second: float | None = None) -> EngineStatistics:
    """Return the statistics of the first format with matching lines, with a speed measured without drafts.

    Raises `UserError` for other texts and speeds.
    """
    if ar_tokens_per_second is not None and not 0 < ar_tokens_per_second < 1e15:
        raise UserError(f"tokens per second without drafts must be above 0, not {ar_tokens_per_second}")
    lines = "\n".join(line for line in text.splitlines() if len(line) <= _MOST_LINE)
    try:
        statistics = _read_json(text) or _llama_lines(lines) or _vllm_lines(lines) or _sglang_lines(lines)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise UserError(f"{problem['loc'][0]} of the file is no figure ({problem['msg']}): {_AGAIN}") from None
    if statistics is None:
        raise UserError(f"the file contains no statistics of a known engine: known are {ENGINE_FORMATS}")
    if statistics.acceptance is not None and statistics.acceptance > 1:
        counts = f"{statistics.accepted:g} accepted of {statistics.drafted:g} drafted tokens"
        raise UserError(f"the file reports {counts}: {_AGAIN}")
    if ar_tokens_per_second is None:
        return statistics
    return replace(statistics, ar_tokens_per_second=float(ar_tokens_per_second))


def _read_json(text: str) -> EngineStatistics | None:
    for value in _objects(text):
        if "draft_n" in value and "draft_n_accepted" in value:
            prompt_ms = _figure(value, "prompt_ms")
            speed = quotient(_figure(value, "predicted_n"), _figure(value, "predicted_ms"))
            return EngineStatistics(
                "llama.cpp",
                drafted=_figure(value, "draft_n"),
                accepted=_figure(value, "draft_n_accepted"),
                tokens_per_second=1000 * speed if speed else None,
                tokens=_figure(value, "predicted_n"),
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
        values = [json.loads(text[text.index("{") :], parse_int=float)]
    except (ValueError, RecursionError):
        return
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
            values += value.values()


def _figure(value: Mapping[str, Any], name: str) -> float | None:
    figure = value.get(name)
    return figure if isinstance(figure, float) else None


def _positions(histogram: Any) -> tuple[float, ...]:
    if not isinstance(histogram, list) or not all(isinstance(count, float) for count in histogram):
        return ()
    drafts = sum(histogram)
    return tuple(sum(histogram[n:]) / drafts for n in range(1, len(histogram))) if drafts else ()


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(digits) for digits in re.findall(pattern, text)]


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
    lengths = _numbers(rf"accept len:{_NUMBER}", "\n".join(lines))
    speeds: dict[bool, list[float]] = {True: [], False: []}  # with and without drafts
    for line in lines:
        speeds["accept len" in line] += _numbers(rf"gen throughput \(token/s\):{_NUMBER}", line)
    return EngineStatistics(
        "SGLang",
        length=sum(lengths) / len(lengths) if lengths else None,
        tokens_per_second=median_high(speeds[True]) if speeds[True] else None,
        ar_tokens_per_second=median_high(speeds[False]) if speeds[False] else None,
    )


def figures_line(reported: EngineStatistics) -> str:
    """Return the reported figures."""
    figures = {
        "tokens per step": reported.tokens_per_step,
        "tokens per second": reported.tokens_per_second,
        "tokens per second without drafts": reported.ar_tokens_per_second,
    }
    known = [f"{number(value)} {name}" for name, value in figures.items() if value is not None]
    if reported.acceptance is not None:
        counts = f"{number(reported.accepted, 0)} of {number(reported.drafted, 0)} drafted tokens accepted"
        known.insert(0, f"{counts} ({percent(reported.acceptance)})")
    return f"{reported.engine}: {', '.join(known) or 'no figures'}."


def conclusions(reported: EngineStatistics) -> Iterator[str]:
    """Yield the break-even cost, the diagnoses with fields and thresholds, and a missing figure."""
    tokens = reported.tokens_per_step
    if tokens is None and not reported.drafted:
        yield "The log reports no drafts: turn speculative decoding on, and save it again."
        return
    if tokens is not None:
        yield f"Speculation gains if drafting and verification cost less than {tokens:.2f} autoregressive steps."
    acceptance = reported.acceptance
    if acceptance == 1:
        yield (
            "Every drafted token was accepted: draft more tokens per step. (full acceptance: accepted = drafted; from "
            "drafted, accepted)"
        )
    if acceptance is not None and acceptance < _LOW and (reported.drafted or 0) >= _LEAST_DRAFTED:
        remedy = "raise --spec-draft-p-min (0 by default)" if reported.engine == "llama.cpp" else "shorten drafts"
        yield (
            f"{percent(1 - acceptance)} of the drafted tokens are rejected: {remedy} or choose another drafter. "
            f"(low acceptance: accepted / drafted below {_LOW}, {_LEAST_DRAFTED} drafted; from drafted, accepted)"
        )
    rates = reported.by_position
    last = max((position for position, rate in enumerate(rates, 1) if rate >= _ENDED), default=0)
    if last and rates[last - 1] >= _BEFORE and len(rates) - last >= 2:
        yield (
            f"Acceptance falls to 0 after position {last}: draft at most {last} per step, and check the sliding window "
            f"and the trained length of the drafter. (acceptance ends: at least {_BEFORE}, then two or more positions "
            f"below {_ENDED}; from acceptance per position)"
        )
    yield from _fixed_cost(reported)
    if reported.ar_tokens_per_second is None:
        yield "Measure and enter the tokens per second without drafts: they give the cost of a step."


def _fixed_cost(reported: EngineStatistics) -> Iterator[str]:
    speed, alone = reported.tokens_per_second, reported.ar_tokens_per_second
    tokens = reported.tokens_per_step
    high = (reported.acceptance or 0) >= _HIGH or (tokens or 0) >= 2
    if speed is None or alone is None or not high or speed >= alone:
        return
    cost = quotient(alone, speed) if tokens is not None else None
    yield (
        f"Drafts are accepted, but {number(speed, 0)} tokens per second are slower than {number(alone, 0)} without "
        "drafts. Each step has a fixed cost: draft longer, or decode without drafts."
        + (f" A step costs {number(tokens * cost, 1)} autoregressive steps." if tokens and cost else "")
        + f" (fixed cost per step: accepted / drafted from {_HIGH} or 2 tokens per step, and slower than without "
        "drafts; from accepted / drafted or tokens per step, tokens/s with and without drafts)"
    )


def figure_rows(run: EngineStatistics) -> Iterator[list[str]]:
    """Yield a row per engine: its name, and value and formula of each figure; nothing without drafts.

    Sources: llama.cpp `server-context.cpp`; vLLM's SpecDecoding metrics; SGLang `meta_info`; TensorRT-LLM
    `specDecodingStats` and `avgNumDecodedTokensPerIter`; `matches` of transformers, which reports none of them;
    benchmark scripts of servers for speed-ups, which include the prompt.
    """
    if run.tokens_per_step is None and not run.drafted:
        return
    steps = decoded = None  # after the first token; a step adds a token to the accepted ones
    if run.tokens and run.accepted is not None:
        decoded = run.tokens - 1
        steps = max(0.0, decoded - run.accepted)
    drafted = _cell(run.acceptance, "accepted / drafted")
    tested = _cell(quotient(run.accepted, _tested(run)), "accepted / tested")
    length = _cell(run.tokens_per_step, "1 + accepted / drafts")
    accepted = _cell(quotient(run.accepted, run.steps), "accepted / drafts")
    decoding = _cell(quotient(run.tokens_per_second, run.ar_tokens_per_second), "tokens/s / AR tokens/s")
    whole = _cell(_speedup_with_prompt(run), "AR time / time, with prompt")
    yield ["llama.cpp", drafted, length, NOTHING, decoding]
    yield ["vLLM", drafted, length, NOTHING, whole]
    yield ["SGLang", drafted, length, _cell(quotient(run.tokens, run.steps), "tokens / drafts"), whole]
    yield ["TensorRT-LLM", drafted, length, _cell(quotient(run.tokens, steps), "tokens / steps"), whole]
    yield ["transformers", tested, accepted, NOTHING, whole]
    yield ["specdemo", drafted, length, _cell(quotient(decoded, steps), "(tokens - 1) / steps"), decoding]


def _cell(value: float | None, formula: str) -> str:
    return f"{number(value)} ({formula})"


def _tested(run: EngineStatistics) -> float | None:
    """Return the number of accepted and rejected tokens, if nearly all drafts have the same length."""
    if not run.steps or not run.by_position or run.accepted is None:
        return None
    if abs(run.steps * len(run.by_position) - (run.drafted or 0)) > run.steps / 10:
        return None
    return run.accepted + run.steps * (1 - run.by_position[-1])


def _speedup_with_prompt(run: EngineStatistics) -> float | None:
    if not run.tokens or run.prompt_s is None or not run.tokens_per_second or not run.ar_tokens_per_second:
        return None
    seconds = [run.prompt_s + run.tokens / speed for speed in (run.ar_tokens_per_second, run.tokens_per_second)]
    return seconds[0] / seconds[1]
