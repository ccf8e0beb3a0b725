"""Loss of drafts on the target's distribution.

Row t of step i predicts token t + 2 + i, so that its reference is the target's distribution at t + 1 + i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.head.conversations import Batch
from training.head.eagle3 import Eagle3
from training.head.target import Target

DECAY = 0.8  # of the weight per step
OVERLAP_WEIGHT = 1.0
BLOCKS = {"cpu": 256, "cuda": 4096}  # rows; those of a processor fit into its cache


@dataclass(frozen=True)
class Rows:
    """Positions of a batch whose next token belongs to an answer, with its weight and the target's final state."""

    window: Tensor
    position: Tensor
    weight: Tensor
    final: Tensor

    def of(self, states: Tensor, step: int) -> Tensor:
        """Return the rows of `states` that predict the same tokens in `step`."""
        return states[self.window, self.position - 1 - step]


def states_of(head: Eagle3, target: Target, batch: Batch, steps: int) -> tuple[list[Tensor], Rows]:
    """Return the head's states of each step and the rows to compare. Answers begin after more than `steps` tokens."""
    device = target.embeddings.device
    tokens, weights = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.weights))
    states = target.states(tokens)
    window, position = weights[:, 1:].nonzero(as_tuple=True)
    drafted = head(states.taps, tokens, target.embeddings, steps)
    return drafted, Rows(window, position, weights[window, position + 1], states.final[window, position])


def loss(head: Eagle3, target: Target, steps: int, batch: Batch) -> Tensor:
    """Return the weighted mean over rows and steps of cross entropy and rejection rate 1 - sum min(p, q).

    p is normalised over the full vocabulary, so that rows count less where the draft vocabulary covers less. Gradients
    of the head's states are computed in blocks of rows.
    """
    device = target.embeddings.device.type
    with torch.autocast(device, torch.bfloat16):
        drafted, rows = states_of(head, target, batch, steps)
        compared = [rows.of(states, i) for i, states in enumerate(drafted)]
        leaves = [states.detach().requires_grad_() for states in compared]
        output = target.output[head.vocabulary]
        scale = rows.weight.sum() * sum(DECAY**i for i in range(steps))
        value = torch.zeros((), device=output.device)
        for block in torch.arange(len(rows.final), device=output.device).split(BLOCKS[device]):
            with torch.no_grad():
                total = F.linear(rows.final[block], target.output).float().logsumexp(-1, keepdim=True)
                p = (F.linear(rows.final[block], output).float() - total).exp()
            part = torch.zeros((), device=output.device)
            for i, states in enumerate(leaves):
                q = F.linear(states[block], output).float().log_softmax(-1)
                gained = (p * q).sum(-1) + OVERLAP_WEIGHT * torch.minimum(p, q.exp()).sum(-1)
                part = part - DECAY**i * (rows.weight[block] * gained).sum()
            (part / scale).backward()
            value += part.detach() / scale
    linear = sum((states * leaf.grad).sum() for states, leaf in zip(compared, leaves, strict=True))
    return linear + (value + OVERLAP_WEIGHT - linear.detach())
