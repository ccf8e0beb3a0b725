"""One generation from a prompt to the records of its trace.

What terminal, page and API all consume: first perhaps `{"phase": "loading", ...}`, which is no part of the trace, then
the trace's lines: a header, a line per step, an end.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
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
from specdemo.models.load import Loaded, Shelf
from specdemo.models.text import TextStream
from specdemo.parts import Stores, build
from specdemo.recipe import FORESTS, Recipe
from specdemo.remote.connect import Distant, connect

Record = dict[str, Any]


def generate(recipe: Recipe, prompt: str, shelf: Shelf, stores: Stores | None = None) -> Iterator[Record]:
    """Run `recipe` on `prompt`. Raises `Refused` before the header if it cannot be met.

    A failure after the header ends the trace with `"end": "error"`. May be closed at any time; whoever closes it
    writes the last line with `ending("cancelled", metrics)`.
    """
    if not prompt:
        raise Refused("the prompt is empty: type something to continue")
    wanted, recipe = recipe, recipe.running
    specs = [recipe.drafter_spec] if recipe.cloud else [recipe.target_spec, recipe.drafter_spec]
    for role, spec in zip(("drafter",) if recipe.cloud else ("target", "drafter"), specs, strict=True):
        if spec is not None and spec not in shelf:
            yield {"phase": "loading", "text": f"loading the {role}, {os.path.basename(spec.name) or spec.name}"}
            shelf.take(spec)
    loaded = [shelf.take(spec) if spec else None for spec in specs]
    if recipe.cloud:
        with closing(connect(recipe.cloud, recipe.models[0], recipe.seed)) as distant:
            yield from _run(wanted, recipe, prompt, distant, loaded[0], stores)
    else:
        assert loaded[0] is not None
        yield from _run(wanted, recipe, prompt, *loaded, stores)


def _run(
    wanted: Recipe, recipe: Recipe, prompt: str, target: Loaded | Distant, drafter: Loaded | None, stores: Stores | None
) -> Iterator[Record]:
    """The trace of `wanted`, which is carried out as `recipe`."""
    environment = target.environment  # asked once, before the clock starts
    start = time.perf_counter()
    parts = build(recipe, target, drafter, stores)
    tokens = target.tokenizer.encode(prompt)
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
        "prompt": prompt,
        "prompt_tokens": tokens,
        "vocab_size": target.vocab_size,
        "environment": {
            **_environment(),
            **environment,
            "drafter_bytes": drafter.weight_bytes if drafter else None,
        },
    }
    metrics, text, watched = Metrics(), TextStream(target.tokenizer, tokens), memory.Watch()
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
            drafts = text.peek(step.draft.tokens, step.draft.parents)
            pieces = [text.push(token) for token in step.tokens]
            if step.tokens and (last in target.stop or metrics.tokens >= min(recipe.max_tokens, room)):
                pieces[-1] += text.rest()
            ahead = step.verdict.pending
            yield {
                **step.to_json(),
                **({"pending_text": "".join(text.peek(ahead, range(-1, len(ahead) - 1)))} if step.searched else {}),
                "text": "".join(pieces),
                "pieces": pieces,
                "draft_text": drafts,
                "memory": {
                    "rss_bytes": watched.process_bytes(),
                    "device_bytes": memory.device_bytes(device),
                    "kv_bytes": parts.kv_bytes,
                },
            }
    except (Refused, RuntimeError) as error:  # a model that fails in mid-run ends its own run, in words
        yield ending("error", metrics, str(error) or type(error).__name__)
        return
    finally:
        parts.close()
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
