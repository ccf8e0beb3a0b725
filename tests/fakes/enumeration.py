"""Exact output distributions by exploring every random draw, and the oracle they are compared with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from fakes.tiny_models import (
    DraftVocabularyDrafter,
    EnumeratedVerifier,
    Explorer,
    GuessDrafter,
    MixedDrafter,
    SiblingDrafter,
    TableHead,
    TableModel,
    committed,
    letters_tokenizer,
    run,
)
from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import SamplingParams
from specdemo.core.texts import BannedText
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ChainDrafter, ModelDrafter, ModelScorer, UniversalDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.drafters.suffix import HybridDrafter, LookupDrafter, SuffixDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.models.tokenizer import Bridge

VOCAB = 4
TARGET = TableModel(VOCAB, seed=1)
SMALL = TableModel(VOCAB, seed=2)
PEAKED = TableModel(VOCAB, seed=5, spread=4.0)  # confident enough for any draft-length policy
PROMPT = (2, 0, 2, 0)
STOP = (3,)
SAMPLING = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.4, top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "top-k and top-p": SamplingParams(temperature=0.9, top_k=3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.2, min_p=0.4),
    "top-p and min-p": SamplingParams(top_p=0.9, min_p=0.3),
    "penalty": SamplingParams(repetition_penalty=1.5),
    "bad words": SamplingParams(bad_words=((1,), (2, 0))),
    "banned text": SamplingParams(banned=BannedText(["ba", "d"], [b"a", b"b", b"ab", b"cd"])),
    "greedy": SamplingParams(temperature=0),
}
ROUNDING = 1e-5  # float32


def reference_probs(logits: list[float], sampling: SamplingParams, prefix: Sequence[int]) -> list[float]:
    """Reference implementation in plain Python."""
    logits = list(logits)
    for token in set(prefix):
        if sampling.repetition_penalty != 1:
            logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for *before, last in sampling.bad_words:
        if not before or list(prefix[-len(before) :]) == before:
            logits[last] = -math.inf
    if sampling.banned is not None:
        pieces, text = ("a", "b", "ab", "cd"), "".join("a b ab cd".split()[token] for token in prefix)
        for token, piece in enumerate(pieces):
            if any((text + piece).find(word, max(0, len(text) - len(word) + 1)) >= 0 for word in ("ba", "d")):
                logits[token] = -math.inf
    for processor in sampling.processors:
        logits = processor(prefix, torch.tensor(logits)).tolist()
    if sampling.temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    weights = [math.exp(x / sampling.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sampling.top_k or len(order)]
    total = sum(weights[i] for i in kept)
    mass, nucleus = 0.0, []
    for i in kept:
        if mass < sampling.top_p or not nucleus:
            nucleus.append(i)
        mass += weights[i] / total
    nucleus = [i for i in nucleus if weights[i] >= sampling.min_p * max(weights)]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


@cache
def true_distribution(
    sampling: SamplingParams, length: int, stop: tuple[int, ...], prompt: tuple[int, ...] = PROMPT
) -> dict[tuple[int, ...], float]:
    """Distribution of autoregressive sampling from the target, by multiplication."""
    done: dict[tuple[int, ...], float] = {}
    texts = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in texts.items():
            prefix = (*prompt, *text)
            for token, chance in enumerate(reference_probs(TARGET.logits(prefix).tolist(), sampling, prefix)):
                if chance:
                    (done if token in stop else longer)[(*text, token)] = weight * chance
        texts = longer
    return done | texts


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    """Total variation."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


OURS, THEIRS = letters_tokenizer(["a", "b", "ab", "c"]), letters_tokenizer(["a", "c", "b", "ba"])


@cache
def bridged(tokens: tuple[int, ...]) -> Bridge:
    bridge = Bridge(OURS, THEIRS, ())
    bridge.read(tokens)
    return bridge


@cache
def rewritten(tokens: tuple[int, ...], new: tuple[int, ...]) -> list[int]:
    return bridged(tokens).write(tokens, new)


def universal(sampling: SamplingParams, source: Any) -> UniversalDrafter:
    """Sampling drafter with another vocabulary: other letters, order and merges."""
    return UniversalDrafter(
        ModelDrafter(PEAKED.score, replace(sampling, bad_words=(), banned=None), source, VOCAB),
        lambda tokens: bridged(tuple(tokens)).read(tokens),
        lambda tokens, new: rewritten(tuple(tokens), tuple(new)),
        context=99,
    )


def head(sampling: SamplingParams, source: Any) -> ChainDrafter:
    """Drafter with a head of a part of the vocabulary."""
    return ChainDrafter(TableHead(SMALL, (0, 2, 3)), sampling, source, VOCAB)


Make = Callable[[SamplingParams, Explorer], Any]
DRAFTERS: dict[str, Make] = {
    "none": lambda sampling, source: EmptyDrafter(),
    "model": lambda sampling, source: ModelDrafter(SMALL.score, sampling, source, VOCAB),
    "straight": lambda sampling, source: ModelDrafter(SMALL.score, sampling, source, VOCAB, extend=SMALL.extend),
    "siblings": lambda sampling, source: SiblingDrafter(SMALL, sampling, source),
    "mixed": lambda sampling, source: MixedDrafter(SMALL, sampling, source),
    "mixed, sampled first": lambda sampling, source: MixedDrafter(SMALL, sampling, source, first=1),
    "draft vocabulary": lambda sampling, source: DraftVocabularyDrafter(SMALL, sampling, source, (3, 0, 2)),
    "sparse siblings": lambda sampling, source: DraftVocabularyDrafter(SMALL, sampling, source, (2, 1, 3), width=2),
    "n-grams": lambda sampling, source: NGramDrafter(3, "multi", 2),
    "n-grams, random": lambda sampling, source: NGramDrafter(3, "one", random_below=VOCAB),
    "tree": lambda sampling, source: TreeDrafter(
        ModelScorer(SMALL.score, VOCAB), sampling, source, VOCAB, nodes=4, width=2
    ),
    "lookahead": lambda sampling, source: LookaheadDrafter(window=1, n=2, guesses=2),
    "suffix": lambda sampling, source: SuffixDrafter(),
    "lookup": lambda sampling, source: LookupDrafter(),
    "hybrid": lambda sampling, source: HybridDrafter(
        SuffixDrafter(), ModelDrafter(SMALL.score, sampling, source, VOCAB), trusted=2
    ),
    "head": head,
    "hybrid with a head": lambda sampling, source: HybridDrafter(SuffixDrafter(), head(sampling, source), trusted=2),
    "tree of a head": lambda sampling, source: TreeDrafter(
        TableHead(SMALL, (0, 2, 3)), sampling, source, VOCAB, nodes=4, width=2
    ),
    "universal": universal,
    "guesses": lambda sampling, source: GuessDrafter(VOCAB),
    "guessed forest": lambda sampling, source: GuessDrafter(VOCAB, width=2),
}
FORESTS = ("siblings", "sparse siblings", "tree", "tree of a head", "lookahead", "guessed forest")


@lru_cache(maxsize=16)
def enumerated(sampling: SamplingParams, rule: Any, candidates: int = 2) -> EnumeratedVerifier:
    """Return a verifier that remembers its verdicts for all tests with these parameters."""
    explorer = Explorer()
    return EnumeratedVerifier(ModelVerifier(TARGET.score, sampling, rule, explorer, explorer, candidates), explorer)


def enumerate_distribution(
    sampling: SamplingParams,
    make: Make,
    rule: Any = rejection,
    length: int = 3,
    gamma: int = 2,
    stop: Sequence[int] = (),
    candidates: int = 2,
    each_run: bool = False,
) -> tuple[dict[tuple[int, ...], float], int, int]:
    """Return the distribution of outputs, and the drafted and accepted tokens over all branches.

    `each_run`: verify the same draft again in each run.
    """
    drafted = accepted = 0
    remembering = enumerated(sampling, rule, candidates)
    explorer = remembering.explorer
    verifier = remembering.verifier if each_run else remembering

    def once() -> tuple[int, ...]:
        nonlocal drafted, accepted
        steps = run(PROMPT, verifier, make(sampling, explorer), Fixed(gamma), length, stop)
        drafted += sum(len(step.draft) for step in steps)
        accepted += sum(len(step.verdict.accepted) for step in steps)
        return tuple(committed(steps))

    return explorer.distribution(once), drafted, accepted
