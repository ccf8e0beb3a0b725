"""The target in training: a frozen Llama as plain tensors, for whole texts and for texts that grow by a token.

Products are in bfloat16; residuals, norms and output rows for drawing in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

# Maps the number of a layer and rotated queries, rotated keys and values `[..., heads, size]` to mixed values.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class States:
    """Hidden states `[size, length, ...]`: concatenated taps and the state after the final norm."""

    taps: Tensor
    final: Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer, those with the same input joined."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, stored: Mapping[str, Tensor]) -> Layer:
        """Join and round the tensors of `transformers`."""

        def joined(*names: str) -> Tensor:
            return torch.cat([stored[f"{name}_proj.weight"] for name in names]).to(torch.bfloat16)

        return cls(
            stored["input_layernorm.weight"],
            joined("self_attn.q", "self_attn.k", "self_attn.v"),
            joined("self_attn.o"),
            stored["post_attention_layernorm.weight"],
            joined("mlp.gate", "mlp.up"),
            joined("mlp.down"),
        )


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary position embeddings to `x` `[..., n, heads, size]` at `positions` `[n]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Target:
    """A frozen Llama. Tap i is `hidden_states[i]` of `transformers`, i less than the number of layers."""

    def __init__(self, name: str, taps: tuple[int, ...] = (), device: str = "cpu") -> None:
        path = Path(name)
        source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        model = AutoModelForCausalLM.from_pretrained(path.parent if source else path, dtype=torch.float32, **source)
        model.eval().requires_grad_(False).to(device)
        self.taps, self.config = taps, model.config
        self.embeddings = model.get_input_embeddings().weight
        self.rows = model.get_output_embeddings().weight
        self.output = self.rows.to(torch.bfloat16)
        self.last_layer = model.model.layers[-1].state_dict()
        self.norm = model.model.norm.weight
        self.layers = [Layer.of(layer.state_dict()) for layer in model.model.layers]

    def run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> States:
        """Pass `tokens` `[..., n]` at `positions` `[n]` through all layers."""
        theta, size, found = self.config.rope_parameters["rope_theta"], self.config.head_dim, {}
        groups = [self.config.num_attention_heads, self.config.num_key_value_heads, self.config.num_key_value_heads]
        x = F.embedding(tokens, self.embeddings)
        for i, layer in enumerate(self.layers):
            if i in self.taps:
                found[i] = x
            entered = self._normed(x, layer.input_norm).to(torch.bfloat16)
            query, key, value = F.linear(entered, layer.qkv).unflatten(-1, (-1, size)).split(groups, -2)
            query, key = (rotate(part, positions, theta).to(value.dtype) for part in (query, key))
            x = x + F.linear(attend(i, query, key, value).flatten(-2), layer.out).float()
            entered = self._normed(x, layer.mlp_norm).to(torch.bfloat16)
            gate, up = F.linear(entered, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down).float()
        taps = [found[i] for i in self.taps]
        return States(torch.cat(taps, -1) if taps else x[..., :0], self._normed(x, self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    @torch.no_grad()
    def states(self, tokens: Tensor) -> States:
        """Return the hidden states of `tokens` `[size, length]`; padding at the end of rows has no effect."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.run(tokens, positions, lambda _, query, key, value: causal(query, key, value))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of whole texts `[size, length, heads, head size]`."""
    repeats = query.shape[-2] // key.shape[-2]
    key, value = (x.repeat_interleave(repeats, -2).transpose(1, 2) for x in (key, value))
    return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True).transpose(1, 2)
