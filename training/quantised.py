"""What quantisation does to a pair: ``python -m training.quantised``, for `docs/models.md`.

Perplexity of each form of the target on code that neither model was trained on; alpha, the mean of sum min(p, q) at
temperature 1 on the same texts, of every form of the drafter with every form of the target; and plain and speculative
speed, in shuffled turns of one process, beside plain decoding in the first form. Exactness is with respect to the
target in the form it is in.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from specdemo.bench import Progress
from specdemo.generate import generate
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import QUANTIZATIONS
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe
from training.corpus import held_out_texts

FORMS = ("none", "bf16", "int8", "nf4", "fp4")
MOST = 256  # tokens of a text that are read,
PROMPT = 64  # and that a timed run continues


@dataclass(frozen=True)
class Speed:
    """Medians over the prompts: tokens per second, and ratios of what took its turn on the same prompt."""

    plain: float
    speculative: float
    plain_to_first: float  # plain decoding, to plain decoding in the first form
    ratio: float  # speculative to plain decoding in the target's own form
    to_first: float  # speculative decoding, to plain decoding in the first form


@dataclass
class Sums:
    """Over all places of the texts so far."""

    places: int = 0
    surprise: dict[tuple[str, str], float] = field(default_factory=dict)  # by role and form, in nats
    overlap: dict[tuple[str, str], float] = field(default_factory=dict)  # sum min(p, q), by the forms of both

    def add(self, models: dict[tuple[str, str], LoadedModel], text: Sequence[int]) -> None:
        """Read one more text with every model."""
        distributions = {key: CachedModel(one.model).read(text).float().softmax(-1)[:-1] for key, one in models.items()}
        following = torch.tensor(text[1:])[:, None]
        self.places += len(text) - 1
        for key, probs in distributions.items():
            told = float(-probs.gather(1, following).clamp_min(1e-12).log().sum())
            self.surprise[key] = self.surprise.get(key, 0.0) + told
        for (role, t), (other, d) in product(distributions, distributions):
            if (role, other) == ("target", "drafter"):
                both = float(torch.minimum(distributions[role, t], distributions[other, d]).sum())
                self.overlap[t, d] = self.overlap.get((t, d), 0.0) + both

    def perplexity(self, role: str, form: str) -> float:
        """exp of the mean surprise per token."""
        return math.exp(self.surprise[role, form] / self.places)

    def alpha(self, target: str, drafter: str) -> float:
        """The mean of sum min(p, q)."""
        return self.overlap[target, drafter] / self.places


def middles(tokenizer: Any, count: int) -> list[list[int]]:
    """The middles of held-out files, one per file, as ids."""
    texts = (tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in held_out_texts().values())
    long = [ids for ids in texts if len(ids) > 2 * MOST]
    return [ids[len(ids) // 2 : len(ids) // 2 + MOST] for ids in random.Random(0).sample(long, min(count, len(long)))]


def speeds(recipes: Sequence[Recipe], prompts: Sequence[str], pool: ModelPool) -> Iterator[tuple[Recipe, float]]:
    """Tokens per second of each recipe on each prompt, in shuffled turns; each has run once before."""
    rng = random.Random(0)
    for prompt in (prompts[0], *prompts):
        order = list(recipes)
        rng.shuffle(order)
        for recipe in order:
            *_, end = generate(recipe, prompt, pool)
            yield recipe, end.metrics.tokens_per_second or 0.0


def measure_speed(
    forms: Sequence[str], prompts: Sequence[str], tokens: int, device: str
) -> dict[tuple[str, str], Speed]:
    """Plain and speculative decoding of every pair of forms, greedily."""
    pool = ModelPool()
    usual = {"temperature": 0, "top_p": 1.0, "max_tokens": tokens, "device": device, "gamma": PAIRS["bundled"].gamma}
    plain = {form: Recipe(method="ar", quantization=form, **usual) for form in forms}
    drafted = {
        (t, d): Recipe(method="draft", quantization=t, drafter_quantization=d, **usual)
        for t, d in product(forms, forms)
    }
    found: dict[Recipe, list[float]] = {}
    for recipe, speed in speeds([*plain.values(), *drafted.values()], prompts, pool):
        found.setdefault(recipe, []).append(speed)
    result = {}
    for (t, d), recipe in drafted.items():
        ours, base, first = (found[one][1:] for one in (recipe, plain[t], plain[forms[0]]))
        ratios = (_ratio(base, first), _ratio(ours, base), _ratio(ours, first))
        result[t, d] = Speed(statistics.median(base), statistics.median(ours), *ratios)
    return result


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--form", nargs="+", choices=QUANTIZATIONS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, default=64, help="of each timed text; 0: no timing")
    parser.add_argument("--prompts", type=int, default=16, help="timed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=40, help="held-out files, of which the middles are read")
    options = parser.parse_args(arguments)
    pool, models = ModelPool(), {}
    for form in options.form:
        recipe = Recipe(quantization=form, drafter_quantization=form, device=options.device)
        assert recipe.drafter_spec
        models["target", form] = pool.take(recipe.target_spec)
        models["drafter", form] = pool.take(recipe.drafter_spec)
    tokenizer = models["target", options.form[0]].tokenizer
    sums = Sums()
    texts = middles(tokenizer, max(options.texts, options.prompts))
    progress = Progress()
    for i, text in enumerate(texts[: options.texts], 1):
        sums.add(models, text)
        progress.show(f"{i} of {min(len(texts), options.texts)} texts")
    progress.over()
    print(f"{sums.places:,} tokens")
    print("| form | target | perplexity | drafter | perplexity |")
    print("|---|---|---|---|---|")
    for form in options.form:
        cells = [
            f"{models[role, form].weight_bytes / 1e6:.1f} MB | {sums.perplexity(role, form):.3f}"
            for role in ("target", "drafter")
        ]
        print(f"| {form} | {' | '.join(cells)} |")
    prompts = [tokenizer.decode(text[:PROMPT]) for text in texts[: options.prompts]]
    timed = measure_speed(options.form, prompts, options.tokens, options.device) if options.tokens else {}
    first = options.form[0]
    print(f"\n| target | drafter | weights | alpha | plain | to {first} | speculative | to plain | to plain {first} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for t, d in product(options.form, options.form):
        speed = timed.get((t, d))
        times = (
            f"{speed.plain:.0f} | {speed.plain_to_first:.2f} "
            f"| {speed.speculative:.0f} | {speed.ratio:.2f} | {speed.to_first:.2f}"
            if speed
            else "- | - | - | - | -"
        )
        weights = models["target", t].weight_bytes + models["drafter", d].weight_bytes
        print(f"| {t} | {d} | {weights / 1e6:.1f} MB | {sums.alpha(t, d):.3f} | {times} |")


if __name__ == "__main__":
    main()
