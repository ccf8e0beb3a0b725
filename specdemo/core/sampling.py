"""Logits to laws, and draws from laws.

A law is a probability distribution over the vocabulary; greedy decoding is a law too, a point mass. The same `SamplingParams`
serves target and drafter, so that p and q differ by the models alone. Knows tensors and token ids.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.step import TopTokens

TOP_P_FIRST = 256  # tokens among which top-p looks first


@dataclass(frozen=True, slots=True)
class PointMass:
    """A law that is all on one token, as at temperature 0: without the zeros of all the others."""

    token: int


@dataclass(frozen=True)
class SamplingParams:
    """What is done to logits before they are a law, in the order of transformers.

    Repetition penalty, bad words, temperature, top-k, top-p. Temperature 0 is the point mass on the largest logit.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed

    @property
    def needs_paths(self) -> bool:
        """Whether a row's law depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or bool(self.bad_words)

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Laws `[rows, vocab]` from raw logits: `probs(adjust(logits, paths))`."""
        return self.logits_to_probs(self.process_logits(logits, paths))

    def process_logits(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Float32 logits `[rows, vocab]` after the steps that look back: penalty, then bad words.

        `paths[r]` holds all tokens before row r (prompt included); it is read only if `needs_paths`. Raises `UserError`
        where a row has no largest finite logit: a model that has gone wrong must never emit a token.
        """
        logits = logits.float()
        refuse_broken(logits.amax(-1).tolist())
        if not self.needs_paths:
            return logits
        return torch.stack([self._before(row, path) for row, path in zip(logits, paths, strict=True)])

    def logits_to_probs(self, logits: Tensor) -> Tensor:
        """Laws `[rows, vocab]` from adjusted logits: temperature, top-k, top-p, softmax."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(-1)
        return probs if self.top_p >= 1.0 else self._nucleus(probs)

    def _nucleus(self, probs: Tensor) -> Tensor:
        """The smallest set of likeliest tokens with a mass of `top_p`, renormalised (1904.09751)."""
        width, vocab = TOP_P_FIRST, probs.shape[-1]
        while True:  # sorting all of a law is dear, and rarely called for
            mass, order = probs.topk(min(width, vocab))
            total = mass.cumsum(-1)
            if width >= vocab or not bool((total[..., -1] < self.top_p).any()):
                break
            width *= 4
        mass = mass * (total - mass < self.top_p)  # the token that crosses top_p stays, and so always the first
        return torch.zeros_like(probs).scatter_(-1, order, mass / mass.sum(-1, keepdim=True))

    def _before(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """The steps that look at the tokens before: repetition penalty (CTRL, 1909.05858), then bad words."""
        if self.repetition_penalty != 1.0 and len(path):
            seen = torch.tensor(sorted(set(path)), device=logits.device)
            old = logits[seen]
            new = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
            logits = logits.index_put((seen,), new)
        banned = [
            word[-1] for word in self.bad_words if len(word) == 1 or tuple(path[1 - len(word) :]) == tuple(word[:-1])
        ]
        if banned:
            logits = logits.index_fill(0, torch.tensor(banned, device=logits.device), -torch.inf)
            if not torch.isfinite(logits.amax()):
                raise UserError("bad words leave no token to choose from: ban fewer")
        return logits


def refuse_broken(largest: Sequence[float]) -> None:
    """Raise `UserError` unless every one of the rows' largest logits is a finite number."""
    if not all(map(math.isfinite, largest)):
        raise UserError("the model gave NaN or infinite logits: try dtype float32, or another checkpoint")


def top_tokens(distributions: Tensor, count: int) -> tuple[TopTokens, ...]:
    """Entropy and the `count` likeliest tokens of each of `distributions` `[rows, vocab]`; tokens without mass are left out."""
    entropy = torch.special.entr(distributions).sum(-1).tolist()
    mass, tokens = distributions.topk(min(count, distributions.shape[-1]))
    return tuple(
        TopTokens(h, tuple((t, p) for t, p in zip(*row, strict=True) if p > 0))
        for h, row in zip(entropy, zip(tokens.tolist(), mass.tolist(), strict=True), strict=True)
    )


class Noise:
    """One stream of random numbers, reproducible from a seed and the stream's name.

    Draft, acceptance and correction draws must be independent, so each takes a stream of its own name.
    """

    def __init__(self, seed: int, stream: str) -> None:
        self._seed = random.Random(f"{seed}/{stream}").getrandbits(63)
        self._uniform = random.Random(self._seed)
        self._generators: dict[torch.device, torch.Generator] = {}

    def test(self, probability: float) -> tuple[bool, float]:
        """Whether an event of this probability happens, and the uniform number in [0, 1) that decided it."""
        u = self._uniform.random()
        return u < probability, u

    def draw(self, probs: Tensor, place: int = 0) -> int:
        """A token from `probs` `[vocab]`; the next one of the stream, at whatever place."""
        return int(self.pick(probs, place))

    def pick(self, probs: Tensor, place: int = 0) -> Tensor:
        """The same, left on the device: `[1]`."""
        return self._invert(probs) if probs.device.type == "cpu" else self._race(probs)

    def _invert(self, probs: Tensor) -> Tensor:
        """The token at which the cumulative law passes a uniform number: one random number, the fastest on a CPU."""
        mass = probs.cumsum(0, dtype=torch.float64)
        token = torch.searchsorted(mass, self._uniform.random() * mass[-1:], right=True)
        return token if token < len(probs) else probs.nonzero()[-1]  # a product that was rounded up to the total

    def _race(self, probs: Tensor) -> Tensor:
        """The largest of p / Exp(1): no cumulative sum, and nothing that the host has to wait for."""
        device = probs.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        waiting = torch.empty_like(probs).exponential_(generator=self._generators[device])
        return (probs / waiting).argmax(-1, keepdim=True)


class SharedNoise:
    """Noise keyed by place, for a drafter and a target that draw alike (2408.07978, Gumbel coupling).

    Both take the largest of p / E, E exponential and the same for both at one place of the text: a token that one draws
    the other draws too, as far as their laws agree, and the text depends on the target's law and the seed alone. The
    noise is made on the CPU, so that it is the same on every device.
    """

    def __init__(self, seed: int, memory: int = 128) -> None:
        self._seed, self._memory = seed, memory
        self._waiting: dict[int, Tensor] = {}

    def draw(self, probs: Tensor, place: int) -> int:
        """The token of `probs` `[vocab]` that the noise at this place picks."""
        return int(self.pick(probs, place))

    def pick(self, probs: Tensor, place: int) -> Tensor:
        """The same, left on the device: `[1]`."""
        if place not in self._waiting:
            if len(self._waiting) >= self._memory:
                del self._waiting[next(iter(self._waiting))]
            key = random.Random(f"{self._seed}/{place}").getrandbits(63)
            self._waiting[place] = torch.empty(len(probs)).exponential_(generator=torch.Generator().manual_seed(key))
        return (probs / self._waiting[place].to(probs.device, non_blocking=True)).argmax(-1, keepdim=True)
