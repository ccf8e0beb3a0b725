"""Training loop for target and drafters, resumable at any batch.

Muon optimises the matrices of the layers (several times fewer tokens for the same loss than AdamW at this size), AdamW
all other parameters. The learning rate has a warm-up, a constant and a linear decay phase; a run interrupted in the
constant phase can be resumed with another number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

T = TypeVar("T")  # a batch


@dataclass(frozen=True)
class Schedule:
    """`steps` batches of `tokens` tokens, in windows of `short` and finally, for distant positions, `long` tokens."""

    steps: int
    tokens: int = 4096
    short: int = 256
    long: int = 2048
    long_part: float = 0.2
    lr: float = 5e-3
    warmup: int = 100
    decay_part: float = 0.4
    save_every: int = 50

    def length(self, step: int) -> int:
        return self.long if step >= self.steps * (1 - self.long_part) else self.short

    def rate(self, step: int) -> float:
        left = (self.steps - step) / (self.steps * self.decay_part)
        return min(1.0, (step + 1) / self.warmup, left)


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings, output matrices and norms."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        outer = "embed" in name or "lm_head" in name
        (matrices if parameter.ndim == 2 and min(parameter.shape) > 1 and not outer else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(
    model: nn.Module,
    loss: Callable[[T], Tensor],
    batch: Callable[[int], T],
    schedule: Schedule,
    checkpoint: Path,
    validate: Callable[[int], float],
    label: str,
) -> float:
    """Train `model` in place and return the last validation value.

    `loss` maps a batch to a scalar, `batch` the number of a step to a batch, `validate` receives the number of trained
    steps. The state is saved to `checkpoint` every `save_every` steps and restored from there.
    """
    device = next(model.parameters()).device
    parts = optimizers(model, schedule.lr)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(parts, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    model.train()
    bar = tqdm(range(first, schedule.steps), initial=first, total=schedule.steps, desc=label, mininterval=5)
    for step in bar:
        for optimizer in parts:
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr * schedule.rate(step)
        value = loss(batch(step))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{value.item():.3f}", refresh=False)
        if (step + 1) % (10 * schedule.save_every) == 0:
            tqdm.write(f"{label} step {step + 1}: validation {validate(step + 1):.4f}")
            model.train()
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            _save(checkpoint, model, parts, step + 1)
    model.eval()
    return validate(max(first, schedule.steps))


def _save(checkpoint: Path, model: nn.Module, parts: list[torch.optim.Optimizer], step: int) -> None:
    state = {"model": model.state_dict(), "optimizers": [part.state_dict() for part in parts], "step": step}
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)
