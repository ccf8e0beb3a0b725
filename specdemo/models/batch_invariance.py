"""Batch invariance of passes, and their cost by number of rows, measured after loading.

A pass is batch-invariant if the bits of a row do not depend on the other rows of the pass.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from specdemo.core.step import Draft
from specdemo.models.engines.engine import RepeatedPasses
from specdemo.models.kv_cache import CachedModel, Model
from specdemo.worker import unshared_passes, yield_device

MEASURED_ROWS = (1, 2, 4, 5, 8)
_DRAFT_LENGTHS = (1, 2, 4, 7)
COMPARED_ROWS = max(_DRAFT_LENGTHS) + 1
NO_COSTS = dict.fromkeys(MEASURED_ROWS, 1.0)  # costs of passes without a measurement
_TIMED_START = 50  # cached tokens
_COMPARED = 24  # compared tokens
_CLOCK_S = 1e-5  # largest resolution of a clock for passes
SECONDS = 0.5  # duration of the measurements
PADDING_COST = 1.05  # largest relative cost of padding that is accepted
STARTS: dict[str, Sequence[int]] = {"cpu": (), "cuda": (50, 600, 2000)}  # cached tokens at which rows are compared


@dataclass(frozen=True)
class BatchInvariance:
    """Batch invariance and pass costs of a model, measured by `check_invariance`.

    Compared for up to `COMPARED_ROWS` rows and `compared_context` tokens, unless it holds `by_construction`. `cost[n]`
    is v(n), the cost of a pass over n rows in AR steps.
    """

    equal: bool
    pad: int  # rows of target passes; 1 means no padding
    compared: int
    cost: dict[int, float]
    by_construction: bool = False


def check_invariance(model: Model, seconds: float | None = None) -> BatchInvariance:
    """Measure costs of passes and, where it does not hold by construction, compare rows of drafts with AR rows."""
    budget_s = (seconds or SECONDS) / 2
    with closing(CachedModel(model)) as timed, unshared_passes():
        timed.prepare(RepeatedPasses(frozenset(MEASURED_ROWS), _TIMED_START, 2 * _TIMED_START))
        cost, by_construction = _cost(timed, budget_s), timed.engine.batch_invariant
    if by_construction:
        return BatchInvariance(True, 1, 0, cost, by_construction=True)
    if not _starts(model):
        return BatchInvariance(False, 1, 0, cost)
    equal, compared = _compare(model, 1, budget_s)
    pad = MEASURED_ROWS[-1]
    if not equal and cost[pad] <= PADDING_COST:
        equal, compared = _compare(model, pad, budget_s)
        return BatchInvariance(equal, pad if equal else 1, compared, cost)
    return BatchInvariance(equal, 1, compared, cost)


def _starts(model: Model) -> Sequence[int]:
    return STARTS.get(model.device.type, (50,))


def _tokens(cached: CachedModel, count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(cached.vocab_size) for _ in range(min(count, cached.context))]


def _cost(cached: CachedModel, budget_s: float) -> dict[int, float]:
    tokens = _tokens(cached, _TIMED_START + MEASURED_ROWS[-1])
    text = tokens[: -MEASURED_ROWS[-1]]
    precise = time.get_clock_info("thread_time").resolution < _CLOCK_S
    # on a CPU a clock without the time of other programs
    clock = time.thread_time if cached.model.device.type == "cpu" and precise else time.perf_counter
    began = clock()
    seconds: dict[int, list[float]] = {n: [] for n in MEASURED_ROWS}
    while len(seconds[1]) < 2 or (len(seconds[1]) < 15 and clock() - began < budget_s):
        for n in MEASURED_ROWS:
            yield_device()
            cached.score(text[:-1], Draft())  # the last token is not fed yet
            start = clock()
            # the transfer waits for the pass
            cached.score(text, Draft.chain(tuple(tokens[len(text) : len(text) + n - 1])))[0, 0].item()
            seconds[n].append(clock() - start)
    single = min(seconds[1])
    return {n: round(min(values) / single, 3) for n, values in seconds.items()}


def compared_context(model: Model) -> int:
    """Return the tokens up to which rows are compared."""
    return max(_starts(model)) + _COMPARED if _starts(model) else sys.maxsize


def _compare(model: Model, pad: int, budget_s: float) -> tuple[bool, int]:
    starts, compared = _starts(model), 0
    for start in starts:
        with closing(CachedModel(model, pad)) as sequential, closing(CachedModel(model, pad)) as drafted:
            for equal in _comparisons(start, sequential, drafted, budget_s / len(starts)):
                compared += 1
                if not equal:
                    return False, compared
    return True, compared


def _comparisons(start: int, sequential: CachedModel, drafted: CachedModel, budget_s: float) -> Iterator[bool]:
    """Compare each row of drafts of several lengths with that of a pass over one row."""
    tokens = _tokens(sequential, start + _COMPARED)[: sequential.context - MEASURED_ROWS[-1]]
    start = min(start, max(len(tokens) - _COMPARED, len(tokens) // 2))
    recorded = frozenset(range(1, COMPARED_ROWS + 1))
    sequential.prepare(RepeatedPasses(recorded, start, len(tokens) + MEASURED_ROWS[-1]))
    sequential.score(tokens[:start], Draft())
    began, rows = time.perf_counter(), []
    for end in range(start + 1, len(tokens) + 1):
        yield_device()
        rows.append(sequential.score(tokens[:end], Draft())[0])
        if len(rows) >= 4 and time.perf_counter() - began > budget_s / 2:
            break
    del tokens[start + len(rows) :]
    for length in _DRAFT_LENGTHS:
        drafted.score(tokens[:start], Draft())
        end = start + 1
        while end <= len(tokens):
            yield_device()
            draft = tuple(tokens[end : end + length])
            for i, row in enumerate(drafted.score(tokens[:end], Draft.chain(draft)), end - 1 - start):
                yield torch.equal(row, rows[i])
            end += len(draft) + 1
