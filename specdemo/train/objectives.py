"""What the two models are trained to do: the target to predict text, the drafter to agree with the target."""

from __future__ import annotations

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


def agreement(drafter: LlamaForCausalLM, target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Distillation: KL(p || q), which learns everywhere, plus 1 - beta, which is the rejection rate itself.

    The second term is the total-variation loss of DistillSpec (2310.08461): what is minimised is what is paid for.
    """
    with torch.no_grad():
        p = logits(target, ids).log_softmax(-1)
    q = logits(drafter, ids).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    overlap = torch.minimum(p.exp(), q.exp()).sum(-1).mean()
    return divergence + 3.0 * (1.0 - overlap)


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
