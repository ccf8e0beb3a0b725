"""ZeroGPU: a GPU is assigned per call.

`spaces.GPU` forks a process per call and transfers arguments and items as pickles. Runs share only the models loaded
before the fork.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.events import Event, Loading
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.heads import load_head
from specdemo.models.load import load
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe, plan_run
from specdemo.ui.limits import HostLimits
from specdemo.ui.service import Generate
from specdemo.worker import Worker, device_released

GPU = Callable[..., Any]  # `spaces.GPU` or a fake

BATCH_S = 0.1  # duration of a batch of events: ten transfers per second, as many as the page draws
START_S = 15  # process, weight transfer and first passes, with a margin
PASS_S = 0.02  # pass of a small model, including launches and Python
BYTES_PER_S = 4e11  # weights read: a quarter of the hardware's bandwidth
LONGEST_S = 120  # longer requests are refused to most visitors


def decorator() -> GPU:
    """Return `spaces.GPU`, which has no effect outside ZeroGPU. Call before CUDA is initialized."""
    try:
        import spaces
    except ImportError:
        raise UserError("ZeroGPU needs the package spaces: install it, or start without --zero-gpu") from None
    return spaces.GPU


def zero_gpu_page(limits: HostLimits, device: str) -> dict[str, Any]:
    """Return the arguments of `page.build` for a Space with ZeroGPU."""
    gpu = decorator()
    pool = preload([Recipe(pair=pair, device=device) for pair in limits.pairs])
    return {
        "pool": pool,
        "engine": run_on_gpu(gpu, pool),
        "worker": Worker(at_once=1, waiting=limits.queue),
        "permanent": False,
    }


def preload(recipes: list[Recipe]) -> ModelPool:
    """Return a pool with the models of these recipes, never unloaded."""
    plans = [plan_run(recipe) for recipe in recipes]
    specs = dict.fromkeys(spec for plan in plans for spec in plan.models.values())
    pool = ModelPool(idle_s=math.inf, warm=False)
    for spec in specs:  # the calling thread emulates CUDA
        pool.add(load(spec.resolved(), warm=False))
    for plan in plans:
        if plan.recipe.pair and (head := PAIRS[plan.recipe.pair].head):
            head_spec = HeadSpec(head, plan.target).resolved()
            pool.add_head(head_spec, load_head(head_spec, pool.get(plan.target)))
    return pool


def run_on_gpu(gpu: GPU, pool: ModelPool, engine: Generate = generate) -> Generate:
    """Run `engine` in a forked ZeroGPU process that inherits `pool`.

    Raises `UserError` for options that require the page's process.
    """

    def seconds(recipe: Recipe, prompt: PromptOrChat) -> int:
        """Estimate the GPU time to request, assuming that no draft token is accepted."""
        target_bytes = pool.get(plan_run(recipe).target).weight_bytes
        return min(LONGEST_S, round(START_S + recipe.max_tokens * (PASS_S + target_bytes / BYTES_PER_S)))

    def batched(recipe: Recipe, prompt: PromptOrChat) -> Iterator[list[Event | Exception]]:
        batch: list[Event | Exception] = []
        try:
            sent = time.monotonic()
            with closing(engine(recipe, prompt, pool, Stores())) as events:
                for event in events:
                    batch.append(event)
                    if time.monotonic() - sent >= BATCH_S:
                        yield batch
                        batch, sent = [], time.monotonic()
        except UserError as error:  # of a raised error, spaces transfers the class name only
            batch.append(UserError(str(error)))
        except Exception as error:
            batch.append(RuntimeError(f"{type(error).__name__}: {error}"))
        yield batch

    batches = gpu(duration=seconds)(batched)

    def run(recipe: Recipe, prompt: PromptOrChat, _: ModelPool, __: Stores) -> Generator[Event]:
        if recipe.ngram_keep:
            raise UserError("n-grams are not kept on this host: switch off keeping n-grams")
        plan = plan_run(recipe)
        head = plan.head and plan.head.resolved()
        if any(spec not in pool for spec in (plan.target, *plan.models.values())) or head not in (None, *pool.heads):
            raise UserError("only preloaded models run on this host: choose a pair of the list, without quantization")
        yield Loading("waiting for a GPU")
        yield from _received(batches, recipe, prompt)

    return run


def _received(batches: Callable[..., Any], recipe: Recipe, prompt: PromptOrChat) -> Generator[Event]:
    try:
        with closing(batches(recipe, prompt)) as arriving:
            while True:
                with device_released():  # each run has its own GPU, so other runs continue meanwhile
                    batch: list[Event | Exception] = next(arriving, [])
                if not batch:
                    return
                for event in batch:
                    if isinstance(event, Exception):
                        raise event
                    yield event
    except (UserError, RuntimeError):
        raise
    except Exception as error:  # spaces raises its own: no GPU, no quota, a crashed process
        raise UserError(str(getattr(error, "message", error)) or type(error).__name__) from error
