"""The target in training: hidden states and distributions from a frozen `transformers` model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class States:
    """Hidden states `[size, length, ...]`: concatenated taps and the state after the final norm."""

    taps: Tensor
    final: Tensor


class Target:
    """A frozen Llama: products in bfloat16, residuals and norms in float32.

    Tap i is `hidden_states[i]` of `transformers`.
    """

    def __init__(self, name: str, taps: tuple[int, ...], device: str = "cpu") -> None:
        path = Path(name)
        source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if source else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
        self.model.eval().requires_grad_(False).to(device)
        self.taps, self.config = taps, self.model.config
        self.embeddings = self.model.get_input_embeddings().weight
        self.output = self.model.get_output_embeddings().weight.to(torch.bfloat16)
        self.last_layer = {key: value.clone() for key, value in self.model.model.layers[-1].state_dict().items()}
        self.norm = self.model.model.norm.weight
        for module in self.model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.to(torch.bfloat16)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        """Return the hidden states of `tokens` `[size, length]`; padding at the end of rows has no effect."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = self.model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
        return States(torch.cat([hidden[i] for i in self.taps], -1), hidden[-1])
