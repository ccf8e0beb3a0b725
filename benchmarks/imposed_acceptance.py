"""Speed-up of a draft model with imposed acceptance: table `imposed_acceptance` in docs/performance.md.

`python -m benchmarks.imposed_acceptance --write`. Target and drafter have sizes of `benchmarks.runs` and random
weights. The drafter computes all its passes, but each draft token is the target's next one with probability `--alpha`,
otherwise another token. AR and speculative runs alternate and decode the same text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.native_passes import FORMS
from benchmarks.runs import SHAPES, save_random, traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench.table import ratio_with_interval
from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics, interval
from specdemo.core.step import Draft, Step
from specdemo.core.theory import expected_tokens
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe

TABLES = {"imposed_acceptance": "docs/performance.md"}
PROMPT = "def mean(values):\n    return "
COLUMNS = {
    "form": "{form}",
    "AR tokens/s": "{plain:.0f}",
    "with drafts": "{drafted:.0f}",
    "speed-up": "{ratio}",
    "accepted / tested": "{alpha:.2f}",
    "tokens/pass, expected": "{per_pass:.2f}, {expected:.2f}",
    "c": "{c:.2f}",
    "v": "{v:.2f}",
}


class ImposedDrafter:
    """Compute the passes of a draft model, and replace its choices by the tokens of `text` with probability `alpha`."""

    def __init__(self, cached: CachedModel, text: Sequence[int], alpha: float) -> None:
        self._cached, self._text, self._alpha, self._random = cached, text, alpha, random.Random(0)

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """Return a chain of tokens of the text, up to a wrong one, then any tokens."""
        imposed = self._imposed(tokens, budget)

        def pick(logits: Tensor, i: int) -> Tensor:
            logits.argmax(-1)  # as a greedy drafter
            return torch.tensor(imposed[i : i + 1])

        return Draft.chain(tuple(self._cached.extend(tokens, len(imposed), pick) or ()) if imposed else ())

    def _imposed(self, tokens: Sequence[int], budget: DraftBudget) -> list[int]:
        following = self._text[len(tokens) : len(tokens) + budget.limit]
        return [token if self._random.random() < self._alpha else (token + 1) % 256 for token in following]

    def observe(self, step: Step) -> None:
        pass


def decoded(recipe: Recipe, pool: ModelPool, drafter: ImposedDrafter | None = None) -> tuple[list[int], Metrics]:
    """Return prompt and text, and the metrics of the run."""
    trace = traced(recipe, PROMPT, pool, drafter=drafter)
    return [*trace.header.prompt_tokens, *trace.tokens], trace.end.metrics


def compare(form: str, folders: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    dtype, quantization, _ = FORMS[form]
    stored = {"dtype": dtype, "quantization": quantization, "device": "cpu"}
    plain = Recipe(target=folders[0], method="ar", temperature=0.0, max_tokens=options.max_tokens, **stored)
    drafting = replace(plain, method="nasd", gamma=options.gamma, policy="fixed")
    pool, drafter = ModelPool(), load(ModelSpec(folders[1], **stored))
    text, _ = decoded(plain, pool)
    pairs = []
    for _ in range(options.rounds):
        imposed = ImposedDrafter(CachedModel(drafter.model), text, options.alpha)
        other, drafted = decoded(drafting, pool, imposed)
        if other != text:
            raise UserError("the texts differ, which makes the speeds incomparable")
        pairs.append((decoded(plain, pool)[1], drafted))
    ratios = [after.tokens_per_second / before.tokens_per_second for before, after in pairs]
    return {
        "form": form,
        "plain": statistics.median(before.tokens_per_second for before, _ in pairs),
        "drafted": statistics.median(after.tokens_per_second for _, after in pairs),
        "ratio": ratio_with_interval(statistics.median(ratios), interval(ratios)),
        "expected": expected_tokens(options.alpha, options.gamma),
        **step_figures(pairs),
    }


def step_figures(pairs: Sequence[tuple[Metrics, Metrics]]) -> dict[str, float]:
    """Return acceptance, tokens per pass, c and v of drafting runs, relative to the AR runs of the pairs."""
    single = statistics.median(before.verify_s / before.decode_steps for before, _ in pairs)
    return {
        "alpha": statistics.mean(after.alpha for _, after in pairs),
        "per_pass": statistics.mean(after.tokens_per_step for _, after in pairs),
        "c": statistics.median(after.draft_s / after.drafted for _, after in pairs) / single,
        "v": statistics.median(after.verify_s / after.decode_steps for _, after in pairs) / single,
    }


def study(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [str(Path(place) / name) for name in SHAPES]
        for shape, folder in zip(SHAPES.values(), folders, strict=True):
            save_random(shape, Path(folder))
        publish(options, "imposed_acceptance", COLUMNS, [compare(form, folders, options) for form in options.form])


OPTIONS = {
    "form": {"nargs": "+", "default": ["float32", "bfloat16", "int8", "nf4"], "choices": FORMS},
    "alpha": 0.8,
    "gamma": 4,
    "max_tokens": 200,
    "rounds": 5,
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
