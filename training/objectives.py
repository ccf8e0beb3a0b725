"""What the two models are trained to do: the target to predict text, the drafter to agree with the target."""

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
    """Next-token logits `[size, length - 1, vocab]` in float32, computed in bfloat16."""
    with _autocast(model):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return model.lm_head(hidden).float()


def prediction(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Cross entropy in nats per token."""
    return F.cross_entropy(logits(model, ids).flatten(0, 1), ids[:, 1:].flatten())


def agreement(drafters: Iterable[LlamaForCausalLM], target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Distillation: KL(p || q), which learns everywhere, plus 1 - beta, which is the rejection rate itself.

    The second term is the total-variation loss of DistillSpec (2310.08461): what is minimised is what is paid for.
    Several drafters learn from one pass of the target, each by itself: the sum of their losses.
    """
    with torch.no_grad():
        p = logits(target, ids).log_softmax(-1)
        weight = p.exp()
    total = torch.zeros((), device=ids.device)
    for drafter in drafters:
        q = logits(drafter, ids).log_softmax(-1)
        divergence = (weight * (p - q)).sum(-1).mean()
        overlap = torch.minimum(weight, q.exp()).sum(-1).mean()
        total = total + divergence + 3.0 * (1.0 - overlap)
    return total


def loops(tokens: Tensor, longest: int = 32, least: int = 8) -> Tensor:
    """Which of `tokens` `[size, n]` only go on with a loop, as a mask of that shape.

    A token does if it and the tokens before it repeat what stood k places earlier, for at least k and `least` tokens.
    Repetition that a text comes back to after something else is none: code is full of it.
    """
    found = torch.zeros_like(tokens, dtype=torch.bool)
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    for k in range(1, longest + 1):
        same = torch.zeros_like(found)
        same[:, k:] = tokens[:, k:] == tokens[:, :-k]
        broken = torch.where(same, -1, steps)  # a run's length is the distance to the last place that differed
        run = steps - broken.cummax(1).values
        found |= run >= max(k, least)
    return found


def without_loops(
    model: LlamaForCausalLM, before: LlamaForCausalLM, ids: Tensor, prompts: int = 12, given: int = 64, new: int = 144
) -> Tensor:
    """KL(before || model) on the text, and on the model's own greedy continuations the unlikelihood of a loop going on.

    Sequence-level unlikelihood (Welleck et al. 1908.04319), but on loops only instead of on every repeated n-gram.
    Staying with `before`, the model as it was, costs far less loss than learning the text again from few batches.
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
    strayed = (p.exp() * (p - logits(model, ids).log_softmax(-1))).sum(-1).mean()
    return strayed + (unlikelihood * looping).sum() / looping.numel()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int, windows: int) -> float:
    """Mean cross entropy, nats per token, over evenly spaced held-out windows of `length` tokens."""
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
    """(alpha, first): mean sum min(p, q) at temperature 1, and how often the first choices agree, on held-out text."""
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
    """The share of greedy continuations (256 tokens of 64 held-out ones) that end in a loop."""
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
