"""Conclusions from reported statistics with their thresholds, and figures as the engines define them."""

from __future__ import annotations

from collections.abc import Iterator

from specdemo.core.formats import NOTHING, number, percent
from specdemo.external.engine_log import EngineStatistics, quotient

FIGURES = ("engine", "acceptance rate", "mean acceptance length", "tokens per step", "speed-up")
_LEAST_DRAFTED = 100  # fewer drafted tokens are no evidence
_LOW, _HIGH = 0.2, 0.6  # accepted / drafted
_ENDED, _BEFORE = 0.005, 0.05  # acceptance after and before the position where it ends


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
    yield from _acceptance(reported)
    yield from _acceptance_ends(reported)
    yield from _fixed_cost(reported)
    if reported.ar_tokens_per_second is None:
        yield "Measure and enter the tokens per second without drafts: they give the cost of a step."


def _acceptance(reported: EngineStatistics) -> Iterator[str]:
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


def _acceptance_ends(reported: EngineStatistics) -> Iterator[str]:
    rates = reported.by_position
    last = max((position for position, rate in enumerate(rates, 1) if rate >= _ENDED), default=0)
    if last and rates[last - 1] >= _BEFORE and len(rates) - last >= 2:
        yield (
            f"Acceptance falls to 0 after position {last}: draft at most {last} per step, and check the sliding window "
            f"and the trained length of the drafter. (acceptance ends: at least {_BEFORE}, then two or more positions "
            f"below {_ENDED}; from acceptance per position)"
        )


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
