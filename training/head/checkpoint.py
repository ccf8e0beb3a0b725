"""Saving and loading of heads; tensors have the names of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.head.eagle3 import Eagle3
from training.head.kind import DraftHead
from training.head.medusa import Medusa
from training.head.target import Target

KINDS: dict[str, type[DraftHead]] = {"eagle3": Eagle3, "medusa": Medusa}


TRAINED = "training_tokens"  # key of config.json


def trained_tokens(folder: Path) -> int:
    """Return the tokens that a stored head has seen, each as often as it was used."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return int(config.get(TRAINED, 0))


def save(head: DraftHead, target: Target, folder: Path, tokens: int) -> None:
    """Write `model.safetensors` and `config.json`. `d2t` holds offsets: target id = draft id + d2t[draft id].

    `tokens`: those that the head has seen.
    """
    ids = head.vocabulary.cpu()
    used = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    used[ids] = True
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": used}, folder / "model.safetensors")
    config: dict[str, Any] = {
        name: getattr(target.config, name)
        for name in (
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
    }
    config |= {"draft_vocab_size": len(ids), "tie_word_embeddings": head.lm_head is None, TRAINED: tokens}
    config |= head.settings(target.taps)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def load(kind: type[DraftHead], folder: Path, target: Target) -> DraftHead:
    """Read a head written by `save`."""
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors.pop("d2t")
    del tensors["t2d"]
    ids = offsets + torch.arange(len(offsets))
    head = kind(target.config, len(target.taps), ids, "lm_head.weight" in tensors)
    head.start_from(target)
    head.load_state_dict(tensors)
    return head
