"""Texts that the target continues, many at a time: slots with keys and values, filled again as texts end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.head.conversations import loop_starts
from training.head.target import Target, causal

ROUNDS = 3  # of drawing a token within top-p
GROUP = 65_536  # padded tokens of contexts in a pass
PAD = 16


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
