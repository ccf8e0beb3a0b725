"""Greedy texts of the chat model with each kind of head: table `head-equality` in docs/heads.md.

`python -m benchmarks.head_equality --write`. All prompts of the evaluation, documents of up to 2,000 tokens, and turns
of conversations that continue the caches of the turn before are decoded with each drafter and with AR decoding alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.chat_drafters import with_heads
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.bench.table import Progress
from specdemo.cli.arguments import at_least_one
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLES = {"head-equality": "docs/heads.md"}
LENGTHS = (500, 1000, 2000)  # tokens
DOCUMENTS = ("architecture", "cli", "edge-cloud", "library", "models", "page")  # of docs/
MAX_TOKENS, GAMMA, TURNS = 64, 4, 3
SHIPPED = ("eagle", "hybrid", "tree")
SETS = ("prompts", "documents", "turns")
COLUMNS = {"drafter": "{lane}", "tokens": "{tokens:,}", **{name: f"{{{name}}}" for name in SETS}}


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

    def compare(self, name: str, ar: Sequence[int], lane: str, prompt: PromptOrChat, **values: Any) -> None:
        """Compare a text of a lane with that of AR decoding."""
        text = decode(replace(self._lanes[lane], chat=name != "documents"), prompt, self._pool, **values)
        self.counts[lane][name][0] += text == ar
        self.counts[lane][name][1] += 1
        self.tokens[lane] += len(text)

    def prompts(self, count: int) -> Iterator[str]:
        for prompt in load_prompts(chat=True)[:count]:
            ar = decode(self._ar, prompt.text, self._pool)
            for lane in self._lanes:
                self.compare("prompts", ar, lane, prompt.text)
            yield prompt.name

    def documents(self) -> Iterator[str]:
        ar_recipe = replace(self._ar, chat=False)
        for name in DOCUMENTS:
            ids = self._tokenizer.encode((ROOT / f"docs/{name}.md").read_text("utf-8"))
            for length in LENGTHS:
                ar = decode(ar_recipe, ids[:length], self._pool)
                for lane in self._lanes:
                    self.compare("documents", ar, lane, ids[:length])
            yield name

    def turns(self, count: int) -> Iterator[str]:
        """AR decoding computes each turn from its beginning."""
        prompts = [prompt.text for prompt in load_prompts(chat=True)]
        for first in range(count):
            messages: list[ChatMessage] = []
            stores: dict[str, dict[Any, Any]] = {lane: {} for lane in self._lanes}
            for turn in range(TURNS):
                messages.append({"role": "user", "content": prompts[(7 * first + 31 * turn) % len(prompts)]})
                ar = decode(self._ar, messages, self._pool)
                for lane in self._lanes:
                    self.compare("turns", ar, lane, messages, stores=stores[lane])
                answer = self._tokenizer.decode(ar, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
            yield f"conversation {first + 1}"


def study(options: argparse.Namespace) -> None:
    """Compare all texts and publish the numbers of equal ones."""
    for name in ("prompts", "conversations"):
        at_least_one(name, getattr(options, name))
    common = {"chat": True, "gamma": GAMMA, "temperature": 0.0, "max_tokens": MAX_TOKENS, "device": "cpu"}
    base = Recipe(pair=CHAT_PAIR, method="ar")
    lanes = {f"{method}, included head": replace(base, **common, method=method) for method in SHIPPED}
    for lane, values in with_heads(options.head).items():
        if "head" in values:
            lanes[lane.partition(",")[0]] = replace(base, **common, **values)
    compared, progress = Comparison(lanes, ModelPool()), Progress()
    for part in (compared.prompts(options.prompts), compared.documents(), compared.turns(options.conversations)):
        for done in part:
            progress.show(done)
    progress.over()
    records = []
    for lane, counts in compared.counts.items():
        shown = {name: f"{equal} of {total}" for name, (equal, total) in counts.items()}
        records.append({"lane": lane, "tokens": compared.tokens[lane], **shown})
    publish(options, "head-equality", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--head", action="append", default=[], help="directory of a further head; repeatable")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
