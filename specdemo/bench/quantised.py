"""What quantisation does to a pair: ``python -m specdemo.bench.quantised``, for `docs/models.md`.

Perplexity of each form of the target on code that neither model was trained on; alpha, the mean of sum min(p, q) at
temperature 1 on the same texts, of every form of the drafter with every form of the target; and plain and speculative
speed, in turns. Exactness is with respect to the target in the form it is in.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from specdemo.bench.measure import load_prompts
from specdemo.generate import generate
from specdemo.models.cached import CachedModel
from specdemo.models.load import Loaded
from specdemo.models.pairs import PAIRS
from specdemo.models.shelf import Shelf
from specdemo.models.spec import QUANTIZATIONS
from specdemo.recipe import Recipe

FORMS = ("none", "bf16", "int8", "nf4", "fp4")
MOST = 512  # tokens of a text that are read


@dataclass(frozen=True)
class Speed:
    """Medians over the prompts: tokens per second, and the ratio of speculative to plain decoding."""

    plain: float
    speculative: float
    ratio: float


def laws(loaded: Loaded, texts: Sequence[Sequence[int]], width: int) -> list[Tensor]:
    """The law after each token of each text, `[n, width]`."""
    return [CachedModel(loaded.model).read(text)[:, :width].float().softmax(-1) for text in texts]


def perplexity(found: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean surprise per token, over all texts."""
    surprise = [
        -math.log(max(float(law[i, text[i + 1]]), 1e-12))
        for law, text in zip(found, texts, strict=True)
        for i in range(len(text) - 1)
    ]
    return math.exp(statistics.fmean(surprise))


def alpha(p: Sequence[Tensor], q: Sequence[Tensor]) -> float:
    """The mean of sum min(p, q) over all places."""
    return float(torch.cat([torch.minimum(a, b).sum(-1) for a, b in zip(p, q, strict=True)]).mean())


def speeds(recipes: Sequence[Recipe], prompts: Sequence[str], shelf: Shelf) -> Iterator[tuple[Recipe, float]]:
    """Tokens per second of each recipe on each prompt, in shuffled turns; each has run once before."""
    rng = random.Random(0)
    for prompt in (prompts[0], *prompts):
        order = list(recipes)
        rng.shuffle(order)
        for recipe in order:
            *_, end = generate(recipe, prompt, shelf)
            yield recipe, end["metrics"]["tokens_per_second"] or 0.0


def measure_speed(
    forms: Sequence[str], prompts: Sequence[str], tokens: int, device: str
) -> dict[tuple[str, str], Speed]:
    """Plain and speculative decoding of every pair of forms, greedily."""
    shelf = Shelf()
    usual = {"temperature": 0, "top_p": 1.0, "max_tokens": tokens, "device": device, "gamma": PAIRS["bundled"].gamma}
    plain = {form: Recipe(method="ar", quantization=form, **usual) for form in forms}
    drafted = {
        (t, d): Recipe(method="draft", quantization=t, drafter_quantization=d, **usual)
        for t, d in product(forms, forms)
    }
    found: dict[Recipe, list[float]] = {}
    for recipe, speed in speeds([*plain.values(), *drafted.values()], prompts, shelf):
        found.setdefault(recipe, []).append(speed)
    result = {}
    for (t, d), recipe in drafted.items():
        ours, base = found[recipe][1:], found[plain[t]][1:]
        ratio = statistics.median(a / b for a, b in zip(ours, base, strict=True))
        result[t, d] = Speed(statistics.median(base), statistics.median(ours), ratio)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--form", nargs="+", choices=QUANTIZATIONS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, default=48, help="of each timed text; 0: no timing")
    parser.add_argument("--prompts", type=int, default=4, help="timed")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    shelf, texts = Shelf(), [prompt.text for prompt in load_prompts(kinds=["code"])]
    p: dict[str, list[Tensor]] = {}
    q: dict[str, list[Tensor]] = {}
    size: dict[tuple[str, str], int] = {}
    for form in options.form:
        recipe = Recipe(quantization=form, drafter_quantization=form, device=options.device)
        target, drafter = (shelf.take(spec) for spec in (recipe.target_spec, recipe.drafter_spec) if spec)
        ids = [target.tokenizer.encode(text)[:MOST] for text in texts]
        width = CachedModel(target.model).vocab_size
        p[form], q[form] = laws(target, ids, width), laws(drafter, ids, width)
        size["target", form], size["drafter", form] = target.weight_bytes, drafter.weight_bytes
    print(f"{sum(map(len, ids)):,} tokens in {len(ids)} texts")
    print("| form | target | perplexity | drafter | perplexity |")
    print("|---|---|---|---|---|")
    for form in options.form:
        print(
            f"| {form} | {size['target', form] / 1e6:.1f} MB | {perplexity(p[form], ids):.3f} | "
            f"{size['drafter', form] / 1e6:.1f} MB | {perplexity(q[form], ids):.2f} |"
        )
    timed = (
        measure_speed(options.form, texts[: options.prompts], options.tokens, options.device) if options.tokens else {}
    )
    print("\n| target | drafter | weights | alpha | plain | speculative | ratio |")
    print("|---|---|---|---|---|---|---|")
    for t, d in product(options.form, options.form):
        speed = timed.get((t, d))
        times = f"{speed.plain:.0f} | {speed.speculative:.0f} | {speed.ratio:.2f}" if speed else "- | - | -"
        weights = size["target", t] + size["drafter", d]
        print(f"| {t} | {d} | {weights / 1e6:.1f} MB | {alpha(p[t], q[d]):.3f} | {times} |")


if __name__ == "__main__":
    main()
