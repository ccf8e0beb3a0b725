"""Computation of distributions and samples on a CPU, see `sampling.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from specdemo.native.build import native_library, required_library
from specdemo.native.interface import declare

_OUTSIDE = "a draft contains a token outside the vocabulary or a parent after its child"


@cache
def _functions() -> ctypes.PyDLL:
    """Return functions that keep the GIL: they take microseconds."""
    functions = ctypes.PyDLL(required_library()._name)
    declare(functions)
    return functions


def supports(x: Tensor) -> bool:
    """Return True if the other functions can read `x`."""
    usable = x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1
    return usable and isinstance(native_library(), ctypes.CDLL)


def largest_logits(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most probable token of each row `[rows, vocab]` and its logit."""
    rows, vocab = logits.shape
    tokens, values = (ctypes.c_int32 * rows)(), (ctypes.c_float * rows)()
    _functions().largest_logits(logits.data_ptr(), rows, logits.stride(0), vocab, tokens, values)
    return tokens[:], values[:]


def token_distributions(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Compute `SamplingParams.logits_to_probs` in C."""
    rows, vocab = logits.shape
    probs, scratch = (
        torch.empty_like(logits, memory_format=torch.contiguous_format),
        torch.empty(vocab, dtype=torch.float32),
    )
    _functions().distributions(
        *(logits.data_ptr(), rows, logits.stride(0), vocab, temperature, top_k, top_p),
        *(probs.data_ptr(), scratch.data_ptr()),
    )
    return probs


def sample_at(probs: Tensor, uniform: float) -> int:
    """Return the token at `uniform` of the cumulative distribution `[vocab]`."""
    return _functions().invert(probs.data_ptr(), len(probs), uniform)


def compare_drafts(
    p: Tensor, q: Tensor, parents: Sequence[int], tokens: Sequence[int], ids: Tensor | None = None
) -> tuple[list[float], list[float]]:
    """Return p and sum min(p, q) per node; `p` `[n + 1, vocab]`, `q` `[n, vocab]`, or `[n, k]` of tokens `ids`.

    Raises `ValueError` for tokens outside the vocabulary and parents after their children.
    """
    count = len(tokens)
    nodes, values = (ctypes.c_int32 * (2 * count))(*parents, *tokens), (ctypes.c_float * (2 * count))()
    start, end = ctypes.addressof(nodes), ctypes.addressof(values)
    common = (p.shape[1], count, start, start + 4 * count, end, end + 4 * count)
    if ids is None:
        invalid = _functions().compare_drafts(p.data_ptr(), q.data_ptr(), *common)
    else:
        sparse = (ids.data_ptr(), ids.stride(0), q.data_ptr(), q.shape[1])
        invalid = _functions().compare_sparse_drafts(p.data_ptr(), *sparse, *common)
    if invalid:
        raise ValueError(_OUTSIDE)
    return values[:count], values[count:]


def token_ranks(p: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the rank of each token in the row `p[parent + 1]`; `p` `[n + 1, vocab]`. Raises like `compare_drafts`."""
    count = len(tokens)
    nodes, ranks = (ctypes.c_int32 * (2 * count))(*parents, *tokens), (ctypes.c_int32 * count)()
    start = ctypes.addressof(nodes)
    if _functions().token_ranks(p.data_ptr(), p.shape[1], count, start, start + 4 * count, ctypes.addressof(ranks)):
        raise ValueError(_OUTSIDE)
    return ranks[:]


def summaries(probs: Tensor, size: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return entropy and the `size` most probable tokens of each row `[rows, vocab]`, without zero mass."""
    rows, vocab = probs.shape
    tokens, values = (ctypes.c_int32 * (rows * size))(), (ctypes.c_float * (rows * size))()
    entropies = (ctypes.c_double * rows)()
    _functions().summarize(probs.data_ptr(), rows, probs.stride(0), vocab, size, tokens, values, entropies)
    tops = [(token, value) for token, value in zip(tokens, values, strict=True)]
    return [(entropies[r], [pair for pair in tops[r * size : (r + 1) * size] if pair[0] >= 0]) for r in range(rows)]


def excess_mass(p: Tensor, q: Tensor, weight: float) -> float:
    return _functions().excess(p.data_ptr(), q.data_ptr(), weight, len(p))


def residual_probs(p: Tensor, q: Tensor, weight: float) -> Tensor | None:
    """Return the `residual` of p and q, or None if it is zero."""
    result = torch.empty_like(p)
    mass = _functions().residual(p.data_ptr(), q.data_ptr(), weight, len(p), result.data_ptr())
    return result if mass > 0 else None


def sparse_residual_probs(p: Tensor, ids: Tensor, q: Tensor, weight: float) -> Tensor | None:
    """Return the `residual` of p and `q` `[k]` of tokens `ids` `[k]`, or None if it is zero."""
    result = torch.empty_like(p)
    mass = _functions().sparse_residual(
        p.data_ptr(), ids.data_ptr(), q.data_ptr(), len(q), weight, len(p), result.data_ptr()
    )
    if mass < 0:
        raise ValueError("a draft distribution has a token outside the vocabulary")
    return result if mass > 0 else None
