"""Distributions of heads, recomputed for the full text from hidden states of `transformers`.

Written from the published descriptions, row by row, without the head engines.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fakes.heads import HEAD_DIM, HEADS, KV_HEADS


def reference_logits(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any, tokens: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """Return the logits `[len(drafted) + 1, vocab]` after `tokens` and each of `drafted`; others than drafted: -inf."""
    return next(branch_logits(tensors, config, target, tokens, [drafted]))


def branch_logits(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Any,
    tokens: Sequence[int],
    branches: Iterable[Sequence[int]],
) -> Iterator[Tensor]:
    """Yield the logits of `reference_logits` for each branch of a tree."""
    with torch.no_grad():
        hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        if "medusa_num_heads" in config:
            yield from (_medusa(tensors, target, hidden[-1][0, -1], len(drafted) + 1) for drafted in branches)
            return
        taps = config.get("eagle_aux_hidden_state_layer_ids", [len(hidden) - 1])
        states = torch.cat([hidden[tap][0] for tap in taps], -1)
        kind = _Eagle3 if "midlayer.mlp.up_proj.weight" in tensors else _Eagle
        head = kind(tensors, config, target)
        last = head.committed(states, tokens)
        for drafted in branches:
            yield head.logits(last, len(states), drafted)


def _medusa(tensors: Mapping[str, Tensor], target: Any, state: Tensor, count: int) -> Tensor:
    rows = []
    for head in range(count):
        x, block = state, 0
        while f"{head}.{block}.linear.weight" in tensors:
            y = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
            x, block = x + y * y.sigmoid(), block + 1
        output = tensors.get(f"{head}.{block}.weight", target.get_output_embeddings().weight)
        row = output @ x
        rows.append(row.masked_fill(~_drafted(tensors, len(row)), -math.inf))
    return torch.stack(rows)


def _drafted(tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor:
    """Return the static draft vocabulary as a mask."""
    if "d2t" not in tensors:
        return torch.ones(vocab_size, dtype=torch.bool)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


class _Eagle3:
    layer = "midlayer."

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any) -> None:
        self.tensors, self.epsilon = tensors, config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.embeddings = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.output = target.get_output_embeddings().weight
        self.allowed = _drafted(tensors, len(self.output))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def committed(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        self.allowed[list(tokens[1:])] = True  # the text extends the draft vocabulary
        for position, (state, following) in enumerate(zip(states, tokens[1:], strict=True)):
            row = self.row(self.entered(state), following, position)
        return row

    def logits(self, last: Tensor, length: int, drafted: Sequence[int]) -> Tensor:
        rows = [last]
        del self.keys[length:], self.values[length:]
        for i, token in enumerate(drafted):
            rows.append(self.row(rows[-1], token, length + i))
        return torch.stack([self.output @ self.left(row) for row in rows]).masked_fill(~self.allowed, -math.inf)

    def entered(self, state: Tensor) -> Tensor:
        return self.tensors["fc.weight"] @ state

    def left(self, row: Tensor) -> Tensor:
        return self.norm("norm", row)

    def combined(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Return the residual and the input of attention."""
        embedded = self.norm("midlayer.input_layernorm", self.embeddings[token])
        return state, torch.cat([embedded, self.norm("midlayer.hidden_norm", state)])

    def row(self, state: Tensor, token: int, position: int) -> Tensor:
        state, x = self.combined(state, token)
        query, key, value = (self.weight(f"self_attn.{name}_proj") @ x for name in "qkv")
        self.keys.append(torch.stack([self.rotated(head, position) for head in key.view(KV_HEADS, HEAD_DIM)]))
        self.values.append(value.view(KV_HEADS, HEAD_DIM))
        mixed = []
        for i, head in enumerate(query.view(HEADS, HEAD_DIM)):
            group = i * KV_HEADS // HEADS
            head = self.rotated(head, position)
            weights = (torch.stack(self.keys)[:, group] @ head / math.sqrt(HEAD_DIM)).softmax(0)
            mixed.append(weights @ torch.stack(self.values)[:, group])
        state = state + self.weight("self_attn.o_proj") @ torch.cat(mixed)
        x = self.norm(f"{self.layer}post_attention_layernorm", state)
        gate, up = self.weight("mlp.gate_proj") @ x, self.weight("mlp.up_proj") @ x
        return state + self.weight("mlp.down_proj") @ (gate * gate.sigmoid() * up)

    def rotated(self, head: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        angles = position * self.theta ** (-2 * torch.arange(half) / HEAD_DIM)
        first, second = head[:half], head[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x / (x.square().mean() + self.epsilon).sqrt()

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.layer}{name}.weight"]


class _Eagle(_Eagle3):
    """EAGLE-1/2: `fc` of embedding and final state, no norms around the layer."""

    layer = "layers.0."

    def entered(self, state: Tensor) -> Tensor:
        return state

    def left(self, row: Tensor) -> Tensor:
        return row

    def combined(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        x = self.tensors["fc.weight"] @ torch.cat([self.embeddings[token], state]) + self.tensors["fc.bias"]
        return x, x
