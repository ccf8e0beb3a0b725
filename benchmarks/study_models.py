"""Models of studies: random weights, for passes whose results do not matter, and the chat model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdemo.core.errors import UserError
from specdemo.models.zoo import CHAT_PAIR, PAIRS


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    }


SHAPES = {
    "llama-300m": _llama(1280, 3840, 16, 20, tied=False),
    "llama-30m": _llama(512, 1536, 8, 8, tied=True),
}


def save_random(shape: dict[str, Any], folder: Path) -> None:
    """Save a model with random weights and the bundled tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PAIRS["bundled"].target).save_pretrained(folder)


def save_dequantised(folder: Path) -> None:
    """Write the chat model as a checkpoint in float32. Raises `UserError` if it is not installed."""
    if PAIRS[CHAT_PAIR].missing:
        raise UserError(f"the chat model is not installed: {PAIRS[CHAT_PAIR].missing}")
    file = Path(PAIRS[CHAT_PAIR].target)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del read.config.quantization_config  # otherwise it cannot be saved
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
