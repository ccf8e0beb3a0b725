"""The target in training: a frozen Llama as plain tensors, for whole texts and for many texts that grow by a token.

Texts grow in slots with keys and values, which are filled again as texts end. Products are in bfloat16; residuals,
norms and output rows for drawing in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from training.head.conversations import loop_starts

# Maps the number of a layer and rotated queries, rotated keys and values `[..., heads, size]` to mixed values.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
ROUNDS = 3  # of drawing a token within top-p
GROUP = 65_536  # padded tokens of contexts in a pass
PAD = 16


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


@dataclass(frozen=True)
class Request:
    """A context to continue until the end token, a loop or `limit` tokens; `choice`: temperature and top-p."""

    context: list[int]
    choice: tuple[float, float]
    limit: int
    owner: Any


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Draw a token per row.

    Drawn tokens outside of top-p are drawn again, at last the most probable one is taken; at top-p 0 it always is.
    """
    p = (logits / temperature[:, None]).softmax(-1)
    result = p.argmax(-1)
    open_rows = torch.ones_like(result, dtype=torch.bool)
    for _ in range(ROUNDS):
        token = (p / torch.empty_like(p).exponential_()).argmax(-1)
        before = torch.where(p > p.gather(1, token[:, None]), p, 0).sum(-1)
        inside = open_rows & (before < top_p)
        result = torch.where(inside, token, result)
        open_rows = open_rows & ~inside
    return result


def attention(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Mix values `[slots, KV heads, length, size]` up to `positions` for `query` `[slots, heads, size]`."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys.mT).float() * query.shape[-1] ** -0.5
    later = torch.arange(keys.shape[2], device=query.device) > positions[:, None]
    weights = scores.masked_fill(later[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
    return (weights @ values).flatten(1, 2)


class Slots:
    """`count` texts of at most `length` positions. On a GPU a step is a graph."""

    def __init__(self, target: Target, end: int, count: int, length: int, longest: int, steps: int = 24) -> None:
        """`longest`: most tokens of a continuation; `steps`: between looks for texts that ended."""
        self.length, self.written = length, 0
        self._target, self._end, self._longest, self._steps = target, end, longest, steps
        config, device = target.config, target.embeddings.device
        shape = (len(target.layers), 2, count, config.num_key_value_heads, length, config.head_dim)
        self._kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._token, self._position, self._made, self._limit = torch.zeros(4, count, dtype=torch.int64, device=device)
        self._choice = torch.ones(2, count, device=device)
        self._active = torch.zeros(count, dtype=torch.bool, device=device)
        self._history = torch.zeros(count, longest + 1, dtype=torch.int64, device=device)
        self._requests: list[Request | None] = [None] * count
        self._graph = self._captured() if device.type == "cuda" else None

    @torch.no_grad()
    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        slots = torch.arange(len(self._token), device=self._token.device)

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._kv[i]
            keys[slots, :, self._position], values[slots, :, self._position] = key, value
            return attention(query, keys, values, self._position)

        final = self._target.run(self._token, self._position, attend).final
        token = draw(F.linear(final, self._target.rows), *self._choice)
        self._history[slots, self._made] = token
        self._made += self._active.long()
        self._active &= (token != self._end) & (self._made < self._limit)
        self._token.copy_(torch.where(self._active, token, self._token))
        self._position += self._active.long()

    def _fill(self, requests: Sequence[Request], free: Sequence[int]) -> None:
        """Store keys and values of the contexts but their last tokens, in groups of similar length."""
        groups: list[list[tuple[Request, int]]] = [[]]
        for request, slot in sorted(zip(requests, free, strict=False), key=lambda pair: len(pair[0].context)):
            if (len(groups[-1]) + 1) * len(request.context) > GROUP:
                groups.append([])
            groups[-1].append((request, slot))
            self._requests[slot] = request
        for group in filter(None, groups):
            self._fill_group([request for request, _ in group], [slot for _, slot in group])

    def _fill_group(self, requests: Sequence[Request], chosen: Sequence[int]) -> None:
        device, length = self._token.device, max(len(request.context) for request in requests) - 1
        length += -length % PAD
        ids = torch.zeros(len(requests), length, dtype=torch.int64)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.context) - 1] = torch.tensor(request.context[:-1])
        slots = torch.tensor(chosen, device=device)

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._kv[i, 0, slots, :, :length] = key.transpose(1, 2)
            self._kv[i, 1, slots, :, :length] = value.transpose(1, 2)
            return causal(query, key, value)

        self._target.run(ids.to(device), torch.arange(length, device=device), attend)
        numbers = [[request.context[-1], len(request.context) - 1, request.limit] for request in requests]
        self._token[slots], self._position[slots], self._limit[slots] = torch.tensor(numbers, device=device).T
        choices = [request.choice if request.choice[0] else (1.0, 0.0) for request in requests]
        self._choice[:, slots] = torch.tensor(choices, device=device).T
        self._made[slots], self._active[slots] = 0, True

    @torch.no_grad()
    def serve(self, take: Callable[[int], Sequence[Request]], give: Callable[[Request, list[int]], None]) -> None:
        """Continue the requests of `take(most)` until it returns none; `give` receives each with its tokens."""
        while True:
            free = [slot for slot, request in enumerate(self._requests) if request is None]
            self._fill(take(len(free)) if free else (), free)
            if not any(self._requests):
                return
            for _ in range(self._steps):
                if self._graph:
                    self._graph.replay()
                else:
                    self._step()
            self._collect(give)

    def _collect(self, give: Callable[[Request, list[int]], None]) -> None:
        """Hand over the texts that ended; those in a loop end before its third block."""
        counts = loop_starts(self._history[:, : self._longest], self._made)
        self._active &= counts == self._made
        active, kept, tokens = self._active.tolist(), counts.tolist(), self._history.cpu()
        for slot, request in enumerate(self._requests):
            if request is not None and not active[slot]:
                self._requests[slot] = None
                self.written += kept[slot]
                give(request, tokens[slot, : kept[slot]].tolist())
