"""Quantisation to Q4_K and Q6_K; the package gguf only decodes them."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind.name == "Q4_K":
        return _q4_k(values.reshape(-1, 8, 32)).reshape(*values.shape[:-1], -1)
    if kind.name == "Q6_K":
        return _q6_k(values.reshape(-1, 16, 16)).reshape(*values.shape[:-1], -1)
    return gguf.quantize(values, kind)


def _factor(numbers: np.ndarray, limit: int) -> np.ndarray:
    return (np.abs(numbers).max(1, keepdims=True) / limit).astype(np.float16)


def _q4_k(groups: np.ndarray) -> np.ndarray:
    minima = np.maximum(-groups.min(2), 0)
    steps = (groups.max(2) + minima) / 15
    factors = _factor(steps, 63), _factor(minima, 63)
    scale, minimum = (
        (x / d.astype(np.float32)).round().astype(np.uint8) for x, d in zip((steps, minima), factors, strict=True)
    )
    step, offset = (q * d.astype(np.float32) for q, d in zip((scale, minimum), factors, strict=True))
    codes = ((groups + offset[..., None]) / step[..., None]).round().clip(0, 15).astype(np.uint8)
    data = codes[:, ::2] | codes[:, 1::2] << 4
    packed = (
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | minimum[:, 4:] << 4,
    )
    return np.concatenate([*(d.view(np.uint8) for d in factors), *packed, data.reshape(len(data), -1)], 1)


def _q6_k(groups: np.ndarray) -> np.ndarray:
    steps = np.abs(groups).max(2) / 31
    factor = _factor(steps, 127)
    scale = (steps / factor.astype(np.float32)).round().astype(np.int8)
    step = scale * factor.astype(np.float32)
    codes = ((groups / step[..., None]).round().clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate((codes[:, :, 0] & 15 | codes[:, :, 2] << 4, codes[:, :, 1] & 15 | codes[:, :, 3] << 4), -1)
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4))
    parts = (low, high, scale.view(np.uint8), factor.view(np.uint8))
    return np.concatenate([part.reshape(len(codes), -1) for part in parts], 1)
