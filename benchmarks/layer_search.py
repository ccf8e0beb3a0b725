"""Which layers can self-speculation do without? A greedy search over a few texts, before anything is generated.

Layers are left out one by one, each time the one whose loss costs the least agreement with the whole model (Draft &
Verify 2309.08168 searches the same sets with Bayesian optimisation; one pass per candidate is enough for small ones).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.pass_cost import step_seconds
from specdemo.cli.arguments import Parser, add_model_options, given
from specdemo.cli.commands import at_least_one, run_command
from specdemo.core.errors import UserError
from specdemo.core.theory import best_gamma, walltime_improvement
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.model_variants import layer_count, with_layers
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class LayerSubset:
    """The best drafter found with so many layers left out."""

    skipped: tuple[int, ...]
    alpha: float  # mean sum min(p, q) at temperature 1 on the texts
    c: float  # its pass in passes of the whole model, as measured

    @property
    def gamma(self) -> int:
        """The best draft length for it; 0 where no draft pays."""
        return best_gamma(self.alpha, self.c)

    @property
    def speedup(self) -> float:
        """What Theorem 3.8 promises at that length."""
        return walltime_improvement(self.alpha, self.gamma, self.c)


def search(target: LoadedModel, texts: Sequence[str], most_tokens: int = 128) -> Iterator[LayerSubset]:
    """One finding per number of layers left out, from one to all but one."""
    model, count = target.model, layer_count(target.model)
    ids = [target.tokenizer.encode(text)[:most_tokens] for text in texts]
    distributions = [_laws(model, one) for one in ids]

    def alpha(skipped: tuple[int, ...]) -> float:
        thin = with_layers(model, [i for i in range(count) if i not in skipped])
        pairs = zip((_laws(thin, one) for one in ids), distributions, strict=True)
        return float(torch.cat([torch.minimum(q, p).sum(-1) for q, p in pairs]).mean())

    free = range(
        0 if isinstance(model, LlamaWeights) else 1, count
    )  # transformers needs layer 0 to know how long the text is
    skipped: tuple[int, ...] = ()
    while len(skipped) < count - 1 and set(free) - set(skipped):
        found = {(*skipped, i): alpha((*skipped, i)) for i in free if i not in skipped}
        skipped = max(found, key=found.__getitem__)
        whole, thin = step_seconds([model, with_layers(model, [i for i in range(count) if i not in skipped])], 20)
        yield LayerSubset(tuple(sorted(skipped)), found[skipped], thin / whole)


def _laws(model: LlamaWeights | torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """The law after each of `tokens`, `[n, vocab]`."""
    return CachedModel(model).read(tokens).float().softmax(-1)


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    at_least_one("prompts", options.prompts)
    recipe = Recipe(method="self", **given(options))
    texts = [prompt.text for prompt in load_prompts(kinds=["code"])[: options.prompts]]
    found = []
    print("layers left out, alpha, c, best gamma, Theorem 3.8", file=sys.stderr)
    for thinned in search(ModelPool().take(recipe.target_spec), texts):
        found.append(thinned)
        skipped = " ".join(map(str, thinned.skipped))
        print(f"{skipped:<40} {thinned.alpha:.3f}  {thinned.c:.3f}  {thinned.gamma}  {thinned.speedup:.2f}", flush=True)
    best = max(found, key=lambda thinned: thinned.speedup, default=None)
    if best is None:
        raise UserError(f"{recipe.models[0]} has no layer to spare: choose a deeper model")
    if not best.gamma:
        print("no set of layers left out makes drafting pay on these texts: choose another method")
        return 0
    flags = " ".join(f"--skip-layer {i}" for i in best.skipped)
    print(f"best: --method self --gamma {best.gamma} {flags}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the benchmark."""
    parser = Parser(description="which layers self-speculation can do without")
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=6)
    return run_command(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
