"""Beam search as a judge: a search for a probable text instead of a draw from the target's law.

The beams past the last committed token are a forest, so one pass of the target scores them all over one text's keys
and values. A token is committed once every beam and every finished hypothesis has it, and is never taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Verdict


@dataclass(frozen=True)
class Beam:
    """Tokens after the prompt, and the sum of their log-probabilities (of a finished one: after the length penalty)."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """Keeps the `num_beams` most probable continuations, to the rules of transformers' beam search.

    Finished hypotheses compete by log p(text) / length ** `length_penalty`; the search ends when no running beam at its
    present length could beat the worst of `num_beams` of them, or at `max_tokens` (or the model's `context`). Per beam
    only its `top_k` best tokens count (0: all), and none of `stop` before `min_length` tokens. Of `sampling` the steps that
    look back apply; there is no temperature in a search. Serves one prompt.
    """

    def __init__(
        self,
        score: Callable[[Sequence[int], Draft], Tensor],
        sampling: SamplingParams,
        stop: Collection[int],
        *,
        max_tokens: int,
        context: int,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        top_k: int = 0,
        min_length: int = 0,
    ) -> None:
        self._score, self._sampling, self._stop = score, sampling, frozenset(stop)
        self._max_tokens, self._context = max_tokens, context
        self._num_beams, self._length_penalty = num_beams, length_penalty
        self._top_k, self._min_length = top_k, min_length
        self._prompt: int | None = None  # its length
        self._running = [Beam((), 0.0)]
        self._finished: list[Beam] = []  # best first

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """One token more for every beam, and what is certain by now. `draft` is empty: beams are not drafted."""
        if self._prompt is None:
            self._prompt = len(tokens)
        held = len(tokens) - self._prompt
        over = self._grow(tokens, held)
        if over:
            return Verdict((), None, committed=self._finished[0].tokens[held:])
        alive = [beam.tokens[held:] for beam in (*self._running, *self._finished)]
        columns = zip(*alive, strict=False)
        certain = next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, alive)))
        return Verdict((), None, committed=alive[0][:certain], pending=alive[0][certain:])

    def _grow(self, tokens: Sequence[int], held: int) -> bool:
        """One token more for every beam; whether the search is over."""
        assert self._prompt is not None
        forest, leaves = self._forest(held)
        logits = self._score(tokens, forest)[torch.tensor(leaves) + 1]
        texts = [[*tokens, *beam.tokens[held:]] for beam in self._running]
        probs = self._sampling.process_logits(logits.float().log_softmax(-1), texts)  # [beams, vocab]
        length = len(self._running[0].tokens) + 1
        if length <= self._min_length:
            probs = probs.index_fill(-1, torch.tensor(sorted(self._stop), device=probs.device), -torch.inf)
        if 0 < self._top_k < probs.shape[-1]:
            probs = probs.masked_fill(probs < probs.topk(self._top_k).values[:, -1:], -torch.inf)
        sums = (probs + probs.new_tensor([beam.score for beam in self._running])[:, None]).flatten()
        # Even if each stop token ends each beam there are beams left to go on with.
        best = sums.topk(min(len(sums), max(2, 1 + len(self._stop)) * self._num_beams))
        grown = [
            Beam((*self._running[index // probs.shape[-1]].tokens, index % probs.shape[-1]), score)
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if score > -torch.inf
        ]
        last = length >= min(self._max_tokens, self._context - self._prompt)
        ended = [last or beam.tokens[-1] in self._stop for beam in grown]
        penalty = length**self._length_penalty
        self._finished += [
            Beam(beam.tokens, beam.score / penalty)
            for beam, end in zip(grown[: self._num_beams], ended, strict=False)
            if end
        ]
        self._finished = sorted(self._finished, key=lambda beam: -beam.score)[: self._num_beams]
        self._running = [beam for beam, end in zip(grown, ended, strict=True) if not end][: self._num_beams]
        if not self._running:
            return True
        full = len(self._finished) == self._num_beams
        return full and self._running[0].score / penalty <= self._finished[-1].score

    def _forest(self, held: int) -> tuple[Draft, list[int]]:
        """The running beams past the first `held` tokens as a forest, level by level, and the node of each one's end.

        All but the last level stood in the forest before, so a model that keeps nodes is fed one per beam.
        """
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        at = [-1] * len(self._running)
        for i in range(held, len(self._running[0].tokens)):
            for b, beam in enumerate(self._running):
                at[b] = nodes.setdefault((at[b], beam.tokens[i]), len(nodes))
        return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)), at
