"""One training loop for both models, resumable to the batch.

Muon moves the matrices of the layers (several times fewer tokens for the same loss than AdamW at this size),
AdamW everything else. The learning rate warms up, stays, and falls linearly to zero, so a run that is interrupted in
its flat part may be resumed with another length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Schedule:
    """`steps` batches of `tokens` tokens: windows of `short` tokens first, of `long` tokens in the last part.

    Short windows cost less attention and teach most of what there is; the long ones teach the far positions.
    """

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
        """Tokens per window at `step`."""
        return self.long if step >= self.steps * (1 - self.long_part) else self.short

    def rate(self, step: int) -> float:
        """Learning rate at `step` as a share of `lr`."""
        left = (self.steps - step) / (self.steps * self.decay_part)
        return min(1.0, (step + 1) / self.warmup, left)


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(
    model: nn.Module,
    loss: Loss,
    batch: Callable[[int, int, int], Tensor],
    schedule: Schedule,
    checkpoint: Path,
    validate: Callable[[], float],
    label: str,
) -> float:
    """Train `model` in place and return the last validation value.

    `loss` maps token ids `[size, length]` to a scalar; `batch(step, size, length)` gives the ids. The state is saved
    to `checkpoint` every `save_every` steps and picked up from there.
    """
    device = next(model.parameters()).device
    optimiser = optimizers(model, schedule.lr)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for one, saved in zip(optimiser, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        first = state["step"]
    model.train()
    bar = tqdm(range(first, schedule.steps), initial=first, total=schedule.steps, desc=label, mininterval=5)
    smooth = None
    for step in bar:
        length = schedule.length(step)
        ids = batch(step, schedule.tokens // length, length).to(device)
        for one in optimiser:
            for group in one.param_groups:
                group["lr"] = schedule.lr * schedule.rate(step)
        value = loss(ids)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in optimiser:
            one.step()
            one.zero_grad(set_to_none=True)
        smooth = value.item() if smooth is None else 0.95 * smooth + 0.05 * value.item()
        bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
        if (step + 1) % (10 * schedule.save_every) == 0:
            tqdm.write(f"{label} step {step + 1}: validation {validate():.4f}")
            model.train()
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            state = {
                "model": model.state_dict(),
                "optimizers": [one.state_dict() for one in optimiser],
                "step": step + 1,
            }
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)  # an interrupted save never spoils the last good one
    model.eval()
    return validate()
