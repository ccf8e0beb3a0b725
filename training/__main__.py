"""Train the bundled pair: ``python -m training --preset cpu``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training import card, corpus, curve, objectives
from training.fit import Schedule, fit


@dataclass(frozen=True)
class Shape:
    """Layers and widths of a Llama; every input of a linear layer is a multiple of 64, which 4-bit needs."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}"


@dataclass(frozen=True)
class Preset:
    """What to train and for how long."""

    target: Shape
    drafter: Shape
    target_schedule: Schedule
    polish_schedule: Schedule
    drafter_schedule: Schedule
    curve: tuple[Shape, ...]  # drafters that were tried
    curve_schedule: Schedule


KEPT = 0.2  # of what the target was before it was polished


PRESETS = {
    "cpu": Preset(
        target=Shape(12, 256, 704, 4, 2),
        drafter=Shape(1, 256, 704, 4, 2),
        target_schedule=Schedule(steps=2300, long_part=0.12),
        polish_schedule=Schedule(steps=110, tokens=2048, long=1024, lr=1e-3, warmup=5, decay_part=0.8, save_every=10),
        # One layer takes its time to learn far positions: a good part of the windows has 2,048 tokens.
        drafter_schedule=Schedule(steps=4800, long_part=0.3),
        curve=(
            Shape(1, 128, 384, 2, 1),
            Shape(1, 192, 576, 3, 1),
            Shape(1, 256, 704, 4, 2),
            Shape(2, 192, 576, 3, 1),
        ),
        curve_schedule=Schedule(steps=100, long_part=0.2, warmup=20, save_every=40),
    ),
    "gpu": Preset(
        target=Shape(12, 384, 1024, 6, 2),
        drafter=Shape(1, 256, 704, 4, 2),
        target_schedule=Schedule(steps=6000, tokens=16384),
        polish_schedule=Schedule(steps=300, tokens=16384, lr=1e-3, warmup=10, decay_part=0.8),
        drafter_schedule=Schedule(steps=4000, tokens=16384, long_part=0.5),
        curve=(Shape(1, 192, 576, 3, 1), Shape(1, 256, 704, 4, 2), Shape(2, 256, 704, 4, 2)),
        curve_schedule=Schedule(steps=1000, tokens=16384),
    ),
    "smoke": Preset(
        target=Shape(2, 64, 128, 1, 1),
        drafter=Shape(1, 64, 128, 1, 1),
        target_schedule=Schedule(steps=4, tokens=1024, long=512, warmup=2, save_every=2),
        polish_schedule=Schedule(steps=2, tokens=1024, long=512, warmup=2, save_every=2),
        drafter_schedule=Schedule(steps=4, tokens=1024, long=512, warmup=2, save_every=2),
        curve=(Shape(1, 64, 64, 1, 1), Shape(2, 64, 64, 1, 1)),
        curve_schedule=Schedule(steps=2, tokens=1024, long=512, warmup=2, save_every=2),
    ),
}


def build(shape: Shape, tokenizer: corpus.PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama of this shape with tied embeddings and a context of 2,048."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def read(folder: Path) -> LlamaForCausalLM:
    """A model saved by an earlier stage, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write float16 safetensors without touching the model in memory."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    end = model.config.eos_token_id
    copy.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    copy.half().save_pretrained(folder)


def main() -> None:
    """Corpus, target, polish, curve, drafter, card; training goes on where an earlier run stopped."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--stage", choices=("target", "polish", "curve", "drafter", "card", "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("assets/pair"))
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="checkpoints, to resume from")
    parser.add_argument("--steps", type=int, help="override the preset's number of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    preset = PRESETS[options.preset]
    text = corpus.load(options.out, options.seed)
    print(f"{len(text.train):,} training tokens, {len(text.held_out):,} held out in {len(text.held_out_files)} files")

    def batches(step: int, size: int, length: int) -> torch.Tensor:
        return torch.from_numpy(corpus.batch(text.train, step, size, length, options.seed))

    def schedule(one: Schedule) -> Schedule:
        return Schedule(**{**vars(one), "steps": options.steps}) if options.steps else one

    torch.manual_seed(options.seed)
    if options.stage in ("target", "all"):
        target = build(preset.target, text.tokenizer).to(options.device)
        check = partial(objectives.held_out_loss, target, text.held_out, 1024, 24)
        value = fit(
            target,
            partial(objectives.prediction, target),
            batches,
            schedule(preset.target_schedule),
            options.work / "target.pt",
            check,
            "target",
        )
        print(f"target: {value:.4f} nats per held-out token")
        save(target, options.out / "target")
    if options.stage in ("polish", "all"):
        target = read(options.out / "target").to(options.device)
        before = read(options.out / "target").to(options.device).requires_grad_(False)
        check = partial(objectives.held_out_loops, target, text.held_out, 32)
        fit(
            target,
            partial(objectives.without_loops, target, before),
            batches,
            schedule(preset.polish_schedule),
            options.work / "polish.pt",
            check,
            "polish",
        )
        # A straight line between the two trades loops for loss better than the training does (WiSE-FT, 2109.01903).
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), before.parameters(), strict=True):
                ours.lerp_(theirs, KEPT)
        print(f"greedy continuations that end in a loop: {check():.0%}")
        save(target, options.out / "target")
    if options.stage in ("curve", "all"):
        target = read(options.out / "target").to(options.device).requires_grad_(False)
        drafters = nn.ModuleDict({str(shape): build(shape, text.tokenizer) for shape in preset.curve})
        fit(
            drafters.to(options.device),
            partial(objectives.agreement, drafters.values(), target),
            batches,
            schedule(preset.curve_schedule),
            options.work / "curve.pt",
            lambda: objectives.held_out_agreement(next(iter(drafters.values())), target, text.held_out, 1024, 4)[0],
            "curve",
        )
        print(curve.write(curve.measure(dict(drafters.items()), target, text.held_out), options.out))
    if options.stage in ("drafter", "all"):
        target = read(options.out / "target").to(options.device).requires_grad_(False)
        drafter = build(preset.drafter, text.tokenizer).to(options.device)
        check = partial(objectives.held_out_agreement, drafter, target, text.held_out, 1024, 24)
        alpha = fit(
            drafter,
            partial(objectives.agreement, [drafter], target),
            batches,
            schedule(preset.drafter_schedule),
            options.work / "drafter.pt",
            lambda: check()[0],
            "drafter",
        )
        print(f"drafter: mean sum min(p, q) = {alpha:.4f}, first choices agree {check()[1]:.4f}")
        save(drafter, options.out / "drafter")
    if options.stage in ("card", "all"):
        print(card.write(options.out, text, f"python -m training --preset {options.preset}"))


if __name__ == "__main__":
    main()
