"""Model card of the pair, measured on test files: writes assets/pair/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.runs import traced
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from training import curve, objectives
from training.corpus import Corpus, held_out_texts

PROMPT_TOKENS, TOKENS = 160, 128
GAMMAS = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Agreement:
    """Means over prompts for a temperature and gamma."""

    temperature: float
    gamma: int
    alpha: float  # mean of sum min(p, q) over tested positions
    acceptance_rate: float  # accepted / drafted
    tokens_per_pass: float


def prompts(corpus: Corpus, n: int) -> list[str]:
    """Return `n` prompts from the middle of test files."""
    texts = []
    for text in held_out_texts().values():
        tokens = corpus.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > 4 * PROMPT_TOKENS:
            start = len(tokens) // 2
            texts.append(corpus.tokenizer.decode(tokens[start : start + PROMPT_TOKENS]))
    return texts[:n]


def agreements(folder: Path, texts: Sequence[str], pool: ModelPool) -> list[Agreement]:
    """Run the pair on `texts` for every gamma, at temperatures 0 and 1."""
    rows = []
    for temperature in (0.0, 1.0):
        for gamma in GAMMAS:
            runs = [_run(folder, text, pool, temperature, gamma) for text in texts]
            tested, drafted = (sum(m[name] for m in runs) for name in ("tested", "drafted"))
            rows.append(
                Agreement(
                    temperature,
                    gamma,
                    alpha=sum(m["mean_beta"] * m["tested"] for m in runs if m["tested"]) / tested,
                    acceptance_rate=sum(m["accepted"] for m in runs) / drafted,
                    tokens_per_pass=statistics.mean(m["tokens_per_target_pass"] for m in runs if m["drafted"]),
                )
            )
    return rows


def _run(folder: Path, text: str, pool: ModelPool, temperature: float, gamma: int) -> dict[str, Any]:
    models = {"target": str(folder / "target"), "drafter": str(folder / "drafter")}
    recipe = Recipe(temperature=temperature, top_p=1.0, gamma=gamma, max_tokens=TOKENS, device="cpu", **models)
    return traced(recipe, text, pool).metrics


def looping_texts(folder: Path, texts: Sequence[str], pool: ModelPool) -> int:
    """Count the continuations of 256 greedy tokens that end in a loop, see `objectives.loops`."""
    recipe = Recipe(target=str(folder / "target"), method="ar", temperature=0, max_tokens=256, device="cpu")
    tokens = (torch.tensor([traced(recipe, text, pool).tokens]) for text in texts)
    return sum(int(objectives.loops(continued)[0, -1]) for continued in tokens)


def write(folder: Path, corpus: Corpus, recipe: str, count: int) -> str:
    """Measure the pair in `folder` on `count` prompts and write its README.md; `recipe` is the training command."""
    texts = prompts(corpus, count)
    pool = ModelPool()
    rows = agreements(folder, texts, pool)
    looping = looping_texts(folder, texts, pool)
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float32) for role in ("target", "drafter")
    )
    windows = len(corpus.held_out) // 2048
    loss = objectives.held_out_loss(target, corpus.held_out, 2048, windows)
    drafter_loss = objectives.held_out_loss(drafter, corpus.held_out, 2048, windows)
    alpha, first = objectives.held_out_agreement(drafter, target, corpus.held_out, 1024, 48)
    text = CARD.format(
        sizes="\n".join(_size(role, model) for role, model in (("target", target), ("drafter", drafter))),
        train=len(corpus.train),
        held=len(corpus.held_out),
        files=len(corpus.held_out_files),
        recipe=recipe,
        weight=objectives.REJECTION_WEIGHT,
        loss=loss,
        drafter_loss=drafter_loss,
        alpha=alpha,
        first=first,
        rows="\n".join(
            f"| {row.temperature:g} | {row.gamma} | {row.alpha:.3f} | {row.acceptance_rate:.3f} "
            f"| {row.tokens_per_pass:.2f} |"
            for row in rows
        ),
        prompts=len(texts),
        prompt_tokens=PROMPT_TOKENS,
        tokens=TOKENS,
        looping=looping,
        curve=curve.table(curve.read(folder)),
        chosen=f"{drafter.config.num_hidden_layers} x {drafter.config.hidden_size}",
    )
    (folder / "README.md").write_text(text, "utf-8")
    return text


def _size(role: str, model: Any) -> str:
    config = model.config
    return (
        f"| {role} | {config.num_hidden_layers} | {config.hidden_size} | {config.intermediate_size} "
        f"| {config.num_attention_heads} / {config.num_key_value_heads} | {model.num_parameters() / 1e6:.2f} M |"
    )


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, speculative-decoding]
---
# The bundled pair

Two small Llama models that continue Python source code, trained to demonstrate speculative decoding on any machine. The
drafter is distilled from the target. Both load with `AutoModelForCausalLM.from_pretrained`.

| model | layers | width | inner width | heads / KV heads | parameters |
|---|---|---|---|---|---|
{sizes}

Shared byte-level BPE tokenizer with 4,096 entries, tied embeddings, RoPE with a context of 2,048, float16.

## Data

The standard library of CPython including its tests, without generated tables and files above 400 kB: {train:,} training
tokens, {held:,} validation tokens in {files} complete files. The text is under the PSF licence; no other text was used.

## Recipe

`{recipe}`, in five stages.

1. Target: Muon for the matrices of the layers, AdamW for the other parameters; windows of 256 tokens, finally 2,048;
   constant, then linearly decreasing learning rate.
2. Polish: unlikelihood training against loops in the target's greedy continuations, with a KL penalty to the model of
   stage 1, then a weighted average with it, four to one. It reduces loops at temperature 0 at a small cost in loss.
3. Curve: short training of several drafter shapes, to compare acceptance with cost.
4. Drafter: distillation from the target's logits with KL(p || q) plus {weight:g} times the rejection rate
   1 - sum min(p, q).
5. Card: the figures below.

## Drafter shape

Validation mean overlap (sum min(p, q), temperature 1) and c (drafter pass / target pass in the program's engine,
float32, 2-core CPU) after the same short training; Theorem 3.8 at the best gamma. {chosen} was selected and trained
further.

{curve}

## Validation results

| | |
|---|---|
| target, nats per token (windows of 2,048) | {loss:.3f} |
| drafter, nats per token | {drafter_loss:.3f} |
| mean sum min(p, q) at temperature 1, on the files' text | {alpha:.3f} |
| first choices agree, on the files' text | {first:.3f} |
| greedy continuations of 256 tokens that end in a loop | {looping} of {prompts} |

Generation with the program: {prompts} prompts of {prompt_tokens} tokens from the middle of validation files,
{tokens} new tokens each. The mean overlap is the mean of sum min(p, q) over all tested positions.

| temperature | gamma | mean overlap | accepted / drafted | tokens per target pass |
|---|---|---|---|---|
{rows}

## Limitations

The models reproduce the form of Python, not its meaning: names, indentation and docstrings are plausible, but the code
is not useful, facts are invented, and the only natural language is English in docstrings. The best text is generated at
temperature 0.5 with top-p 0.95, the program's defaults. At temperature 0 some texts end in a loop, which favours n-gram
drafting. Absolute speeds do not transfer to large models; ratios do only for similar relations of drafter and target.
"""
