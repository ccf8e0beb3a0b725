"""Quantised layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from specdemo.models.quantization import load_options
from specdemo.models.spec import ModelSpec


def test_int8_rows_do_not_depend_on_outliers_in_other_rows(tmp_path: Path) -> None:
    """LLM.int8() with a threshold computes outlier columns of any row in 16 bits for all rows (2208.07339)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)

    def rows_differ(options: dict[str, Any]) -> bool:
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
        layer = model.model.layers[0].mlp.up_proj
        rows = torch.randn(2, 64)
        alone = layer(rows[:1])
        rows[1, :40] = 50.0
        return not torch.equal(alone, layer(rows)[:1])

    assert not rows_differ(load_options(ModelSpec("any", "float32", "int8", "cpu")))
    assert rows_differ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)})  # the default threshold
