"""Figures of a run as the engines define them: acceptance rate, mean acceptance length, tokens per step, speed-up.

Sources: llama.cpp `server-context.cpp`; vLLM's SpecDecoding metrics; SGLang `meta_info`; TensorRT-LLM
`specDecodingStats` and `avgNumDecodedTokensPerIter`; `matches` of transformers, which reports none of them; benchmark
scripts of servers for speed-ups, which include the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from specdemo.core.formats import NOTHING, number
from specdemo.external.engine_log import EngineStatistics, quotient

Definition = tuple[str, Callable[[EngineStatistics], float | None]]  # formula, and value if its counts are known


def _speedup_with_prompt(run: EngineStatistics) -> float | None:
    if not run.tokens or run.prompt_s is None or not run.tokens_per_second or not run.ar_tokens_per_second:
        return None
    seconds = [run.prompt_s + run.tokens / speed for speed in (run.ar_tokens_per_second, run.tokens_per_second)]
    return seconds[0] / seconds[1]


_DRAFTED: Definition = ("accepted / drafted", lambda run: run.acceptance)
_TESTED: Definition = ("accepted / tested", lambda run: quotient(run.accepted, run.tested))
_LENGTH: Definition = ("1 + accepted / drafts", lambda run: run.tokens_per_step)
_ACCEPTED: Definition = ("accepted / drafts", lambda run: quotient(run.accepted, run.steps))
_PER_DRAFT: Definition = ("tokens / drafts", lambda run: quotient(run.tokens, run.steps))
_PER_STEP: Definition = ("tokens / steps", lambda run: quotient(run.tokens, run.all_steps))
_DECODED: Definition = ("(tokens - 1) / steps", lambda run: run.tokens and quotient(run.tokens - 1, run.all_steps))
_DECODING: Definition = (
    "tokens/s / AR tokens/s",
    lambda run: quotient(run.tokens_per_second, run.ar_tokens_per_second),
)
_WHOLE: Definition = ("AR time / time, with prompt", _speedup_with_prompt)

FIGURES = ("engine", "acceptance rate", "mean acceptance length", "tokens per step", "speed-up")
DEFINITIONS: Mapping[str, tuple[Definition | None, ...]] = {
    "llama.cpp": (_DRAFTED, _LENGTH, None, _DECODING),
    "vLLM": (_DRAFTED, _LENGTH, None, _WHOLE),
    "SGLang": (_DRAFTED, _LENGTH, _PER_DRAFT, _WHOLE),
    "TensorRT-LLM": (_DRAFTED, _LENGTH, _PER_STEP, _WHOLE),
    "transformers": (_TESTED, _ACCEPTED, None, _WHOLE),
    "specdemo": (_DRAFTED, _LENGTH, _DECODED, _DECODING),
}


def figure_rows(run: EngineStatistics) -> Iterator[list[str]]:
    """Yield a row per engine: its name, and value and formula of each figure; nothing without drafts."""
    if run.tokens_per_step is None and not run.drafted:
        return
    for engine, definitions in DEFINITIONS.items():
        yield [engine, *(f"{number(cell[1](run))} ({cell[0]})" if cell else NOTHING for cell in definitions)]
