"""Train the bundled pair: `python -m training` (assets/pair, cited in README.md)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training import corpus
from training.fit import Schedule, fit

ORIGINAL_SHARE = 0.2  # of the unpolished weights
REJECTION_WEIGHT = 3.0  # of the drafter's loss
LAYERS = {"target": 12, "drafter": 1}
SCHEDULES = {
    "target": Schedule(steps=2300, long_part=0.12),
    "polish": Schedule(steps=110, tokens=2048, long=1024, lr=1e-3, warmup=5, decay_part=0.8, save_every=10),
    # A single layer learns distant positions slowly, hence the many windows of 2,048 tokens.
    "drafter": Schedule(steps=4800, long_part=0.3),
}


def build(layers: int, tokenizer: corpus.PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama; inputs of linear layers are multiples of 64, as required by 4-bit quantization."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write float16 safetensors; `model` is not modified."""
    rounded = deepcopy(model).half()
    end = model.config.eos_token_id
    rounded.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    rounded.save_pretrained(folder)


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


class Training:
    """Stages of the training; each continues from its checkpoint after an interruption."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._text = corpus.load(options.out, options.seed)
        print(f"{len(self._text.train):,} training tokens, {len(self._text.held_out):,} test tokens")

    def _fit(self, stage: str, model: LlamaForCausalLM, loss: Callable[[Tensor], Tensor]) -> None:
        schedule = SCHEDULES[stage]
        schedule = replace(schedule, steps=self._options.steps or schedule.steps)

        def batches(step: int) -> Tensor:
            length = schedule.length(step)
            ids = corpus.batch(self._text.train, step, schedule.tokens // length, length, self._options.seed)
            return torch.from_numpy(ids).to(self._options.device)

        def check(_: int) -> float:
            return held_out(loss, self._text.held_out, self._options.device, 1024, 8)

        value = fit(model, loss, batches, schedule, self._options.work / f"{stage}.pt", check, stage)
        print(f"{stage}: loss on test text {value:.4f}")

    def _untrained(self, role: str) -> LlamaForCausalLM:
        return build(LAYERS[role], self._text.tokenizer).to(self._options.device)

    def _read_target(self) -> LlamaForCausalLM:
        stored = LlamaForCausalLM.from_pretrained(self._options.out / "target", dtype=torch.float32)
        return stored.eval().to(self._options.device)

    def target(self) -> None:
        target = self._untrained("target")
        self._fit("target", target, partial(prediction, target))
        save(target, self._options.out / "target")

    def polish(self) -> None:
        """Reduce greedy loops of the target."""
        target, before = self._read_target(), self._read_target().requires_grad_(False)
        self._fit("polish", target, partial(without_loops, target, before))
        # Interpolated weights have fewer loops for the same loss than the trained weights (WiSE-FT, 2109.01903).
        with torch.no_grad():
            for parameter, original in zip(target.parameters(), before.parameters(), strict=True):
                parameter.lerp_(original, ORIGINAL_SHARE)
        save(target, self._options.out / "target")

    def drafter(self) -> None:
        target, drafter = self._read_target().requires_grad_(False), self._untrained("drafter")
        self._fit("drafter", drafter, partial(agreement, drafter, target))
        save(drafter, self._options.out / "drafter")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--stage", choices=SCHEDULES, nargs="+", default=list(SCHEDULES))
    parser.add_argument("--out", type=Path, default=Path("assets/pair"))
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="checkpoints, to resume from")
    parser.add_argument("--steps", type=int, help="number of steps of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    training = Training(options)
    torch.manual_seed(options.seed)
    for stage in options.stage:
        getattr(training, stage)()


if __name__ == "__main__":
    main()
