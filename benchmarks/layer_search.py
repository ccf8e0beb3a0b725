"""Greedy search for the layers that self-speculation can skip, cited in README.md.

`python -m benchmarks.layer_search`. Each iteration removes the layer with the smallest loss of agreement
with the complete model on a few texts. Draft & Verify (2309.08168) searches the same sets with Bayesian
optimisation; for small models a pass per candidate is affordable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.pass_cost import Model, step_seconds
from benchmarks.tables import run_study, study_parser
from specdemo.bench import Progress, markdown_table
from specdemo.cli.arguments import given
from specdemo.cli.commands import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.theory import best_gamma, walltime_improvement
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.llama_weights import layer_count, with_layers
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class LayerSubset:
    """Best drafter for a number of skipped layers."""

    skipped: tuple[int, ...]
    alpha: float  # mean sum min(p, q) at temperature 1 on the texts
    c: float  # measured cost of its pass, in passes of the complete model

    @property
    def gamma(self) -> int:
        """Best draft length; 0 if drafting does not pay."""
        return best_gamma(self.alpha, self.c)

    @property
    def speedup(self) -> float:
        """Speed-up of Theorem 3.8 for the best draft length."""
        return walltime_improvement(self.alpha, self.gamma, self.c)


def search(target: LoadedModel, texts: Sequence[str], max_tokens: int = 128) -> Iterator[LayerSubset]:
    """Yield the best set for 1, 2, ... skipped layers."""
    model, count = target.model, layer_count(target.model)
    ids = [target.tokenizer.encode(text)[:max_tokens] for text in texts]
    target_probs = [_distributions(model, tokens) for tokens in ids]

    def without(skipped: tuple[int, ...]) -> Model:
        return with_layers(model, [i for i in range(count) if i not in skipped])

    def alpha(skipped: tuple[int, ...]) -> float:
        drafter = without(skipped)
        pairs = zip((_distributions(drafter, tokens) for tokens in ids), target_probs, strict=True)
        return float(torch.cat([torch.minimum(q, p).sum(-1) for q, p in pairs]).mean())

    removable = set(range(0 if isinstance(model, FusedWeights) else 1, count))  # transformers' cache needs layer 0
    skipped: tuple[int, ...] = ()
    while len(skipped) < count - 1 and removable - set(skipped):
        candidates = {(*skipped, i): alpha((*skipped, i)) for i in sorted(removable - set(skipped))}
        skipped = max(candidates, key=candidates.__getitem__)
        complete_s, drafter_s = step_seconds([model, without(skipped)], 20)
        yield LayerSubset(tuple(sorted(skipped)), candidates[skipped], drafter_s / complete_s)


def _distributions(model: Model, tokens: Sequence[int]) -> Tensor:
    return CachedModel(model).read(tokens).float().softmax(-1)


def study(options: argparse.Namespace) -> None:
    """Print a table of the sets and the command-line options of the best."""
    at_least_one("prompts", options.prompts)
    recipe = Recipe(method="self", **given(options))
    texts = [prompt.text for prompt in load_prompts(kinds=["code"])[: options.prompts]]
    subsets, progress = [], Progress()
    for subset in search(ModelPool().take(recipe.target_spec), texts):
        subsets.append(subset)
        progress.show(f"{len(subset.skipped)} layers skipped: Theorem 3.8: {subset.speedup:.2f}")
    progress.over()
    if not subsets:
        raise UserError(f"{recipe.models[0]} has too few layers for self-speculation: choose a deeper model")
    head = ("skipped layers", "alpha", "c", "best gamma", "Theorem 3.8")
    rows = [
        (
            " ".join(map(str, subset.skipped)),
            f"{subset.alpha:.3f}",
            f"{subset.c:.3f}",
            subset.gamma,
            f"{subset.speedup:.2f}",
        )
        for subset in subsets
    ]
    print(markdown_table(head, rows))
    best = max(subsets, key=lambda subset: subset.speedup)
    if not best.gamma:
        print("self-speculation does not pay on these texts for any set of layers: choose another method")
        return
    flags = " ".join(f"--skip-layer {i}" for i in best.skipped)
    print(f"best: --method self --gamma {best.gamma} {flags}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, models=True)
    parser.add_argument("--prompts", type=int, default=6)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
