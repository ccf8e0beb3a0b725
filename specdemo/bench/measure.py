"""Run every lane on every prompt and keep what each run took.

Every prompt is decoded by every lane, in a shuffled order, right after one another, so that whatever else the machine
does weighs on all alike. Models are loaded and have run once before anything is timed.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdemo.generate import generate
from specdemo.models.pairs import ASSETS
from specdemo.models.peers import PEERS, Peers
from specdemo.models.shelf import Shelf
from specdemo.recipe import Recipe, known

PROMPTS = ASSETS / "prompts.json"
COPIED = 256 << 20  # bytes: more than any cache holds


@dataclass(frozen=True)
class Prompt:
    """A text to continue and the class it stands for."""

    kind: str
    name: str
    text: str


def load_prompts(path: Path = PROMPTS, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The bundled prompts, of all classes or of these."""
    classes = json.loads(path.read_text("utf-8"))
    for kind in kinds:
        known("class of prompts", kind, classes)
    return [
        Prompt(kind, f"{kind} {i + 1}", text)
        for kind, texts in classes.items()
        for i, text in enumerate(texts)
        if not kinds or kind in kinds
    ]


def label(recipe: Recipe) -> str:
    """A recipe in a few words."""
    length = f" gamma={recipe.gamma}" if recipe.policy == "fixed" else f" {recipe.policy}"
    rule = "" if recipe.rule == "rejection" else f" {recipe.rule}"
    return f"{recipe.method}{'' if recipe.method == 'ar' else length}{rule} T={recipe.temperature:g}"


def measure(
    recipes: Sequence[Recipe], prompts: Sequence[Prompt], shelf: Shelf, peers: Sequence[str] = (), seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Run everything; one record per prompt: its name, class, and what each run took, in the order of `recipes`.

    `peers` are run with the settings of every plain recipe, after the recipes in each record's `runs`: all peers of the
    first plain recipe, then all of the second.
    """
    plain = [recipe for recipe in recipes if recipe.method == "ar"]
    drafting = next((recipe for recipe in recipes if recipe.drafter_spec), None)
    lanes: list[tuple[Recipe, str | None]] = [(recipe, None) for recipe in recipes]
    lanes += [(recipe, peer) for recipe in plain for peer in peers]
    theirs = None
    if peers:
        theirs = Peers(plain[0].target_spec, drafting.drafter_spec if drafting else None)
    order = list(range(len(lanes)))

    def run(lane: tuple[Recipe, str | None], text: str) -> dict[str, Any]:
        recipe, peer = lane
        if peer is None:
            return _ours(recipe, text, shelf)
        assert theirs is not None
        gamma = drafting.gamma if drafting else recipe.gamma
        return theirs.run(PEERS[peer], text, recipe.temperature, gamma, recipe.max_tokens, recipe.seed)

    for recipe, peer in lanes:
        run((replace(recipe, max_tokens=8), peer), prompts[0].text)
    rng = random.Random(seed)
    for prompt in prompts:
        rng.shuffle(order)
        runs: list[Any] = [None] * len(lanes)
        for i in order:
            runs[i] = run(lanes[i], prompt.text)
        yield {"kind": prompt.kind, "name": prompt.name, "runs": runs}


def _ours(recipe: Recipe, text: str, shelf: Shelf) -> dict[str, Any]:
    """A run's metrics, with its tokens, the seconds on the wall after the first one, and what it moved and held."""
    head, *steps, end = (line for line in generate(recipe, text, shelf) if "phase" not in line)
    metrics, environment = end["metrics"], head["environment"]
    weights = [environment["target_bytes"], environment["drafter_bytes"] or 0]
    passes = len(steps) - 1
    return {
        **metrics,
        "text": [token for step in steps for token in step["tokens"]],
        "decode_tokens": sum(len(step["tokens"]) for step in steps[1:]),
        "wall_s": steps[-1]["t"] - steps[0]["t"],
        "bytes_read": weights[0] * passes + weights[1] * metrics["drafted"],
        "held_bytes": metrics["peak_device_bytes"] or sum(weights) + metrics["kv_bytes"],
    }


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that this machine reads and writes when it copies a tensor: the best of a few."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        target[-1].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best
