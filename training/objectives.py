"""Losses and test figures: prediction for the target, agreement with the target for drafters, greedy loops."""

from __future__ import annotations

from collections.abc import Iterable

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


def agreement(drafters: Iterable[LlamaForCausalLM], target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the distillation loss, summed over drafters: KL(p || q) plus `REJECTION_WEIGHT` times 1 - beta.

    The second term is the total-variation loss of DistillSpec (2310.08461). All drafters share a pass of the target.
    """
    with torch.no_grad():
        p = logits(target, ids).log_softmax(-1)
        weight = p.exp()
    total = torch.zeros((), device=ids.device)
    for drafter in drafters:
        q = logits(drafter, ids).log_softmax(-1)
        divergence = (weight * (p - q)).sum(-1).mean()
        overlap = torch.minimum(weight, q.exp()).sum(-1).mean()
        total = total + divergence + REJECTION_WEIGHT * (1.0 - overlap)
    return total


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
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int, windows: int) -> float:
    """Return the mean cross entropy, in nats per token, over evenly spaced windows of `length` tokens."""
    model.eval()
    starts = np.linspace(0, len(tokens) - length, windows).astype(int)
    losses = []
    for start in starts:
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))[None].to(model.device)
        losses.append(prediction(model, ids).item())
    return float(np.mean(losses))


@torch.no_grad()
def held_out_agreement(
    drafter: LlamaForCausalLM, target: LlamaForCausalLM, tokens: np.ndarray, length: int, windows: int
) -> tuple[float, float]:
    """Return the mean of sum min(p, q) at temperature 1 and the share of equal first choices, on test text."""
    drafter.eval()
    starts = np.linspace(0, len(tokens) - length, windows).astype(int)
    overlap, first = [], []
    for start in starts:
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))[None].to(target.device)
        p, q = logits(target, ids), logits(drafter, ids)
        overlap.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item())
        first.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    return float(np.mean(overlap)), float(np.mean(first))


@torch.no_grad()
def held_out_loops(model: LlamaForCausalLM, tokens: np.ndarray, prompts: int) -> float:
    """Return the share of greedy continuations (256 tokens after 64 tokens of test text) that end in a loop."""
    model.eval()
    starts = np.linspace(0, len(tokens) - 64, prompts).astype(int)
    ids = torch.from_numpy(np.stack([tokens[start : start + 64] for start in starts]).astype(np.int64)).to(model.device)
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=256,
        min_new_tokens=256,
        pad_token_id=0,
    )
    return loops(text)[:, -1].float().mean().item()
