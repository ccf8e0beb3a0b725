"""Drafters of the chat model, and equality of its greedy texts.

`python -m benchmarks.chat_model STUDY --write`. `drafters`: all lanes alternate on the last prompts of each class,
which chose no settings; `c` is the time of a draft token relative to an AR step, and an answer loops if it repeats a
block of at most 64 tokens three times. `equality`: texts of each head and AR decoding, for prompts, documents of up to
2,000 tokens, and turns that continue the caches of the turn before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.document_tables import last_of_each_class, number, ratio
from benchmarks.runs import traced
from benchmarks.tables import ROOT, Study, publish, study_command
from specdemo.bench.table import Progress
from specdemo.core.events import StepEvent
from specdemo.core.metrics import interval
from specdemo.generate import PromptOrChat, generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from training.head.checkpoint import trained_tokens
from training.head.conversations import loop_start

HEADS = "docs/heads.md"
TABLES = {"drafters": HEADS, "head-equality": HEADS}
POSITIONS = GAMMA = 4
LENGTHS = (500, 1000, 2000)  # tokens of a document
DOCUMENTS = ("architecture", "cli", "edge-cloud", "library", "models", "page")  # of docs/
MAX_TOKENS, TURNS = 64, 3  # of `equality`
SETS = ("prompts", "documents", "turns")
SHIPPED = ("eagle", "hybrid", "tree")
LANES: Mapping[str, Mapping[str, Any]] = {
    "AR": {"method": "ar"},
    "n-grams (nasd)": {"method": "nasd"},
    "lookup": {"method": "lookup"},
    "suffix": {"method": "suffix"},
    "head (eagle)": {"method": "eagle"},
    "head, path": {"method": "eagle", "policy": "path"},
    "suffix or head (hybrid)": {"method": "hybrid"},
    "suffix or head, path: the default": {"method": "hybrid", "policy": "path"},
}
KINDS = {"LlamaForCausalLMEagle3": "eagle", "DFlashDraftModel": "block", "Qwen3DSparkModel": "block"}
DRAFTER_COLUMNS = {
    "drafter": "{lane}",
    "parameters, M": "{parameters}",
    "training tokens, M": "{trained}",
    "temperature": "{temperature:g}",
    "c": "{c}",
    **{f"accepted at {i}": f"{{accepted[{i - 1}]}}" for i in range(1, POSITIONS + 1)},
    "tokens/pass": "{per_pass}",
    "speed-up": "{speedup}",
    "tokens/pass without loops": "{per_pass_without}",
    "speed-up without loops": "{speedup_without}",
}
HEAD_COLUMNS = {"drafter": "{lane}", "tokens": "{tokens:,}", **{name: f"{{{name}}}" for name in SETS}}


@dataclass(frozen=True)
class Run:
    """Figures of a run, and whether its answer loops."""

    metrics: Mapping[str, Any]
    loops: bool


def with_heads(folders: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the lanes with further heads for the target, each with its own method."""
    lanes = dict(LANES)
    for folder in folders:
        architectures = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("architectures") or [""]
        kind = KINDS.get(architectures[0], "medusa")
        lanes[f"head ({kind}), path"] = {"method": kind, "head": folder, "policy": "path"}
    return lanes


def head_sizes(recipe: Recipe) -> dict[str, str]:
    """Return the millions of parameters in the head's file, and of the tokens that it has seen, if known."""
    if recipe.head_spec is None:
        return {"parameters": "", "trained": ""}
    folder = Path(recipe.head_spec.name)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name not in ("d2t", "t2d")]
        count = sum(prod(file.get_slice(name).get_shape()) for name in names)
    tokens = trained_tokens(folder)
    return {"parameters": f"{count / 1e6:.1f}", "trained": f"{tokens / 1e6:.1f}" if tokens else ""}


def measured(recipes: Mapping[str, Recipe], prompts: Sequence[str]) -> dict[str, list[Run]]:
    """Run all recipes in turn on each prompt, after a warm-up."""
    runs: dict[str, list[Run]] = {lane: [] for lane in recipes}
    pool = ModelPool()
    for prompt in (prompts[0], *prompts):
        for lane, recipe in recipes.items():
            trace = traced(recipe, prompt, pool)
            tokens = np.array(trace.tokens)
            runs[lane].append(Run(trace.metrics, loop_start(tokens) < len(tokens)))
    return {lane: found[1:] for lane, found in runs.items()}


def table_row(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    """Return the figures of a drafter, compared with AR decoding."""
    step_s = statistics.median(run.metrics["verify_s"] / run.metrics["target_passes"] for run in baseline)
    drafted = sum(run.metrics["drafted"] for run in runs)
    pairs = list(zip(runs, baseline, strict=True))
    without = [(run, ar) for run, ar in pairs if not run.loops and not ar.loops]
    return {
        "c": number(sum(run.metrics["draft_s"] for run in runs) / drafted / step_s),
        "accepted": [number(share) for share in acceptance(runs)],
        "per_pass": per_pass(runs),
        "speedup": speedup(pairs),
        "per_pass_without": per_pass([run for run in runs if not run.loops]),
        "speedup_without": speedup(without),
    }


def acceptance(runs: Sequence[Run]) -> list[float | None]:
    """Return the share of accepted tokens at each position among the tested ones."""
    counts = []
    for name in ("accepted_by_position", "tested_by_position"):
        padded = [(list(run.metrics[name]) + [0] * POSITIONS)[:POSITIONS] for run in runs]
        counts.append([sum(column) for column in zip(*padded, strict=True)])
    return [accepted / tested if tested else None for accepted, tested in zip(*counts, strict=True)]


def per_pass(runs: Sequence[Run]) -> str:
    """Return tokens per target pass over all runs."""
    passes = sum(run.metrics["target_passes"] for run in runs)
    tokens = sum(run.metrics["tokens_per_target_pass"] * run.metrics["target_passes"] for run in runs if passes)
    return number(tokens / passes if passes else None)


def speedup(pairs: Sequence[tuple[Run, Run]]) -> str:
    """Return the median of paired speeds with its interval."""
    ratios = [run.metrics["tokens_per_second"] / ar.metrics["tokens_per_second"] for run, ar in pairs]
    return ratio(statistics.median(ratios), interval(ratios)) if ratios else "-"


def drafters(options: argparse.Namespace) -> None:
    """Compare acceptance and speed of drafters for the chat model."""
    prompts = [prompt.text for prompt in last_of_each_class(options.prompts)]
    rows: list[dict[str, Any]] = []
    for temperature in options.temperature:
        top_p = PAIRS[CHAT_PAIR].settings["top_p"] if temperature < 1 else 1.0
        common = {"chat": True, "gamma": GAMMA, "top_p": top_p, "temperature": temperature}
        base = replace(Recipe(pair=CHAT_PAIR, method="ar", device="cpu"), max_tokens=options.max_tokens, **common)
        recipes = {lane: replace(base, **values) for lane, values in with_heads(options.head).items()}
        runs = measured(recipes, prompts)
        for lane, found in runs.items():
            if lane != "AR":
                row = {"lane": lane, "temperature": temperature, **head_sizes(recipes[lane])}
                rows.append(row | table_row(found, runs["AR"]))
    publish(options, "drafters", DRAFTER_COLUMNS, rows)


def decode(recipe: Recipe, prompt: PromptOrChat, pool: ModelPool, stores: dict[Any, Any] | None = None) -> list[int]:
    """Return the tokens of a run."""
    events = generate(recipe, prompt, pool, stores)
    return [token for event in events if isinstance(event, StepEvent) for token in event.step.tokens]


class Comparison:
    """Texts of lanes, compared with AR decoding."""

    def __init__(self, lanes: dict[str, Recipe], pool: ModelPool) -> None:
        self._lanes, self._pool = lanes, pool
        self._ar = replace(next(iter(lanes.values())), method="ar", head=None, policy="fixed")
        self._tokenizer = pool.take(self._ar.target_spec).tokenizer
        self.counts = {lane: {name: [0, 0] for name in SETS} for lane in lanes}  # equal and all texts
        self.tokens = dict.fromkeys(lanes, 0)

    def compare(self, name: str, prompt: PromptOrChat, stores: Mapping[str, dict[Any, Any]] | None = None) -> list[int]:
        """Compare the texts of all lanes with that of AR decoding, and return it."""
        chat = name != "documents"
        expected = decode(replace(self._ar, chat=chat), prompt, self._pool)
        for lane, recipe in self._lanes.items():
            text = decode(replace(recipe, chat=chat), prompt, self._pool, stores and stores[lane])
            self.counts[lane][name][0] += text == expected
            self.counts[lane][name][1] += 1
            self.tokens[lane] += len(text)
        return expected

    def run(self, prompts: int, conversations: int) -> Iterator[str]:
        """Compare all texts; yield what has been compared."""
        texts = [prompt.text for prompt in load_prompts(chat=True)]
        for i, text in enumerate(texts[:prompts], 1):
            self.compare("prompts", text)
            yield f"prompt {i}"
        for name in DOCUMENTS:
            ids = self._tokenizer.encode((ROOT / f"docs/{name}.md").read_text("utf-8"))
            for length in LENGTHS:
                self.compare("documents", ids[:length])
            yield name
        for first in range(conversations):
            messages: list[ChatMessage] = []
            stores: dict[str, dict[Any, Any]] = {lane: {} for lane in self._lanes}
            for turn in range(TURNS):  # AR decoding computes each turn from its beginning
                messages.append({"role": "user", "content": texts[(7 * first + 31 * turn) % len(texts)]})
                answer = self._tokenizer.decode(self.compare("turns", messages, stores), skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
            yield f"conversation {first + 1}"


def equality(options: argparse.Namespace) -> None:
    """Compare greedy texts of the chat model with each head and those of AR decoding."""
    common = {"chat": True, "gamma": GAMMA, "temperature": 0.0, "max_tokens": MAX_TOKENS, "device": "cpu"}
    base = replace(Recipe(pair=CHAT_PAIR, method="ar"), **common)
    lanes = {f"{method}, included head": replace(base, method=method) for method in SHIPPED}
    for lane, values in with_heads(options.head).items():
        if "head" in values:
            lanes[lane.partition(",")[0]] = replace(base, **values)
    compared, progress = Comparison(lanes, ModelPool()), Progress()
    for done in compared.run(options.prompts, options.conversations):
        progress.show(done)
    progress.over()
    records = []
    for lane, counts in compared.counts.items():
        shown = {name: f"{equal} of {total}" for name, (equal, total) in counts.items()}
        records.append({"lane": lane, "tokens": compared.tokens[lane], **shown})
    publish(options, "head-equality", HEAD_COLUMNS, records)


FURTHER_HEADS = {"action": "append", "default": [], "help": "directory of a further head; repeatable"}
STUDIES = {
    "drafters": Study(drafters, {"prompts": 5, "max_tokens": 128, "head": FURTHER_HEADS, "temperature": [0.0, 0.2]}),
    "equality": Study(equality, {"prompts": 100, "conversations": 10, "head": FURTHER_HEADS}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
