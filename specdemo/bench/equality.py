"""Compare the text of every recipe with AR decoding, token by token.

At temperature 0 exact recipes reproduce the text. Above it only rules with shared noise do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from specdemo.bench.table import markdown_table
from specdemo.core.events import StepEvent
from specdemo.core.step import common_prefix
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

_PREFIX_SHARES = (1.0, 0.75, 0.5, 0.25)


@dataclass
class EqualityResult:
    """Comparison of a recipe's texts with AR decoding."""

    recipe: Recipe
    texts: int = 0
    tokens: int = 0
    accepted: int = 0  # draft tokens
    differences: list[tuple[str, int]] = field(default_factory=list)  # prompt and index of the first differing token

    def add(self, name: str, tokens: Sequence[int], ar_tokens: Sequence[int]) -> None:
        self.texts += 1
        self.tokens += len(tokens)
        if tokens != ar_tokens:
            self.differences.append((name, common_prefix(tokens, ar_tokens)))


def prompt_prefixes(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts: the given prompts, then the first three quarters of each, and so on."""
    prefixes = [
        replace(prompt, name=f"{prompt.name}, {share:.0%}", text=prompt.text[: max(1, round(share * len(prompt.text)))])
        for share in _PREFIX_SHARES
        for prompt in prompts
    ]
    return prefixes[:count]


def prove(results: Sequence[EqualityResult], prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[None]:
    """Add the texts of every prompt, with its index as seed, to `results`; yield after each prompt."""
    now = datetime.now()
    for seed, prompt in enumerate(prompts):
        ar_tokens: dict[float, list[int]] = {}
        for result in results:
            recipe = replace(result.recipe.at(now), seed=seed)
            if recipe.temperature not in ar_tokens:
                ar_tokens[recipe.temperature] = _decode(replace(recipe, method="ar"), prompt, pool)[0]
            tokens, accepted = _decode(recipe, prompt, pool)
            result.add(prompt.name, tokens, ar_tokens[recipe.temperature])
            result.accepted += accepted
        yield


def _decode(recipe: Recipe, prompt: Prompt, pool: ModelPool) -> tuple[list[int], int]:
    steps = [event.step for event in generate(recipe, prompt.text, pool) if isinstance(event, StepEvent)]
    return [token for step in steps for token in step.tokens], sum(len(step.verdict.accepted) for step in steps)


def equality_table(results: Sequence[EqualityResult]) -> str:
    head = ("method", "gamma", "temperature", "rule", "texts", "tokens", "accepted", "same text as AR")
    rows = [
        (
            *(result.recipe.method, result.recipe.gamma, f"{result.recipe.temperature:g}", result.recipe.rule),
            *(result.texts, f"{result.tokens:,}", f"{result.accepted:,}"),
            f"{result.texts - len(result.differences)} of {result.texts}",
        )
        for result in results
    ]
    return markdown_table(head, rows)
