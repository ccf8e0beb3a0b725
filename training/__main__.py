"""Train the bundled pair: `python -m training --preset cpu` (assets/pair, cited in README.md)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training import card, corpus, curve, objectives
from training.fit import Schedule, fit


@dataclass(frozen=True)
class Shape:
    """Layers and widths of a Llama; inputs of linear layers are multiples of 64, as required by 4-bit quantization."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}"


@dataclass(frozen=True)
class Preset:
    """Shapes and schedules of all stages."""

    target: Shape
    drafter: Shape
    target_schedule: Schedule
    polish_schedule: Schedule
    drafter_schedule: Schedule
    curve: tuple[Shape, ...]  # candidate drafters
    curve_schedule: Schedule
    card_prompts: int = 24


ORIGINAL_SHARE = 0.2  # of the unpolished weights
STAGES = ("target", "polish", "curve", "drafter", "card")

PRESETS = {
    "cpu": Preset(
        target=Shape(12, 256, 704, 4, 2),
        drafter=Shape(1, 256, 704, 4, 2),
        target_schedule=Schedule(steps=2300, long_part=0.12),
        polish_schedule=Schedule(steps=110, tokens=2048, long=1024, lr=1e-3, warmup=5, decay_part=0.8, save_every=10),
        # A single layer learns distant positions slowly, hence the many windows of 2,048 tokens.
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
        card_prompts=1,
    ),
}


def build(shape: Shape, tokenizer: corpus.PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama with tied embeddings and a context of 2,048."""
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
    """Load a model saved by an earlier stage, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write float16 safetensors; `model` is not modified."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    end = model.config.eos_token_id
    copy.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    copy.half().save_pretrained(folder)


class Training:
    """Stages of a preset; each continues from its checkpoint after an interruption."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._preset = options, PRESETS[options.preset]
        self._text = corpus.load(options.out, options.seed)
        counts = f"{len(self._text.train):,} training tokens, {len(self._text.held_out):,} test tokens"
        print(f"{counts} in {len(self._text.held_out_files)} files")

    def _fit(
        self,
        model: nn.Module,
        loss: Callable[[Tensor], Tensor],
        schedule: Schedule,
        check: Callable[[], float],
        label: str,
    ) -> float:
        schedule = replace(schedule, steps=self._options.steps or schedule.steps)

        def batches(step: int) -> Tensor:
            length = schedule.length(step)
            ids = corpus.batch(self._text.train, step, schedule.tokens // length, length, self._options.seed)
            return torch.from_numpy(ids).to(self._options.device)

        return fit(model, loss, batches, schedule, self._options.work / f"{label}.pt", lambda _: check(), label)

    def _read_target(self) -> LlamaForCausalLM:
        return read(self._options.out / "target").to(self._options.device)

    def target(self) -> None:
        """Train the target on the corpus."""
        target = build(self._preset.target, self._text.tokenizer).to(self._options.device)
        check = partial(objectives.held_out_loss, target, self._text.held_out, 1024, 24)
        value = self._fit(target, partial(objectives.prediction, target), self._preset.target_schedule, check, "target")
        print(f"target: {value:.4f} nats per test token")
        save(target, self._options.out / "target")

    def polish(self) -> None:
        """Reduce greedy loops of the target."""
        target, before = self._read_target(), self._read_target().requires_grad_(False)
        check = partial(objectives.held_out_loops, target, self._text.held_out, 32)
        loss = partial(objectives.without_loops, target, before)
        self._fit(target, loss, self._preset.polish_schedule, check, "polish")
        # Interpolated weights have fewer loops for the same loss than the trained weights (WiSE-FT, 2109.01903).
        with torch.no_grad():
            for parameter, original in zip(target.parameters(), before.parameters(), strict=True):
                parameter.lerp_(original, ORIGINAL_SHARE)
        print(f"greedy continuations that end in a loop: {check():.0%}")
        save(target, self._options.out / "target")

    def curve(self) -> None:
        """Train drafters of several shapes in parallel."""
        target = self._read_target().requires_grad_(False)
        drafters = nn.ModuleDict({str(shape): build(shape, self._text.tokenizer) for shape in self._preset.curve})
        first = next(iter(drafters.values()))
        self._fit(
            drafters.to(self._options.device),
            partial(objectives.agreement, drafters.values(), target),
            self._preset.curve_schedule,
            lambda: objectives.held_out_agreement(first, target, self._text.held_out, 1024, 4)[0],
            "curve",
        )
        points = curve.measure(dict(drafters.items()), target, self._text.held_out)
        print(curve.write(points, self._options.out))

    def drafter(self) -> None:
        """Distil the drafter from the target."""
        target = self._read_target().requires_grad_(False)
        drafter = build(self._preset.drafter, self._text.tokenizer).to(self._options.device)
        check = partial(objectives.held_out_agreement, drafter, target, self._text.held_out, 1024, 24)
        loss = partial(objectives.agreement, [drafter], target)
        alpha = self._fit(drafter, loss, self._preset.drafter_schedule, lambda: check()[0], "drafter")
        print(f"drafter: mean sum min(p, q) = {alpha:.4f}, equal first choices {check()[1]:.4f}")
        save(drafter, self._options.out / "drafter")

    def card(self) -> None:
        """Write the model card."""
        recipe = f"python -m training --preset {self._options.preset}"
        print(card.write(self._options.out, self._text, recipe, self._preset.card_prompts))


def main() -> None:
    """Run the requested stages."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("assets/pair"))
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="checkpoints, to resume from")
    parser.add_argument("--steps", type=int, help="override the preset's number of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    training = Training(options)
    torch.manual_seed(options.seed)
    for stage in STAGES if options.stage == "all" else (options.stage,):
        getattr(training, stage)()


if __name__ == "__main__":
    main()
