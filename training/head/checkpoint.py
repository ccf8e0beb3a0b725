"""Saving and loading of heads; tensors have the names of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.head.eagle3 import Eagle3
from training.head.target import Target

TRAINED = "training_tokens"  # key of config.json
OF_TARGET = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
    "max_position_embeddings",
)


def trained_tokens(folder: Path) -> int:
    """Return the tokens that a stored head has seen, each as often as it was used."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return int(config.get(TRAINED, 0))


def save(head: Eagle3, target: Target, folder: Path, tokens: int) -> None:
    """Write `model.safetensors` and `config.json`. `d2t` holds offsets: target id = draft id + d2t[draft id].

    `tokens`: those that the head has seen.
    """
    ids = head.vocabulary.cpu()
    used = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    used[ids] = True
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    offsets = {"d2t": ids - torch.arange(len(ids)), "t2d": used}
    save_file(tensors | offsets, folder / "model.safetensors")
    config: dict[str, Any] = {name: getattr(target.config, name) for name in OF_TARGET} | {
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": True,
        TRAINED: tokens,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [*target.taps],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def load(folder: Path, target: Target) -> Eagle3:
    """Read a head written by `save`, in float32."""
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors.pop("d2t")
    del tensors["t2d"]
    ids = offsets + torch.arange(len(offsets))
    head = Eagle3(target.config, len(target.taps), ids)
    head.load_state_dict(tensors)
    return head.to(target.embeddings.device)
