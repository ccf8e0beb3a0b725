"""Drafts of several tokens as one CUDA graph, with their sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft, fitted
from specdemo.models.engines.cuda_graphs import Recording, on_device, recorded_event


@dataclass(frozen=True)
class ChainShape:
    """Chains of a run: most tokens, sampling parameters, and size of the vocabulary they are sampled from."""

    length: int
    sampling: SamplingParams
    vocab_size: int

    @classmethod
    def of(cls, sampler: ChainSampler, length: int) -> ChainShape:
        return cls(length, sampler.sampling, sampler.vocab_size)

    def buffers(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffers of limits and of random numbers, see `ChainSampler.write_exp_noise`."""
        limits = torch.zeros(self.length, 1, dtype=torch.float64, device=device)
        return limits, torch.ones(self.length, size, dtype=torch.float32, device=device)


class ChainOutput(NamedTuple):
    """Tensors of `UnreadDraft`."""

    ids: Tensor
    values: Tensor
    rows: Tensor


def chain_output(
    shape: ChainShape,
    limits: Tensor,
    exp_noise: Tensor,
    state: Tensor,
    following: Callable[[Tensor, Tensor, int], Tensor],
    output: Callable[[Tensor], Tensor],
    ids: Tensor | None = None,
) -> ChainOutput:
    """Sample a chain without host synchronisation.

    `output(state)` returns raw logits `[1, size]`, `following(state, token, i)` the state after token i, `[1]`. `ids`:
    the tokens of the logits. `limits` `[length, 1]` and `exp_noise`: see `replay_chain`.
    """
    tokens: list[Tensor] = []
    values: list[Tensor] = []
    rows: list[Tensor] = []
    largest: list[Tensor] = []
    for i, row in enumerate(exp_noise):
        logits = output(state)
        if ids is None:
            logits = fitted(logits, shape.vocab_size)
        index, probs, drawn = shape.sampling.draw(logits.float(), row)
        tokens.append(index if ids is None else ids.index_select(0, index))
        values.append(drawn)
        rows.append(probs)
        largest.append(logits.softmax(1).amax(1, keepdim=True))
        if i + 1 < len(exp_noise):
            state = following(state, tokens[-1], i)
    chain, included = torch.cat(tokens), _before_end(torch.cat(largest), limits)
    floats = chain[:, None].float()  # exact below 2^24
    return ChainOutput(chain, torch.cat((floats, torch.cat(values), included), 1), torch.cat(rows) * included)


def _before_end(largest: Tensor, limits: Tensor) -> Tensor:
    """Return 1 for the tokens before `PathProbability` with these `limits` ends the path, 0 for others, `[length, 1]`.

    `largest`: largest probabilities `[length, 1]`.
    """
    path = largest.double().cumprod(0)
    before = pad(path[:-1], (0, 0, 1, 0), value=1.0)
    ends = (before * before < limits) | (path < limits)
    return ends.logical_not().float().cumprod(0)


def replay_chain(
    recording: Recording[ChainOutput],
    values: Sequence[Tensor],
    sampler: ChainSampler,
    size: int,
    limits: Sequence[float],
) -> UnreadDraft | None:
    """Draft up to `len(limits)` tokens with a recording of `chain_output`, whose last inputs are its buffers.

    `limits`: see `DraftScorer.sample_chain`; the recorded chain goes on, and its further tokens are not used.
    """
    *_, least, exp_noise = recording.inputs
    count, device = len(limits), exp_noise.device
    started = recorded_event(device)
    if not sampler.write_exp_noise(exp_noise[:count, :size]):
        return None
    least[:count, 0].copy_(on_device(limits, device, torch.float64))
    ids, drawn, rows = recording.replay(values)
    return UnreadDraft(sampler, ids[:count], drawn[:count], rows[:count, :size], started, recorded_event(device))
