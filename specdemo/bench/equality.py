"""Compare the text of every recipe with AR decoding, token by token.

At temperature 0 exact recipes reproduce the text. Above it only rules with shared noise do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from specdemo.bench.table import markdown_table
from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, StepEvent
from specdemo.core.step import Step, common_prefix
from specdemo.external.client import top_tokens_of
from specdemo.external.proof_bundle import ProvedText
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

PROGRAM = "specdemo"  # among the names of engines
_PREFIX_SHARES = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class DecodedText:
    """Steps of a run that did not fail."""

    prompt_ids: list[int]
    steps: Sequence[Step]
    end: End

    @property
    def ids(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    def margin(self, index: int) -> float | None:
        """Return the difference of the two largest log-probabilities of the target at a token, if it was recorded."""
        tops = [logprob.top for step in self.steps for logprob in step.verdict.logprobs]
        return tops[index][0][1] - tops[index][1][1] if index < len(tops) else None


@dataclass
class EqualityResult:
    """Comparison of a recipe's texts with AR decoding."""

    recipe: Recipe
    texts: int = 0
    tokens: int = 0
    accepted: int = 0  # draft tokens
    differences: list[tuple[str, int]] = field(default_factory=list)  # prompt and index of the first differing token
    proved: list[ProvedText] = field(default_factory=list)

    @property
    def engine(self) -> str:
        return self.recipe.external.partition("=")[0] if self.recipe.external else PROGRAM

    def add(self, prompt: Prompt, run: DecodedText, reference: DecodedText) -> None:
        server = self.recipe.external
        ids, expected = run.ids, reference.ids
        if server and ids == expected[:-1] and run.end.reason == reference.end.reason == "stop":
            expected = ids  # servers need not report the token that ends a text
        at = reference_margin = margin = None
        if ids != expected:
            at = common_prefix(ids, expected)
            reference_margin = reference.margin(at)
            margin = top_tokens_of(server, [*run.prompt_ids, *ids[:at]]).margin if server else run.margin(at)
            self.differences.append((prompt.name, at))
        self.proved.append(
            ProvedText(
                prompt=prompt.text,
                prompt_ids=run.prompt_ids,
                reference_ids=expected,
                ids=ids,
                difference=at,
                reference_margin=reference_margin,
                margin=margin,
            )
        )
        self.texts += 1
        self.tokens += len(ids)
        self.accepted += run.end.metrics.accepted


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
        references: dict[Recipe, DecodedText] = {}
        for result in results:
            recipe = replace(result.recipe.at(now), seed=seed)
            plain = replace(recipe, method="ar", gamma=Recipe.gamma, external=None)
            if plain not in references:
                references[plain] = _decode(plain, prompt, pool)
            result.add(prompt, _decode(recipe, prompt, pool), references[plain])
        yield


def _decode(recipe: Recipe, prompt: Prompt, pool: ModelPool) -> DecodedText:
    events = list(generate(recipe, prompt.text, pool, logprobs=None if recipe.external else 2))
    prompt_ids = [token for event in events if isinstance(event, Header) for token in event.prompt_tokens]
    end = events[-1]
    assert isinstance(end, End)
    if end.error is not None:
        raise UserError(end.error)
    return DecodedText(prompt_ids, [event.step for event in events if isinstance(event, StepEvent)], end)


def equality_table(results: Sequence[EqualityResult]) -> str:
    head = ("method", "gamma", "temperature", "rule", "texts", "tokens", "accepted", "same text as AR")
    rows = [
        (
            result.engine if result.recipe.external else result.recipe.method,
            *(result.recipe.gamma, f"{result.recipe.temperature:g}", result.recipe.rule),
            *(result.texts, f"{result.tokens:,}", f"{result.accepted:,}"),
            f"{result.texts - len(result.differences)} of {result.texts}",
        )
        for result in results
    ]
    return markdown_table(head, rows)
