"""Distributions of an EAGLE-3 head, recomputed for the full text from hidden states of `transformers`.

Written from the published description, row by row, without the head engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fakes.heads import HEAD_DIM, HEADS, KV_HEADS


def reference_logits(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any, tokens: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """Return the logits `[len(drafted) + 1, size]` after `tokens` and each of `drafted`."""
    with torch.no_grad():
        hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[tap][0] for tap in config["eagle_aux_hidden_state_layer_ids"]], -1)
        return _Reference(tensors, config, target).logits(states, tokens, drafted)


class _Reference:
    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any) -> None:
        self.tensors, self.epsilon = tensors, config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.embeddings = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.output = tensors.get("lm_head.weight")
        if self.output is None:
            rows = target.get_output_embeddings().weight
            used = tensors.get("t2d")
            self.output = rows if used is None else rows[used]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def logits(self, states: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        for position, (state, following) in enumerate(zip(states, tokens[1:], strict=True)):
            row = self.row(self.tensors["fc.weight"] @ state, following, position)
        rows = [row]
        for i, token in enumerate(drafted):
            rows.append(self.row(rows[-1], token, len(states) + i))
        return torch.stack([self.output @ self.norm("norm", row) for row in rows])

    def row(self, state: Tensor, token: int, position: int) -> Tensor:
        embedded = self.norm("midlayer.input_layernorm", self.embeddings[token])
        x = torch.cat([embedded, self.norm("midlayer.hidden_norm", state)])
        query, key, value = (self.weight(f"self_attn.{name}_proj") @ x for name in "qkv")
        self.keys.append(torch.stack([self.rotated(head, position) for head in key.view(KV_HEADS, HEAD_DIM)]))
        self.values.append(value.view(KV_HEADS, HEAD_DIM))
        mixed = []
        for i, head in enumerate(query.view(HEADS, HEAD_DIM)):
            group = i * KV_HEADS // HEADS
            head = self.rotated(head, position)
            weights = torch.stack([keys[group] @ head / math.sqrt(HEAD_DIM) for keys in self.keys]).softmax(0)
            mixed.append(sum(w * values[group] for w, values in zip(weights, self.values, strict=True)))
        state = state + self.weight("self_attn.o_proj") @ torch.cat(mixed)
        x = self.norm("midlayer.post_attention_layernorm", state)
        gate, up = self.weight("mlp.gate_proj") @ x, self.weight("mlp.up_proj") @ x
        return state + self.weight("mlp.down_proj") @ (gate * gate.sigmoid() * up)

    def rotated(self, head: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        turned = head.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / HEAD_DIM)
            turned[i] = head[i] * math.cos(angle) - head[half + i] * math.sin(angle)
            turned[half + i] = head[half + i] * math.cos(angle) + head[i] * math.sin(angle)
        return turned

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x / (x.square().mean() + self.epsilon).sqrt()

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"midlayer.{name}.weight"]
