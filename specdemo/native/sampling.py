"""Distributions and samples: in C for float32 tensors on a CPU, see `sampling.c`, otherwise in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdemo.native.build import native_library, required_library
from specdemo.native.interface import declare

_TINY = torch.finfo(torch.float32).tiny
_TOP_P_WIDTH = 256  # initial number of candidates for top-p
_OUTSIDE = "a draft contains a token outside the vocabulary or a parent after its child"


@cache
def _functions() -> ctypes.PyDLL:
    """Return functions that keep the GIL: they take microseconds."""
    functions = ctypes.PyDLL(required_library()._name)
    declare(functions)
    return functions


def supports(*tensors: Tensor) -> bool:
    """Return True if the C functions can read all of these."""
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return False
    return isinstance(native_library(), ctypes.CDLL)


def _are_native_ids(ids: Tensor) -> bool:
    return ids.dtype == torch.int64 and ids.device.type == "cpu" and ids.stride(-1) == 1


def largest_logits(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most probable token of each row `[rows, vocab]` and its logit."""
    if not supports(logits):
        best = logits.argmax(1, keepdim=True)  # several times faster than top-1
        listed = torch.cat([logits.gather(1, best), best], 1).tolist()
        return [int(token) for _, token in listed], [value for value, _ in listed]  # exact in float32 below 2^24
    rows, vocab = logits.shape
    tokens = (ctypes.c_int32 * rows)()
    values = (ctypes.c_float * rows)()
    _functions().largest_logits(logits.data_ptr(), rows, logits.stride(0), vocab, tokens, values)
    return tokens[:], values[:]


def token_distributions(logits: Tensor, sampling: Any) -> Tensor:
    """Apply temperature, top-k, top-p, min-p and softmax to `logits` `[rows, vocab]`, as `SamplingParams` state."""
    if not supports(logits):
        logits = logits / sampling.temperature
        if 0 < sampling.top_k < logits.shape[1]:
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
        probs = logits.softmax(1)
        probs = probs if sampling.top_p >= 1.0 else _nucleus(probs, sampling.top_p)
        return _probable(probs, sampling.min_p) if sampling.min_p else probs
    rows, vocab = logits.shape
    probs = torch.empty_like(logits, memory_format=torch.contiguous_format)
    scratch = torch.empty(vocab, dtype=torch.float32)
    _functions().distributions(
        logits.data_ptr(), rows, logits.stride(0), vocab, sampling.struct, probs.data_ptr(), scratch.data_ptr()
    )
    return probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens with mass `top_p`, renormalised (1904.09751)."""
    vocab = probs.shape[1]
    width = _TOP_P_WIDTH if probs.device.type == "cpu" else vocab  # a device sorts rather than wait for the host
    while True:  # a full sort is expensive and rarely needed
        mass, order = probs.topk(min(width, vocab))
        total = mass.cumsum(1)
        if width >= vocab or not bool((total[:, -1] < top_p).any()):
            break
        width *= 4
    mass = mass * (total - mass < top_p)  # includes the token that crosses top_p
    return torch.zeros_like(probs).scatter_(1, order, mass / mass.sum(1, keepdim=True))


def _probable(probs: Tensor, share: float) -> Tensor:
    """Keep the tokens with this share of the largest probability, renormalised (2407.01082)."""
    mass = probs * (probs >= share * probs.amax(1, keepdim=True))
    return mass / mass.sum(1, keepdim=True)


def sample_at(probs: Tensor, uniform: float) -> int:
    """Return the token at `uniform` of the cumulative distribution `[vocab]`."""
    if supports(probs):
        return _functions().invert(probs.data_ptr(), len(probs), uniform)
    mass = probs.cumsum(0, dtype=torch.float64)
    token = int(torch.searchsorted(mass, uniform * mass[-1:], right=True))
    return token if token < len(probs) else int(probs.nonzero()[-1])  # the product was rounded up to the total


def compare_drafts(
    p: Tensor, q: Tensor, parents: Sequence[int], tokens: Sequence[int], ids: Tensor | None = None
) -> tuple[list[float], list[float]]:
    """Return p and sum min(p, q) per node; `p` `[n + 1, vocab]`, `q` `[n, vocab]`, or `[n, k]` of tokens `ids` `[k]`.

    Raises `ValueError` or `IndexError` for tokens outside the vocabulary and parents after their children.
    """
    count = len(tokens)
    columns = p.shape[1] if ids is None else len(ids)
    if not (q.shape == (count, columns) and supports(p, q) and (ids is None or _are_native_ids(ids))):
        return probs_of_tokens(p, parents, tokens), _overlaps(p, q, parents, ids)
    p, q = p.contiguous(), q.contiguous()
    nodes, values = (ctypes.c_int32 * (2 * count))(*parents, *tokens), (ctypes.c_float * (2 * count))()
    start, end = ctypes.addressof(nodes), ctypes.addressof(values)
    common = (p.shape[1], count, start, start + 4 * count, end, end + 4 * count)
    if ids is None:
        invalid = _functions().compare_drafts(p.data_ptr(), q.data_ptr(), *common)
    else:
        invalid = _functions().compare_sparse_drafts(p.data_ptr(), ids.data_ptr(), q.data_ptr(), columns, *common)
    if invalid:
        raise ValueError(_OUTSIDE)
    return values[:count], values[count:]


def probs_of_tokens(p: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the probability of each token in the row `p[parent + 1]`; `p` `[n + 1, vocab]`."""
    if not tokens:
        return []
    rows, columns = torch.tensor([[parent + 1 for parent in parents], [*tokens]], device=p.device)
    return p[rows, columns].tolist()  # MPS has no kernel for `take`


def _overlaps(p: Tensor, q: Tensor, parents: Sequence[int], ids: Tensor | None) -> list[float]:
    if ids is not None:
        covered = p[torch.tensor(parents, device=q.device)[:, None] + 1, ids]
    elif all(parent == node - 1 for node, parent in enumerate(parents)):
        covered = p[: len(parents)]
    else:
        covered = p[torch.tensor(parents, device=p.device) + 1]
    return torch.minimum(covered, q).sum(-1).tolist()


def token_ranks(p: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the rank of each token in the row `p[parent + 1]`; `p` `[n + 1, vocab]`. Raises like `compare_drafts`."""
    if not (supports(p) and p.is_contiguous()):
        rows = p[torch.tensor(parents, device=p.device) + 1]
        chosen = rows.gather(1, torch.tensor(tokens, device=p.device)[:, None])
        return (1 + (rows > chosen).sum(1)).tolist()
    count = len(tokens)
    nodes, ranks = (ctypes.c_int32 * (2 * count))(*parents, *tokens), (ctypes.c_int32 * count)()
    start = ctypes.addressof(nodes)
    if _functions().token_ranks(p.data_ptr(), p.shape[1], count, start, start + 4 * count, ctypes.addressof(ranks)):
        raise ValueError(_OUTSIDE)
    return ranks[:]


def summaries(probs: Tensor, size: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return entropy and the `size` most probable tokens of each row `[rows, vocab]`, without zero mass."""
    if not supports(probs):
        surprise = probs.clamp_min(_TINY).reciprocal().log()  # `special.entr` is several times slower
        mass, most = probs.topk(min(size, probs.shape[1]))
        listed = zip((probs * surprise).sum(1).tolist(), most.tolist(), mass.tolist(), strict=True)
        return [(entropy, [top for top in zip(*row, strict=True) if top[1] > 0]) for entropy, *row in listed]
    rows, vocab = probs.shape
    tokens = (ctypes.c_int32 * (rows * size))()
    values = (ctypes.c_float * (rows * size))()
    entropies = (ctypes.c_double * rows)()
    _functions().summarize(probs.data_ptr(), rows, probs.stride(0), vocab, size, tokens, values, entropies)
    tops = [(token, value) for token, value in zip(tokens, values, strict=True)]
    return [(entropies[r], [pair for pair in tops[r * size : (r + 1) * size] if pair[0] >= 0]) for r in range(rows)]


def excess_mass(p: Tensor, q: Tensor, weight: float) -> float:
    """Return the sum of max(weight p - q, 0)."""
    if p.shape == q.shape and supports(p, q):
        return _functions().excess(p.data_ptr(), q.data_ptr(), weight, len(p))
    return float((weight * p - q).clamp_(min=0).sum())


def residual_probs(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """Return norm(max(weight p - q, 0)), or p if that is zero."""
    if not (p.shape == q.shape and supports(p, q)):
        return _normalised((weight * p - q).clamp_(min=0), p)
    result = torch.empty_like(p)
    mass = _functions().residual(p.data_ptr(), q.data_ptr(), weight, len(p), result.data_ptr())
    return result if mass > 0 else p


def sparse_residual_probs(p: Tensor, ids: Tensor, q: Tensor, weight: float) -> Tensor:
    """Like `residual_probs`, with `q` `[k]` of tokens `ids` `[k]`."""
    if not (supports(p, q) and _are_native_ids(ids)):
        return _normalised(p.scatter(0, ids, (p[ids] - q / weight).clamp_(min=0)), p)
    result = torch.empty_like(p)
    mass = _functions().sparse_residual(
        p.data_ptr(), ids.data_ptr(), q.data_ptr(), len(q), weight, len(p), result.data_ptr()
    )
    if mass < 0:
        raise ValueError("a draft distribution has a token outside the vocabulary")
    return result if mass > 0 else p


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    total = mass.sum()
    return mass / total if total > 0 else otherwise
