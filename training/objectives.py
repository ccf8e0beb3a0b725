"""Losses: prediction for the target, agreement with the target for drafters, greedy loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


def _autocast(model: LlamaForCausalLM) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16)


def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return next-token logits `[size, length - 1, vocab]` in float32, computed in bfloat16."""
    with _autocast(model):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return model.lm_head(hidden).float()


def prediction(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the cross entropy in nats per token."""
    return F.cross_entropy(logits(model, ids).flatten(0, 1), ids[:, 1:].flatten())


REJECTION_WEIGHT = 3.0  # in `agreement`


def agreement(drafter: LlamaForCausalLM, target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the distillation loss KL(p || q) plus `REJECTION_WEIGHT` times 1 - beta.

    The second term is the total-variation loss of DistillSpec (2310.08461).
    """
    with torch.no_grad():
        p = logits(target, ids).log_softmax(-1)
        weight = p.exp()
    q = logits(drafter, ids).log_softmax(-1)
    divergence = (weight * (p - q)).sum(-1).mean()
    return divergence + REJECTION_WEIGHT * (1.0 - torch.minimum(weight, q.exp()).sum(-1).mean())


def loops(tokens: Tensor, longest: int = 32, least: int = 8) -> Tensor:
    """Return a mask `[size, n]` of the tokens that continue a loop.

    A token continues a loop of period k if it and its predecessors, at least max(k, `least`) tokens, equal the tokens k
    positions before. Repetition after other text is not a loop: it is common in code.
    """
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    for k in range(1, longest + 1):
        same = torch.zeros_like(mask)
        same[:, k:] = tokens[:, k:] == tokens[:, :-k]
        broken = torch.where(same, -1, steps)  # the length of a run is the distance to the last difference
        run = steps - broken.cummax(1).values
        mask |= run >= max(k, least)
    return mask


def without_loops(
    model: LlamaForCausalLM, before: LlamaForCausalLM, ids: Tensor, prompts: int = 12, given: int = 64, new: int = 144
) -> Tensor:
    """Return KL(before || model) on the text plus the unlikelihood of continuing loops in greedy continuations.

    Sequence-level unlikelihood (Welleck et al., 1908.04319), restricted to loops. The KL term to the original model
    `before` costs less loss than training on the text with few batches.
    """
    starts = ids.reshape(-1, given)[:: max(1, ids.numel() // given // prompts)][:prompts]
    model.eval()
    with torch.no_grad(), _autocast(model):
        text = model.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )
    model.train()
    looping = loops(text)[:, given:]
    probs = logits(model, text)[:, given - 1 :].log_softmax(-1)
    chosen = probs.gather(-1, text[:, given:, None])[..., 0].exp()
    unlikelihood = -torch.log1p(-chosen.clamp(max=1 - 1e-5))
    with torch.no_grad():
        p = logits(before, ids).log_softmax(-1)
    divergence = (p.exp() * (p - logits(model, ids).log_softmax(-1))).sum(-1).mean()
    return divergence + (unlikelihood * looping).sum() / looping.numel()


@torch.no_grad()
def held_out(loss: Callable[[Tensor], Tensor], tokens: np.ndarray, device: str, length: int, windows: int) -> float:
    """Return the mean of `loss` over evenly spaced windows of test text."""
    starts = np.linspace(0, len(tokens) - length, windows).astype(int)
    rows = np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)
    return float(np.mean([loss(ids[None]).item() for ids in torch.from_numpy(rows).to(device)]))
