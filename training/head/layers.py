"""Decoder layers of heads in training: attention of rows that follow a text by one row per step.

The rows of step 0 attend causally; row t of a later step attends to the rows up to t of step 0 and to row t of all
steps up to its own, as in a draft that starts at t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

Cache = list[tuple[Tensor, Tensor]]  # keys and values of each step


class RMSNorm(nn.Module):
    """Root mean square norm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary position embeddings to `x` `[..., n, size]` at `positions` `[n]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MergedAttention(torch.autograd.Function):
    """Causal attention over the keys of step 0, merged with the same row of later steps.

    The kernel returns the log of the normaliser, and its gradient is correct for a part of the keys if it receives the
    output and the normaliser over all keys (ring attention, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        """Map queries, keys, values `[size, heads, n, head size]` and `own_*` `[steps, ...]`."""
        first, log_first = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        scores = (query.float() * own_keys.float()).sum(-1) * query.shape[-1] ** -0.5
        log_first = log_first.float()
        log_all = torch.cat([log_first[None], scores]).logsumexp(0)
        own_weights = (scores - log_all).exp()[..., None]
        merged = (log_first - log_all).exp()[..., None] * first.float() + (own_weights * own_values.float()).sum(0)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, own_keys, own_values, merged, log_all, own_weights)
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, own_keys, own_values, merged, log_all, own_weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, merged, log_all, 0.0, True
        )
        gradient = gradient.float()
        of_own_values = own_weights * gradient
        share = (gradient * (own_values.float() - merged.float())).sum(-1, keepdim=True)
        of_scores = own_weights * share * query.shape[-1] ** -0.5
        of_query = of_query + (of_scores * own_keys.float()).sum(0)
        of_own_keys = of_scores * query.float()
        return of_query, of_key, of_value, of_own_keys, of_own_values


class Attention(nn.Module):
    """Attention with grouped queries over the rows of step 0 and the same row of later steps."""

    def __init__(self, config: PretrainedConfig, inputs: int) -> None:
        super().__init__()
        width, self.size = config.hidden_size, config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        queries, keys = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.repeats = queries // keys
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Attend from rows `x` `[size, n, inputs]` of step `len(cache)`; append keys and values to `cache`."""
        positions = torch.arange(x.shape[1], device=x.device) + len(cache)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.size)).transpose(1, 2)

        value = heads(self.v_proj(x))
        query = rotate(heads(self.q_proj(x)), positions, self.theta).to(value.dtype)
        key = rotate(heads(self.k_proj(x)), positions, self.theta).to(value.dtype)
        cache.append((key.repeat_interleave(self.repeats, 1), value.repeat_interleave(self.repeats, 1)))
        keys, values = zip(*cache, strict=True)
        if len(cache) == 1:
            mixed = F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        else:
            mixed = MergedAttention.apply(query, keys[0], values[0], torch.stack(keys[1:]), torch.stack(values[1:]))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedLinear(nn.Module):
    """The feed-forward part of a Llama layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer of the target."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedLinear(width, config.intermediate_size)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class FirstLayer(nn.Module):
    """A decoder layer with the embedding of the next token as second input."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.input_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn = Attention(config, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedLinear(width, config.intermediate_size)

    def forward(self, x: Tensor, embedded: Tensor, cache: Cache) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, cache)
        return x + self.mlp(self.post_attention_layernorm(x))

    @torch.no_grad()
    def start_from(self, layer: Mapping[str, Tensor]) -> None:
        """Copy a layer of the target, which ignores the embedding."""
        stored = dict(layer)
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"self_attn.{name}.weight"
            stored[key] = torch.cat([torch.zeros_like(stored[key]), stored[key]], -1)
        stored["hidden_norm.weight"] = stored["input_layernorm.weight"]
        stored["input_layernorm.weight"] = torch.ones_like(stored["input_layernorm.weight"])
        self.load_state_dict(stored)
