"""Would it pay to draft while a round is on its way? ``python -m benchmarks.draft_ahead``

The edge could draft past its own draft before the verdict is there. The next draft is then ready if all of this one was
accepted and the first token past it, which the drafter has to guess, is the target's own. How often that is so needs no
wire: it is counted here with the target at hand. What it saves is the time to draft, which is not taken here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from specdemo.core.decode import DraftBudget, decode
from specdemo.core.policies import Fixed
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "rule": "coupled"},
    {"temperature": 1.0, "rule": "rejection"},
)


def ready(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> tuple[int, int, int]:
    """Rounds with a draft; those that accepted all of it; those of them whose next token the drafter guesses."""
    assert recipe.drafter_spec is not None
    target, drafter = pool.take(recipe.target_spec), pool.take(recipe.drafter_spec)
    rounds = whole = guessed = 0
    for prompt in prompts:
        parts, tokens = build_pipeline(recipe, target, drafter), target.tokenizer.encode(prompt.text)
        steps = decode(
            tokens,
            parts.verifier,
            parts.drafter,
            parts.policy,
            max_tokens=recipe.max_tokens,
            stop=target.stop,
            clock=lambda: 0.0,
        )
        for step in steps:
            rounds += bool(step.draft.tokens)
            if step.kind == "bonus":
                whole += 1
                guess = parts.drafter.propose([*tokens, *step.draft.tokens], DraftBudget(1, Fixed(1)))
                guessed += guess.tokens[:1] == (step.verdict.token,)
            tokens = [*tokens, *step.tokens]
    return rounds, whole, guessed


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.draft_ahead")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6])
    options = parser.parse_args(arguments)
    pool, prompts, found = ModelPool(), load_prompts(kinds=["code"])[: options.prompts], []
    print("| rule | temperature | gamma | rounds | all accepted | and the next token guessed |\n" + "|---" * 6 + "|")
    for settings in SETTINGS:
        for gamma in options.gammas:
            recipe = Recipe(gamma=gamma, top_p=1.0, max_tokens=options.max_tokens, **settings)
            rounds, whole, guessed = ready(recipe, prompts, pool)
            found.append({**settings, "gamma": gamma, "rounds": rounds, "whole": whole, "guessed": guessed})
            print(
                f"| {recipe.rule} | {recipe.temperature:g} | {gamma} | {rounds} | {whole / rounds:.0%} "
                f"| {guessed / rounds:.0%} |",
                flush=True,
            )
    print(json.dumps({"ahead": found}))


if __name__ == "__main__":
    main()
