"""Decoding on ZeroGPU, where a GPU is lent to one call at a time.

`spaces.GPU` forks a process for the call, sends its arguments and what it yields through a pipe, and has it stop when
the generator is closed. So a run shares nothing with the page but what was loaded before: models are on the shelf when
the page begins, and everything else travels as plain values. Knows no page, and `spaces` only where it is asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from specdemo.core.errors import UserError
from specdemo.generate import Record, generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.pipeline import Stores
from specdemo.recipe import Recipe
from specdemo.ui.limits import HostLimits
from specdemo.worker import WorkerGroup

Engine = Callable[[Recipe, str, ModelPool, Stores], Iterator[Record]]
GPU = Callable[..., Any]  # `spaces.GPU`, or what stands in for it

BATCH_S = 0.1  # of events that travel together: ten pickles a second, as many frames as the page draws
START_S = 15  # for the process, the weights' way to the GPU and the first passes, generously
PASS_S = 0.02  # a pass of a small model, launches and Python included
BYTES_PER_S = 4e11  # of weights read: a quarter of what the hardware gives
LONGEST_S = 120  # more is refused to most visitors


def decorator() -> GPU:
    """`spaces.GPU`, which changes nothing away from ZeroGPU. To be called before anything touches CUDA."""
    try:
        import spaces
    except ImportError:
        raise UserError("ZeroGPU needs the package spaces: install it, or start without --zero-gpu") from None
    return spaces.GPU


def hosted(limits: HostLimits, device: str) -> dict[str, Any]:
    """What a page is to be built with: every pair that is offered on the shelf, and runs by `spaces.GPU`."""
    gpu = decorator()
    pool = loaded([Recipe(pair=pair, device=device) for pair in limits.pairs])
    return {"pool": pool, "engine": on(gpu, pool), "worker": WorkerGroup(waiting=limits.queue)}


def loaded(recipes: list[Recipe]) -> ModelPool:
    """A shelf with the models of these recipes on it, and room for no others."""
    specs = dict.fromkeys(spec for recipe in recipes for spec in specs_of(recipe))
    pool = ModelPool(idle_s=math.inf, warm=False)
    for spec in specs:
        pool.take(spec)
    return pool


def specs_of(recipe: Recipe) -> list[ModelSpec]:
    """What a recipe needs loaded."""
    return [spec for spec in (recipe.target_spec, recipe.drafter_spec) if spec is not None]


def seconds_of(recipe: Recipe, target_bytes: int) -> int:
    """How long to ask a GPU for, as if nothing drafted were ever accepted: too little cuts a run off."""
    return min(LONGEST_S, round(START_S + recipe.max_tokens * (PASS_S + target_bytes / BYTES_PER_S)))


def on(gpu: GPU, pool: ModelPool, engine: Engine = generate) -> Engine:
    """`engine` with every run in a process of its own, made by `gpu`, where `pool` is as it was when that was forked.

    Raises `UserError` for what only the page's own process could do. An error over there arrives as its sentence.
    """

    def seconds(recipe: Recipe, prompt: str) -> int:
        return seconds_of(recipe, pool.take(recipe.target_spec).weight_bytes)

    @gpu(duration=seconds)
    def batches(recipe: Recipe, prompt: str) -> Iterator[list[Record]]:
        batch: list[Record] = []
        try:
            sent = time.monotonic()
            with closing(engine(recipe, prompt, pool, {})) as events:
                for event in events:
                    batch.append(event)
                    if time.monotonic() - sent >= BATCH_S:
                        yield batch
                        batch, sent = [], time.monotonic()
        except UserError as error:
            batch.append({"refused": str(error)})
        except Exception as error:  # whatever it was, over there: only its name would arrive
            batch.append({"failed": f"{type(error).__name__}: {error}"})
        yield batch

    def run(recipe: Recipe, prompt: str, _: ModelPool, __: Stores) -> Iterator[Record]:
        if recipe.ngram_keep:
            raise UserError("n-grams are not kept here: every run has a process of its own, which ends with it")
        if any(spec not in pool for spec in specs_of(recipe)):
            raise UserError("only the models loaded at the start run here: choose a pair of the list, unquantised")
        yield {"phase": "loading", "text": "waiting for a GPU"}
        with closing(_received(batches, recipe, prompt)) as events:
            yield from events

    return run


def _received(batches: Callable[..., Any], recipe: Recipe, prompt: str) -> Iterator[Record]:
    try:
        with closing(batches(recipe, prompt)) as arriving:
            for batch in arriving:
                for event in batch:
                    if "refused" in event:
                        raise UserError(event["refused"])
                    if "failed" in event:
                        raise RuntimeError(event["failed"])
                    yield event
    except (UserError, RuntimeError, GeneratorExit):
        raise
    except Exception as error:  # the lender's own: no GPU, no quota, a process that died
        raise UserError(str(getattr(error, "message", error)) or type(error).__name__) from error
