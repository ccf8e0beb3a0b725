"""Distributions of a block head, recomputed for the full text from hidden states of `transformers`.

Written from the description in docs/heads.md, row by row, without the head engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fakes.heads import HEAD_DIM, HEADS, KV_HEADS


def reference_block(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any, tokens: Sequence[int], drafted: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the logits `[n + 1, size]` after `tokens` and each of n `drafted`, and the confidences `[n + 1]`."""
    return next(block_branches(tensors, config, target, tokens, [drafted]))


def block_branches(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Any,
    tokens: Sequence[int],
    branches: Iterable[Sequence[int]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of `reference_block` for each branch of a tree."""
    with torch.no_grad():
        hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[tap][0] for tap in config["eagle_aux_hidden_state_layer_ids"]], -1)
        embeddings, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        if "t2d" in tensors:
            output = output[tensors["t2d"]]
        layers = [_Layer(tensors, f"layers.{i}.", config) for i in range(2)]
        first, second = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        weight, bias = (tensors[f"confidence_head.proj.{name}"][0] for name in ("weight", "bias"))
        last = len(states) - 1

        def row(position: int) -> Tensor:
            """Return the final state at a position of the text, or at a slot behind it."""
            state = tensors["fc.weight"] @ states[min(position, last)]
            embedded = layers[0].norm("input_layernorm", embeddings[tokens[min(position, last) + 1]])
            x = torch.cat([embedded, layers[0].norm("hidden_norm", state)])
            state = layers[0].row(state, x + tensors["slots"][position - last - 1] if position > last else x, position)
            return layers[1].row(state, layers[1].norm("input_layernorm", state), position)

        committed = [row(position) for position in range(len(states))][-1]
        for drafted in branches:
            for layer in layers:
                layer.forget(len(states))
            rows = [committed, *(row(len(states) + slot) for slot in range(len(drafted)))]
            logits, confidences = [], []
            for state, before in zip(rows, (tokens[-1], *drafted), strict=True):
                state = _rms(state, tensors["norm.weight"], config) + second @ (first @ embeddings[before])
                logits.append(output @ state)
                confidences.append((weight @ state + bias).sigmoid())
            yield torch.stack(logits), torch.stack(confidences)


def _rms(x: Tensor, weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    return weight * x / (x.square().mean() + config["rms_norm_eps"]).sqrt()


class _Layer:
    """A decoder layer, row by row."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any]) -> None:
        self.weights = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        self.config = config
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def row(self, state: Tensor, x: Tensor, position: int) -> Tensor:
        query, key, value = (self.weights[f"self_attn.{name}_proj.weight"] @ x for name in "qkv")
        self.keys.append(self.turned(key.view(KV_HEADS, HEAD_DIM), position))
        self.values.append(value.view(KV_HEADS, HEAD_DIM))
        mixed = []
        for i, head in enumerate(self.turned(query.view(HEADS, HEAD_DIM), position)):
            group = i * KV_HEADS // HEADS
            weights = (torch.stack(self.keys)[:, group] @ head / math.sqrt(HEAD_DIM)).softmax(0)
            mixed.append(weights @ torch.stack(self.values)[:, group])
        state = state + self.weights["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.norm("post_attention_layernorm", state)
        gate, up = (self.weights[f"mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return state + self.weights["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def forget(self, length: int) -> None:
        """Remove the keys and values after the first `length` positions."""
        del self.keys[length:], self.values[length:]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return _rms(x, self.weights[f"{name}.weight"], self.config)

    def turned(self, heads: Tensor, position: int) -> Tensor:
        """Rotate pairs of components as complex numbers."""
        half = HEAD_DIM // 2
        angles = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        pairs = torch.complex(heads[:, :half], heads[:, half:]) * torch.polar(torch.ones(half), angles)
        return torch.cat([pairs.real, pairs.imag], -1)
