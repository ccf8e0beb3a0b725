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
from specdemo.core.errors import Refused
from specdemo.core.metrics import Metrics
from specdemo.models import memory
from specdemo.models.load import Loaded
from specdemo.models.load_errors import size
from specdemo.models.model_pool import Shelf
from specdemo.models.tokenizer import Message, Spelling, TextStream, rendered
from specdemo.pipeline import Stores, build
from specdemo.recipe import FORESTS, Recipe
from specdemo.remote.remote_model import Distant, connect

Record = dict[str, Any]

CHARACTERS = 3  # of a token, roughly


def generate(
    recipe: Recipe, prompt: str | Sequence[Message], shelf: Shelf, stores: Stores | None = None
) -> Iterator[Record]:
    """Run `recipe` on `prompt`, which with `recipe.chat` may be a whole conversation.

    Raises `Refused` before the header if it cannot be met.

    A failure after the header ends the trace with `"end": "error"`. May be closed at any time; whoever closes it
    writes the last line with `ending("cancelled", metrics)`.
    """
    if not prompt:
        raise Refused("the prompt is empty: type something to continue")
    wanted, recipe = recipe, recipe.running
    specs = [recipe.drafter_spec] if recipe.cloud else [recipe.target_spec, recipe.drafter_spec]
    context = len(prompt) // CHARACTERS + recipe.max_tokens  # what the prompt has in tokens is not known yet
    for news in shelf.bring([spec for spec in specs if spec is not None], context):
        yield {"phase": "loading", **asdict(news)}
    loaded = [shelf.take(spec) if spec is not None else None for spec in specs]
    if recipe.cloud:
        yield {"phase": "loading", "text": f"reaching the cloud at {recipe.cloud.remote}"}
        with closing(connect(recipe.cloud, recipe.target_spec, recipe.seed)) as distant:
            yield from _run(wanted, recipe, prompt, shelf, distant, loaded[0], stores)
    else:
        assert loaded[0] is not None
        yield from _run(wanted, recipe, prompt, shelf, *loaded, stores)


def _run(
    wanted: Recipe,
    recipe: Recipe,
    prompt: str | Sequence[Message],
    shelf: Shelf,
    target: Loaded | Distant,
    drafter: Loaded | None,
    stores: Stores | None,
) -> Iterator[Record]:
    """The trace of `wanted`, which is carried out as `recipe`."""
    environment = target.environment  # asked once, before the clock starts
    start = time.perf_counter()
    text, given = rendered(target.tokenizer, prompt, recipe.chat)
    parts = build(recipe, target, drafter, stores, text)
    tokens = target.opening if target.encoder else given  # what an encoder read is no part of the text
    room = parts.context - len(tokens)
    if room < 1:
        raise Refused(
            f"the prompt has {len(tokens):,} tokens and the context holds {parts.context:,}: shorten it by at least "
            f"{1 - room:,}"
        )
    yield {
        "specdemo": 1,
        "recipe": asdict(wanted),
        "exact": wanted.exact,
        "bit_equal": target.bit_equal and recipe.method not in FORESTS,  # rows of chains were compared, no others
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
    metrics, spoken, watched = Metrics(), TextStream(target.tokenizer, tokens), memory.Watch()
    spelling = Spelling(target.tokenizer)
    last, device = None, parts.device
    steps = decode(
        tokens,
        parts.judge,
        parts.drafter,
        parts.gamma,
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
            named = spelling.fresh(t for law in (*step.verdict.laws, *step.verdict.drafted) for t, _ in law.top)
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
                    "kv_bytes": parts.kv_bytes,
                },
            }
    except (Refused, RuntimeError, MemoryError) as error:  # a model that fails in mid-run ends its own run, in words
        failed, out = str(error) or type(error).__name__, memory.ran_out(error)
    else:
        failed, out = None, False
    finally:
        parts.close()
    if out:  # not in the handler, where the traceback still holds what was computed
        held = parts.kv_bytes
        del parts, steps
        shelf.recover()
        failed = (
            f"memory ran out (keys and values took {size(held)}, {size(memory.free_bytes(device))} are free again): "
            "shorten the prompt or the text, quantise the models, or choose a smaller pair"
        )
    if failed is not None:
        yield ending("error", metrics, failed)
        return
    figures = {
        "peak_rss_bytes": memory.peak_process_bytes(),
        "peak_device_bytes": memory.peak_device_bytes(device),
        "kv_bytes": parts.kv_bytes,
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
