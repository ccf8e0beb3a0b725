"""Whether a pass over several rows gives each row the very bits that a pass of its own would, and what it costs.

If it does, greedy speculative text is plain greedy text to the last bit, in every dtype; if not, both have the same law
but a near-tie may fall the other way. That depends on kernels and machine, so it is asked of the machine at hand.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdemo.core.step import Draft
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel

ROWS = (1, 2, 5, 8)  # passes whose cost is measured
GROUPS = (1, 2, 4, 7)  # drafts whose rows are compared
FREE = 1.05  # a pass at most this many times as dear as a plain step costs nothing
START = 50  # tokens before the first compared row: attention is given more keys while they are compared


@dataclass(frozen=True)
class BatchInvariance:
    """What was found. `cost[n]` is v(n): a pass over n rows, in plain steps."""

    equal: bool
    pad: int  # rows that each pass of the target is filled up to for that; 1 where rows need no company
    compared: int  # rows whose bits were compared
    cost: dict[int, float]


def check_invariance(model: LlamaWeights | torch.nn.Module, budget_s: float = 0.5) -> BatchInvariance:
    """Compare and measure for about `budget_s`, longer only where a dozen passes take longer."""
    cost = _cost(CachedModel(model), budget_s / 2)
    equal, compared = _compare(model, 1, budget_s / 2)
    pad = ROWS[-1]
    if not equal and cost[pad] <= FREE:  # rows differ by their number, which can be made the same for nothing
        equal, compared = _compare(model, pad, budget_s / 2)
        return BatchInvariance(equal, pad if equal else 1, compared, cost)
    return BatchInvariance(equal, 1, compared, cost)


def _tokens(cached: CachedModel, count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(cached.vocab_size) for _ in range(min(count, cached.context))]


def _cost(cached: CachedModel, budget_s: float) -> dict[int, float]:
    """The quickest of passes that take turns: whatever else the machine does only ever adds."""
    tokens = _tokens(cached, START + ROWS[-1])
    text = tokens[: -ROWS[-1]]
    began = time.perf_counter()
    seconds: dict[int, list[float]] = {n: [] for n in ROWS}
    while len(seconds[1]) < 2 or (len(seconds[1]) < 15 and time.perf_counter() - began < budget_s):
        for n in ROWS:
            cached.score(text[:-1], Draft())  # so that the last token is news
            start = time.perf_counter()
            cached.score(text, Draft.chain(tuple(tokens[len(text) : len(text) + n - 1])))[0, 0].item()  # waits for it
            seconds[n].append(time.perf_counter() - start)
    plain = min(seconds[1])
    return {n: round(min(values) / plain, 3) for n, values in seconds.items()}


def _compare(model: LlamaWeights | torch.nn.Module, pad: int, budget_s: float) -> tuple[bool, int]:
    """Whether rows of drafts of several lengths equal those of plain decoding, and how many were compared."""
    plain = CachedModel(model, pad)
    tokens = _tokens(plain, START + 24)[: plain.context - ROWS[-1]]  # near its end no pass can be filled up
    start = min(START, len(tokens) // 2)
    plain.score(tokens[:start], Draft())
    began, rows = time.perf_counter(), []
    for end in range(start + 1, len(tokens) + 1):
        rows.append(plain.score(tokens[:end], Draft())[0])
        if len(rows) >= 4 and time.perf_counter() - began > budget_s / 2:
            break
    del tokens[start + len(rows) :]
    compared = 0
    for size in GROUPS:
        found = _in_groups(CachedModel(model, pad), tokens, start, size)
        compared += len(found)
        if not all(torch.equal(row, rows[i]) for i, row in found):
            return False, compared
    return True, compared


def _in_groups(cached: CachedModel, tokens: Sequence[int], start: int, size: int) -> list[tuple[int, torch.Tensor]]:
    """Rows of passes that draft `size` tokens and keep them all, with a token of the target's own after them."""
    cached.score(tokens[:start], Draft())
    found = []
    end = start + 1
    while end <= len(tokens):
        draft = tuple(tokens[end : end + size])
        rows = cached.score(tokens[:end], Draft.chain(draft))
        found += [(end - 1 - start + i, row) for i, row in enumerate(rows)]
        end += len(draft) + 1
    return found
