"""Loss on the target's distribution and acceptance on held-out answers, for all kinds of heads.

Row t of step i predicts token t + 2 + i, so that its reference is the target's distribution at t + 1 + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.head.conversations import Batch, Conversation, padded
from training.head.kind import DraftHead
from training.head.target import Target

DECAY = 0.8  # of the weight per step
OVERLAP_WEIGHT = 1.0
BLOCK = 256  # rows
TOP = 1024  # most probable tokens among which top-p selects


@dataclass(frozen=True)
class Rows:
    """Positions of a batch whose next token belongs to an answer, with the target's final states there."""

    window: Tensor
    position: Tensor
    final: Tensor

    def of(self, states: Tensor, step: int) -> Tensor:
        """Return the rows of `states` that predict the same tokens in `step`."""
        return states[self.window, self.position - 1 - step]


def states_of(head: DraftHead, target: Target, batch: Batch, steps: int) -> tuple[list[Tensor], Rows]:
    """Return the head's states of each step and the rows to compare. Answers begin after more than `steps` tokens."""
    device = target.embeddings.device
    tokens = torch.from_numpy(batch.tokens).to(device)
    states = target.states(tokens)
    window, position = torch.from_numpy(batch.answers[:, 1:]).nonzero(as_tuple=True)
    drafted = head(states.taps, tokens, target.embeddings, steps)
    return drafted, Rows(window, position, states.final[window, position])


def loss(head: DraftHead, target: Target, steps: int, batch: Batch) -> Tensor:
    """Return the mean over rows and steps of cross entropy and rejection rate 1 - sum min(p, q).

    p is normalised over the full vocabulary, so that rows count less where the draft vocabulary covers less. Gradients
    of the head's states are computed in blocks of rows that fit into the processor's cache.
    """
    with torch.autocast(target.embeddings.device.type, torch.bfloat16):
        drafted, rows = states_of(head, target, batch, steps)
        compared = [rows.of(states, i) for i, states in enumerate(drafted)]
        leaves = [states.detach().requires_grad_() for states in compared]
        output = target.output[head.vocabulary]
        scale = len(rows.final) * sum(DECAY**i for i in range(steps))
        value = 0.0
        for block in torch.arange(len(rows.final), device=output.device).split(BLOCK):
            with torch.no_grad():
                total = F.linear(rows.final[block], target.output).float().logsumexp(-1, keepdim=True)
                p = (F.linear(rows.final[block], output).float() - total).exp()
            part = torch.zeros((), device=p.device)
            for i, states in enumerate(leaves):
                q = head.logits(states[block], output).float().log_softmax(-1)
                overlap = torch.minimum(p, q.exp()).sum(-1)
                part = part - DECAY**i * ((p * q).sum() + OVERLAP_WEIGHT * overlap.sum())
            (part / scale).backward()
            value += part.item() / scale
    linear = sum((states * leaf.grad).sum() for states, leaf in zip(compared, leaves, strict=True))
    return linear + (value + OVERLAP_WEIGHT - linear.detach())


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rate by position, given that all earlier ones were accepted, and mean tokens per pass by gamma."""

    rates: list[float]
    tokens: dict[int, float]


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the distribution after temperature and top-p; one-hot at temperature 0."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        values, ids = probabilities.topk(min(TOP, logits.shape[-1]), -1)
        values = values * (values.cumsum(-1) - values < top_p)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, ids, values)
    return probabilities / probabilities.sum(-1, keepdim=True)


@torch.no_grad()
def chances(
    head: DraftHead, target: Target, item: Conversation, steps: int, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """Return, per row and step, sum min(p, q) and the ratio min(1, q(x) / p(x)) of the text's token x."""
    with torch.autocast(target.embeddings.device.type, torch.bfloat16):
        drafted, rows = states_of(head, target, padded([item]), steps)
        following = torch.from_numpy(item.tokens.astype(np.int64))[rows.position.cpu() + 1].to(rows.position.device)
        p = distribution(F.linear(rows.final, target.output).float(), temperature, top_p)
        overlap, ratio = [], []
        for i, states in enumerate(drafted):
            logits = head.logits(rows.of(states, i), target.output[head.vocabulary]).float()
            q = torch.zeros_like(p)
            q[:, head.vocabulary] = distribution(logits, temperature, top_p)
            overlap.append(torch.minimum(p, q).sum(-1))
            px, qx = (x.gather(1, following[:, None])[:, 0] for x in (p, q))
            ratio.append(torch.where(px > 0, qx / px, 0).clamp(max=1))
    return torch.stack(overlap, 1).float().cpu(), torch.stack(ratio, 1).float().cpu()


def acceptance(
    head: DraftHead,
    target: Target,
    conversations: Sequence[Conversation],
    temperature: float,
    top_p: float = 1.0,
    steps: int = 5,
) -> Acceptance:
    """Evaluate drafts from all positions of answers that were chosen at `temperature` and `top_p`.

    An accepted token has the distribution min(p, q) and the text's token the distribution p, hence the text is
    weighted by min(1, q / p).
    """
    accepted, reached, starts = torch.zeros(steps), torch.zeros(steps), 0
    for item in conversations:
        overlap, ratio = chances(head, target, item, steps, temperature, top_p)
        edges = np.flatnonzero(np.diff(item.answers[1:].astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        first = 0
        for size in (end - begin for begin, end in edges):
            drafts = max(0, size - steps + 1)
            diagonal = torch.arange(drafts)[:, None] + torch.arange(steps)  # step i is compared i rows later
            rows, columns = first + diagonal, torch.arange(steps).expand_as(diagonal)
            weight = torch.ones(drafts, steps)
            weight[:, 1:] = ratio[rows, columns].cumprod(1)[:, :-1]
            accepted += (weight * overlap[rows, columns]).sum(0)
            reached += weight.sum(0)
            starts, first = starts + drafts, first + size
    gained = (accepted / starts).cumsum(0)
    return Acceptance((accepted / reached).tolist(), {gamma: 1 + gained[gamma - 1].item() for gamma in (3, steps)})
