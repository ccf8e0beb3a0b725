"""Batch invariance of a model on the local machine, and the relative cost of passes over several rows.

If each row has the same bits in every pass, greedy speculative text equals AR greedy text; otherwise near-ties may
resolve differently. This depends on kernels and hardware.
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

MEASURED_ROWS = (1, 2, 5, 8)
_DRAFT_LENGTHS = (1, 2, 4, 7)
NO_COST = 1.05  # relative cost up to which padding is accepted
_START = 50  # compared rows cross a boundary of attention key counts


@dataclass(frozen=True)
class BatchInvariance:
    """Result of `check_invariance`. `cost[n]`: v(n), cost of a pass over n rows in AR steps."""

    equal: bool
    pad: int  # rows to which each target pass is padded; 1: no padding
    compared: int
    cost: dict[int, float]


def check_invariance(model: LlamaWeights | torch.nn.Module, budget_s: float = 0.5) -> BatchInvariance:
    """Compare and measure for about `budget_s`, longer only if a dozen passes take longer."""
    cost = _cost(CachedModel(model), budget_s / 2)
    equal, compared = _compare(model, 1, budget_s / 2)
    pad = MEASURED_ROWS[-1]
    if not equal and cost[pad] <= NO_COST:
        equal, compared = _compare(model, pad, budget_s / 2)
        return BatchInvariance(equal, pad if equal else 1, compared, cost)
    return BatchInvariance(equal, 1, compared, cost)


def _tokens(cached: CachedModel, count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(cached.vocab_size) for _ in range(min(count, cached.context))]


def _cost(cached: CachedModel, budget_s: float) -> dict[int, float]:
    tokens = _tokens(cached, _START + MEASURED_ROWS[-1])
    text = tokens[: -MEASURED_ROWS[-1]]
    began = time.perf_counter()
    seconds: dict[int, list[float]] = {n: [] for n in MEASURED_ROWS}
    while len(seconds[1]) < 2 or (len(seconds[1]) < 15 and time.perf_counter() - began < budget_s):
        for n in MEASURED_ROWS:
            cached.score(text[:-1], Draft())  # leaves the last token to be fed
            start = time.perf_counter()
            cached.score(text, Draft.chain(tuple(tokens[len(text) : len(text) + n - 1])))[0, 0].item()  # synchronises
            seconds[n].append(time.perf_counter() - start)
    single = min(seconds[1])
    return {n: round(min(values) / single, 3) for n, values in seconds.items()}


def _compare(model: LlamaWeights | torch.nn.Module, pad: int, budget_s: float) -> tuple[bool, int]:
    """Compare rows of drafts with AR rows; return (all equal, rows compared)."""
    sequential = CachedModel(model, pad)
    tokens = _tokens(sequential, _START + 24)[: sequential.context - MEASURED_ROWS[-1]]  # leaves space for padding
    start = min(_START, len(tokens) // 2)
    sequential.score(tokens[:start], Draft())
    began, rows = time.perf_counter(), []
    for end in range(start + 1, len(tokens) + 1):
        rows.append(sequential.score(tokens[:end], Draft())[0])
        if len(rows) >= 4 and time.perf_counter() - began > budget_s / 2:
            break
    del tokens[start + len(rows) :]
    compared = 0
    for length in _DRAFT_LENGTHS:
        drafted = _draft_rows(CachedModel(model, pad), tokens, start, length)
        compared += len(drafted)
        if not all(torch.equal(row, rows[i]) for i, row in drafted):
            return False, compared
    return True, compared


def _draft_rows(cached: CachedModel, tokens: Sequence[int], start: int, length: int) -> list[tuple[int, torch.Tensor]]:
    cached.score(tokens[:start], Draft())
    indexed = []
    end = start + 1
    while end <= len(tokens):
        draft = tuple(tokens[end : end + length])
        rows = cached.score(tokens[:end], Draft.chain(draft))
        indexed += [(end - 1 - start + i, row) for i, row in enumerate(rows)]
        end += len(draft) + 1
    return indexed
