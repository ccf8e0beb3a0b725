"""Attention masks of the Llama engine: alignment required by CUDA's memory-efficient attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes.tiny_models import LLAMA
from transformers import AutoModelForCausalLM, LlamaConfig

from specdemo.core.step import Draft
from specdemo.models.engines import llama
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel

ALIGNMENT = 16  # bytes: `CHECK_ALIGNED_PTR(attn_bias_ptr)`


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_aligned_for_all_row_counts_lengths_and_forests(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[torch.Tensor] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recorded(*states: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attention(*states, attn_mask=attn_mask, **options)

    monkeypatch.setattr(llama.F, "scaled_dot_product_attention", recorded)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048})).to(dtype)
    cached = CachedModel(LlamaWeights(model.eval().requires_grad_(False)))
    for length in (*range(3, 40), 511, 514, 700, 1033):
        for rows in (1, 2, 3, 5, 8, 16, 17):
            cached.score([1] * length, Draft())
            cached.score([1] * (length + 1), Draft.chain((2,) * (rows - 1)))
        cached.score([1] * (length + 2), Draft((3, 4, 5), (-1, -1, 0)))
    assert len(masks) > 500
    for mask in masks:
        assert mask.data_ptr() % ALIGNMENT == 0 and mask.stride(0) * mask.element_size() % ALIGNMENT == 0
