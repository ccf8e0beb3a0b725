"""Is the text really that of plain decoding? Every recipe on every prompt, token by token, on the machine at hand.

At temperature 0 any exact recipe must write what plain decoding writes. Above it the `coupled` rule must: drafter and
target then share their noise, so that chance itself is the same. (Other exact rules keep the law, not the text: those
are proved by enumeration, in the tests.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

PARTS = (1.0, 0.75, 0.5, 0.25)


@dataclass
class Finding:
    """How often a recipe wrote the text of plain decoding."""

    recipe: Recipe
    texts: int = 0
    tokens: int = 0
    accepted: int = 0  # drafted tokens that were kept: without any there was nothing to prove
    parted: list[tuple[str, int]] = field(default_factory=list)  # prompt and token from which the texts differ

    def add(self, name: str, ours: Sequence[int], plain: Sequence[int]) -> None:
        """Count in one text."""
        self.texts += 1
        self.tokens += len(ours)
        if ours != plain:
            pairs = enumerate(zip(ours, plain, strict=False))
            self.parted.append((name, next((i for i, (a, b) in pairs if a != b), min(len(ours), len(plain)))))


def more(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts: these, then the first three quarters of each, and so on."""
    cut = [
        replace(prompt, name=f"{prompt.name}, {part:.0%}", text=prompt.text[: max(1, round(part * len(prompt.text)))])
        for part in PARTS
        for prompt in prompts
    ]
    return cut[:count]


def prove(findings: Sequence[Finding], prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[None]:
    """Run everything and fill in the findings, prompt by prompt. Every prompt has a seed of its own."""
    for seed, prompt in enumerate(prompts):
        plain: dict[float, list[int]] = {}
        for finding in findings:
            recipe = replace(finding.recipe, seed=seed)
            if recipe.temperature not in plain:
                plain[recipe.temperature] = _text(replace(recipe, method="ar"), prompt, pool)[0]
            ours, accepted = _text(recipe, prompt, pool)
            finding.add(prompt.name, ours, plain[recipe.temperature])
            finding.accepted += accepted
        yield


def _text(recipe: Recipe, prompt: Prompt, pool: ModelPool) -> tuple[list[int], int]:
    """The tokens of a run, and how many of them were drafted."""
    steps = [event.step for event in generate(recipe, prompt.text, pool) if isinstance(event, StepEvent)]
    return [token for step in steps for token in step.tokens], sum(len(step.verdict.accepted) for step in steps)


def markdown(findings: Sequence[Finding]) -> str:
    """A table for people."""

    def row(finding: Finding) -> str:
        recipe, same = finding.recipe, finding.texts - len(finding.parted)
        return (
            f"| {recipe.method} | {recipe.gamma} | {recipe.temperature:g} | {recipe.rule} | {finding.texts} "
            f"| {finding.tokens:,} | {finding.accepted:,} | {same} of {finding.texts} |"
        )

    head = "| method | gamma | temperature | rule | texts | tokens | drafted and kept | the same as plain |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *map(row, findings)])
