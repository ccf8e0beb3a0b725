"""Effect of quantization on the bundled pair: tables `quantised-perplexity` and `quantised-speed` in docs/models.md.

`python -m training.quantised --write`. Perplexity on test code for each form of target and drafter; alpha, the mean
of sum min(p, q) at temperature 1 on the same texts, for all pairs of forms; speed of AR and speculative decoding, in
shuffled order in a process, relative to AR decoding in the first form. Speculation is exact with respect to the
quantized target.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from benchmarks.runs import traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.bench.table import Progress
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import QUANTIZATIONS
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe
from training.corpus import held_out_texts

TABLES = {"quantised-perplexity": "docs/models.md", "quantised-speed": "docs/models.md"}
FORMS = ("none", "bf16", "int8", "nf4")
TEXT_TOKENS = 256
PROMPT_TOKENS = 64  # of a timed run
PERPLEXITY_COLUMNS = {
    "form": "{form}",
    "target": "{mb[0]:.1f} MB",
    "perplexity": "{perplexity[0]:.3f}",
    "drafter": "{mb[1]:.1f} MB",
    "perplexity of the drafter": "{perplexity[1]:.3f}",
}
SPEED_COLUMNS = {
    "target": "{target}",
    "drafter": "{drafter}",
    "weights": "{mb:.1f} MB",
    "mean overlap": "{alpha:.3f}",
    "AR tokens/s": "{ar:.0f}",
    "relative to first form": "{ar_to_first:.2f}",
    "speculative tokens/s": "{speculative:.0f}",
    "relative to AR": "{ratio:.2f}",
    "relative to AR, first form": "{to_first:.2f}",
}


@dataclass
class Totals:
    """Totals over all positions of the texts."""

    positions: int = 0
    nats: dict[tuple[str, str], float] = field(default_factory=dict)  # by role and form
    overlap: dict[tuple[str, str], float] = field(default_factory=dict)  # sum min(p, q), by forms of target and drafter

    def add(self, models: dict[tuple[str, str], LoadedModel], text: Sequence[int]) -> None:
        """Add a text, scored by every model."""
        probs = {key: CachedModel(model.model).read(text).float().softmax(-1)[:-1] for key, model in models.items()}
        following = torch.tensor(text[1:])[:, None]
        self.positions += len(text) - 1
        for key, distributions in probs.items():
            nats = float(-distributions.gather(1, following).clamp_min(1e-12).log().sum())
            self.nats[key] = self.nats.get(key, 0.0) + nats
        for target, drafter in product((form for role, form in probs if role == "target"), repeat=2):
            overlap = float(torch.minimum(probs["target", target], probs["drafter", drafter]).sum())
            self.overlap[target, drafter] = self.overlap.get((target, drafter), 0.0) + overlap

    def perplexity(self, role: str, form: str) -> float:
        """Return exp of the mean cross entropy."""
        return math.exp(self.nats[role, form] / self.positions)


def held_out_middles(tokenizer: Any, count: int) -> list[list[int]]:
    """Return tokens from the middle of `count` test files."""
    texts = (tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in held_out_texts().values())
    long = [ids for ids in texts if len(ids) > 2 * TEXT_TOKENS]
    chosen = random.Random(0).sample(long, min(count, len(long)))
    return [ids[len(ids) // 2 : len(ids) // 2 + TEXT_TOKENS] for ids in chosen]


def speeds(recipes: Sequence[Recipe], prompts: Sequence[str], pool: ModelPool) -> Iterator[tuple[Recipe, float]]:
    """Yield tokens per second of each recipe on each prompt, in shuffled order; the first prompt is repeated."""
    rng = random.Random(0)
    for prompt in (prompts[0], *prompts):
        order = list(recipes)
        rng.shuffle(order)
        for recipe in order:
            yield recipe, traced(recipe, prompt, pool).metrics["tokens_per_second"] or 0.0


def measure_speed(
    forms: Sequence[str], prompts: Sequence[str], tokens: int, device: str
) -> dict[tuple[str, str], dict[str, float]]:
    """Return medians over the prompts for greedy AR and speculative decoding of every pair of forms."""
    common = {"temperature": 0, "top_p": 1.0, "max_tokens": tokens, "device": device, "gamma": PAIRS["bundled"].gamma}
    ar = {form: replace(Recipe(), method="ar", quantization=form, **common) for form in forms}
    drafted = {
        (target, drafter): Recipe(method="draft", quantization=target, drafter_quantization=drafter, **common)
        for target, drafter in product(forms, forms)
    }
    measured: dict[Recipe, list[float]] = {}
    for recipe, speed in speeds([*ar.values(), *drafted.values()], prompts, ModelPool()):
        measured.setdefault(recipe, []).append(speed)
    results = {}
    for (target, drafter), recipe in drafted.items():
        speculative, base, first = (measured[key][1:] for key in (recipe, ar[target], ar[forms[0]]))  # without warm-up
        results[target, drafter] = {
            "ar": statistics.median(base),
            "speculative": statistics.median(speculative),
            "ar_to_first": _median_ratio(base, first),
            "ratio": _median_ratio(speculative, base),
            "to_first": _median_ratio(speculative, first),
        }
    return results


def _median_ratio(speeds: Sequence[float], baseline: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(speeds, baseline, strict=True))


def study(options: argparse.Namespace) -> None:
    """Measure and publish both tables."""
    pool, models = ModelPool(), {}
    for form in options.form:
        recipe = Recipe(quantization=form, drafter_quantization=form, device=options.device)
        assert recipe.drafter_spec
        models["target", form] = pool.take(recipe.target_spec)
        models["drafter", form] = pool.take(recipe.drafter_spec)
    tokenizer = models["target", options.form[0]].tokenizer
    texts = held_out_middles(tokenizer, max(options.texts, options.prompts))
    totals, progress = Totals(), Progress()
    for i, text in enumerate(texts[: options.texts], 1):
        totals.add(models, text)
        progress.show(f"{i} of {min(len(texts), options.texts)} texts")
    progress.over()
    print(f"{totals.positions:,} tokens")
    weights = {key: model.weight_bytes / 1e6 for key, model in models.items()}
    records: list[dict[str, Any]] = []
    for form in options.form:
        keys = (("target", form), ("drafter", form))
        perplexities = [totals.perplexity(*key) for key in keys]
        records.append({"form": form, "mb": [weights[key] for key in keys], "perplexity": perplexities})
    publish(options, "quantised-perplexity", PERPLEXITY_COLUMNS, records)
    prompts = [tokenizer.decode(text[:PROMPT_TOKENS]) for text in texts[: options.prompts]]
    records = []
    for (target, drafter), figures in measure_speed(options.form, prompts, options.tokens, options.device).items():
        megabytes = weights["target", target] + weights["drafter", drafter]
        alpha = totals.overlap[target, drafter] / totals.positions
        records.append({"target": target, "drafter": drafter, "mb": megabytes, "alpha": alpha, **figures})
    publish(options, "quantised-speed", SPEED_COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--form", nargs="+", choices=QUANTIZATIONS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each timed run")
    parser.add_argument("--prompts", type=int, default=16, help="timed prompts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=40, help="test files")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
