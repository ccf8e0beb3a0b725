"""Drafts of several tokens as one CUDA graph, with their sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdemo.core.sampling import ChainSampler, SamplingParams, fitted
from specdemo.models.engines.cuda_graphs import Recording


@dataclass(frozen=True)
class ChainShape:
    """Chains of a run: most tokens, sampling parameters, and size of the vocabulary they are sampled from."""

    length: int
    sampling: SamplingParams
    vocab_size: int

    @classmethod
    def of(cls, sampler: ChainSampler, length: int) -> ChainShape:
        return cls(length, sampler.sampling, sampler.vocab_size)

    def arrivals(self, size: int, device: torch.device) -> Tensor:
        """Return a buffer of random numbers, see `ChainSampler.write_arrivals`."""
        return torch.ones(self.length, size, dtype=torch.float32, device=device)


# By position: token, largest logit, probability of the token, largest probability of raw logits; distributions
ChainOutput = tuple[Tensor, Tensor]


def chain_output(
    shape: ChainShape,
    arrivals: Tensor,
    state: Tensor,
    following: Callable[[Tensor, Tensor, int], Tensor],
    output: Callable[[Tensor], Tensor],
    ids: Tensor | None = None,
) -> ChainOutput:
    """Sample a chain without host synchronisation.

    `output(state)` returns raw logits `[1, size]`, `following(state, token, i)` the state after token i, `[1]`. `ids`:
    the tokens of the logits.
    """
    drawn = []
    distributions = []
    for i, row in enumerate(arrivals):
        logits = output(state)
        if ids is None:
            logits = fitted(logits, shape.vocab_size)
        token, probs, values = shape.sampling.draw(logits.float(), row)
        token = token if ids is None else ids.index_select(0, token)
        largest = logits.softmax(1).amax(1, keepdim=True)
        drawn.append(torch.cat((token[:, None].float(), values, largest), 1))  # exact in float32 below 2^24
        distributions.append(probs)
        if i + 1 < len(arrivals):
            state = following(state, token, i)
    return torch.cat(drawn), torch.cat(distributions)


def replay_chain(
    recording: Recording[ChainOutput],
    values: Sequence[Tensor],
    sampler: ChainSampler,
    size: int,
    limits: Sequence[float],
) -> list[int] | None:
    """Draft up to `len(limits)` tokens with a recording of `chain_output`, whose last input are the random numbers.

    `limits`: see `DraftScorer.sample_chain`; the recorded chain goes on, and its further tokens are not used. The
    transfer of the tokens is the only host synchronisation.
    """
    *_, arrivals = recording.inputs
    count = len(limits)
    if not sampler.write_arrivals(arrivals[:count, :size]):
        return None
    drawn, distributions = recording.replay(values)
    tokens, largest, token_probs, path = drawn[:count].T.tolist()
    length = _probable(path, limits)
    sampler.keep(length)
    if sampler.sampling.temperature == 0:
        sampler.record(largest[: max(1, length)], [], None)
    else:
        sampler.record(largest[: max(1, length)], token_probs[:length], distributions[:length, :size].clone())
    return [int(token) for token in tokens[:length]]


def _probable(largest: Sequence[float], limits: Sequence[float]) -> int:
    """Return the number of tokens before `PathProbability` with these `limits` ends the path."""
    product = 1.0
    for length, (probability, limit) in enumerate(zip(largest, limits, strict=True)):
        if product * product < limit:
            return length
        product *= probability
        if product < limit:
            return length
    return len(largest)
