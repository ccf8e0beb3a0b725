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


ChainOutput = tuple[Tensor, Tensor]  # token, largest logit and probability of each position; distributions


def chain_output(
    shape: ChainShape,
    arrivals: Tensor,
    first: Callable[[], Tensor],
    following: Callable[[Tensor, int], Tensor],
    ids: Tensor | None = None,
) -> ChainOutput:
    """Sample a chain without host synchronisation.

    `first()` returns raw logits `[1, size]`, `following(token, i)` those after token i, `[1]`. `ids`: the tokens of the
    logits.
    """
    drawn = []
    distributions = []
    logits = first()
    for i, row in enumerate(arrivals):
        if ids is None:
            logits = fitted(logits, shape.vocab_size)
        token, probs, values = shape.sampling.draw(logits.float(), row)
        token = token if ids is None else ids.index_select(0, token)
        drawn.append(torch.cat((token[:, None].float(), values), 1))  # exact in float32 below 2^24
        distributions.append(probs)
        if i + 1 < len(arrivals):
            logits = following(token, i)
    return torch.cat(drawn), torch.cat(distributions)


def replay_chain(
    recording: Recording[ChainOutput], values: Sequence[Tensor], sampler: ChainSampler, count: int, size: int
) -> list[int] | None:
    """Draft `count` tokens with a recording of `chain_output`, whose last input are the random numbers.

    The transfer of the tokens is the only host synchronisation.
    """
    *_, arrivals = recording.inputs
    if not sampler.write_arrivals(arrivals[:count, :size]):
        return None
    drawn, distributions = recording.replay([*values, arrivals])
    tokens, largest, token_probs = drawn[:count].T.tolist()
    if sampler.sampling.temperature == 0:
        sampler.record(largest, [], None)
    else:
        sampler.record(largest, token_probs, distributions[:count, :size].clone())
    return [int(token) for token in tokens]
