"""One generation from a prompt to the records of its trace.

What terminal, page and API all consume: first perhaps `{"phase": "loading", ...}`, which is no part of the trace, then
the trace's lines: a header, a line per step, an end.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

import torch

from specdemo.core.decode import decode
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.models import memory
from specdemo.models.load import LoadedModel
from specdemo.models.loaded_pair import LoadedPair
from specdemo.models.memory import format_bytes
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage, TextStream, TokenNames, render_prompt
from specdemo.pipeline import Stores, build_pipeline
from specdemo.recipe import METHODS, Recipe
from specdemo.remote.remote_model import RemoteModel, connect

Record = dict[str, Any]

CHARACTERS = 3  # of a token, roughly


def generate(
    recipe: Recipe, prompt: str | Sequence[ChatMessage], pool: ModelPool | LoadedPair, stores: Stores | None = None
) -> Iterator[Record]:
    """Run `recipe` on `prompt`, which with `recipe.chat` may be a whole conversation.

    Raises `UserError` before the header if it cannot be met.

    A failure after the header ends the trace with `"end": "error"`. May be closed at any time; whoever closes it
    writes the last line with `ending("cancelled", metrics)`.
    """
    if not prompt:
        raise UserError("the prompt is empty: type something to continue")
    if isinstance(pool, LoadedPair):
        recipe, pool = pool.bind(recipe), pool.pool
    wanted, recipe = recipe, recipe.running
    specs = [recipe.drafter_spec] if recipe.cloud else [recipe.target_spec, recipe.drafter_spec]
    context = len(prompt) // CHARACTERS + recipe.max_tokens  # what the prompt has in tokens is not known yet
    for news in pool.bring([spec for spec in specs if spec is not None], context):
        yield {"phase": "loading", **asdict(news)}
    loaded = [pool.take(spec) if spec is not None else None for spec in specs]
    if recipe.cloud:
        yield {"phase": "loading", "text": f"reaching the cloud at {recipe.cloud.remote}"}
        with closing(connect(recipe.cloud, recipe.target_spec, recipe.seed)) as distant:
            yield from _run(wanted, recipe, prompt, pool, distant, loaded[0], stores)
    else:
        assert loaded[0] is not None
        yield from _run(wanted, recipe, prompt, pool, *loaded, stores)


def _run(
    wanted: Recipe,
    recipe: Recipe,
    prompt: str | Sequence[ChatMessage],
    pool: ModelPool,
    target: LoadedModel | RemoteModel,
    drafter: LoadedModel | None,
    stores: Stores | None,
) -> Iterator[Record]:
    """The trace of `wanted`, which is carried out as `recipe`."""
    environment = target.environment  # asked once, before the clock starts
    start = time.perf_counter()
    text, given = render_prompt(target.tokenizer, prompt, recipe.chat)
    pipeline = build_pipeline(recipe, target, drafter, stores, text)
    tokens = target.opening if target.encoder else given  # what an encoder read is no part of the text
    room = pipeline.context - len(tokens)
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens):,} tokens and the context holds {pipeline.context:,}: shorten it by at least "
            f"{1 - room:,}"
        )
    yield {
        "specdemo": 1,
        "recipe": asdict(wanted),
        "exact": wanted.exact,
        "bit_equal": target.bit_equal
        and METHODS[recipe.method].shape == "chain",  # rows of chains were compared, no others
        "prompt": text,
        "prompt_tokens": given,
        "encoder": target.encoder,
        "vocab_size": target.vocab_size,
        "environment": {
            **_environment(),
            **environment,
            "drafter_bytes": drafter.weight_bytes if drafter else None,
        },
    }
    metrics, spoken, watched = Metrics(), TextStream(target.tokenizer, tokens), memory.MemorySampler()
    spelling = TokenNames(target.tokenizer)
    last, device = None, pipeline.device
    steps = decode(
        tokens,
        pipeline.verifier,
        pipeline.drafter,
        pipeline.policy,
        max_tokens=min(recipe.max_tokens, room),
        stop=target.stop,
        clock=time.perf_counter,
        start=start,
    )
    try:
        for step in steps:
            metrics.add(step)
            last = step.tokens[-1] if step.tokens else last
            drafts = spoken.peek(step.draft.tokens, step.draft.parents)
            pieces = [spoken.push(token) for token in step.tokens]
            if step.tokens and (last in target.stop or metrics.tokens >= min(recipe.max_tokens, room)):
                pieces[-1] += spoken.rest()
            ahead = step.verdict.pending
            named = spelling.fresh(
                t for probs in (*step.verdict.target_top, *step.verdict.draft_top) for t, _ in probs.top
            )
            yield {
                **step.to_json(),
                **({"pending_text": "".join(spoken.peek(ahead, range(-1, len(ahead) - 1)))} if step.searched else {}),
                **({"texts": named} if named else {}),
                "text": "".join(pieces),
                "pieces": pieces,
                "draft_text": drafts,
                "memory": {
                    "rss_bytes": watched.process_bytes(),
                    "device_bytes": memory.device_bytes(device),
                    "kv_bytes": pipeline.kv_bytes,
                },
            }
    except (UserError, RuntimeError, MemoryError) as error:  # a model that fails in mid-run ends its own run, in words
        failed, out = str(error) or type(error).__name__, memory.is_out_of_memory(error)
    else:
        failed, out = None, False
    finally:
        pipeline.close()
    if out:  # not in the handler, where the traceback still holds what was computed
        held = pipeline.kv_bytes
        del pipeline, steps
        pool.recover()
        failed = (
            f"memory ran out (keys and values took {format_bytes(held)}, {format_bytes(memory.free_bytes(device))} are free again): "
            "shorten the prompt or the text, quantise the models, or choose a smaller pair"
        )
    if failed is not None:
        yield ending("error", metrics, failed)
        return
    figures = {
        "peak_rss_bytes": memory.peak_process_bytes(),
        "peak_device_bytes": memory.peak_device_bytes(device),
        "kv_bytes": pipeline.kv_bytes,
    }
    yield ending("stop" if last in target.stop else "length", metrics, **figures)


def ending(reason: str, metrics: Metrics, error: str | None = None, **figures: Any) -> Record:
    """A trace's last line. `reason`: stop, length, cancelled or error."""
    return {"end": reason, "error": error, "metrics": {**metrics.as_dict(), **figures}}


@cache
def _environment() -> Record:
    return {
        "specdemo": "0.1.0",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": _processor(),
    }


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
