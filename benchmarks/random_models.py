"""Published shapes of well-known models, and models of those shapes with random weights: speed without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# The named ones from the models' own config.json; "model_type" is qwen2 unless it says otherwise.
SHAPES: dict[str, dict[str, int | bool | str]] = {
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "tiny": {  # to try a script out
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "llama-30m": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "llama-100m": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "llama-300m": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 1280,
        "intermediate_size": 3840,
        "num_hidden_layers": 16,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen2-wide": {  # most of it is vocabulary
        "vocab_size": 151936,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "pythia-70m": {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "tie_word_embeddings": False,
    },
}
LONG = {"max_position_embeddings": 32768, "rope_theta": 1e6}  # for what has no limit of its own


def save_random(shape: str, folder: Path, tokenizer: str, dtype: torch.dtype, device: torch.device) -> None:
    """Write a model of this shape, drawn on `device`, with a tokenizer that it knows all ids of."""
    chosen = {"model_type": "qwen2", **SHAPES[shape]}
    kind = chosen.pop("model_type")
    config = AutoConfig.for_model(kind, **({} if kind == "gpt2" else LONG), **chosen)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
