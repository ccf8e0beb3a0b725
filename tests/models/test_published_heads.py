"""Heads that published implementations have written give their logits; see the recording programs in `fixtures/`."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import TorchEagle3
from specdemo.models.heads import read_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

FIXTURE = Path(__file__).parent / "fixtures" / "speculators_eagle3"
HEADS = {"native": partial(NativeHead, form="float32"), "torch": TorchEagle3}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("engine", HEADS)
def test_drafts_have_the_logits_of_speculators(engine: str, before: bool, tmp_path: Path) -> None:
    """Drafts of any start: committed rows, then drafted tokens."""
    folder = shutil.copytree(FIXTURE, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": before}))
    layer: dict[str, Any] = config["transformer_layer_config"] | {"num_hidden_layers": 8}
    weights, spec = NativeWeights(LlamaForCausalLM(LlamaConfig(**layer)).eval()), ModelSpec("small/target")
    target = LoadedModel(spec, weights, None, 0, "native")
    head = HEADS[engine](read_head(HeadSpec(str(folder), spec), target), weights)
    recorded = load_file(folder / "outputs.safetensors")
    expected, states = recorded[f"logits, norm_before_residual {before}"], recorded["states"]
    tokens, cache = recorded["tokens"].tolist(), head.open()
    steps = len(expected)
    for rows in range(1, len(tokens) - steps + 2):
        logits = [head.start(cache, tokens[:rows], states[:rows], 0)]
        logits += [head.step(cache, token) for token in tokens[rows : rows + steps - 1]]
        torch.testing.assert_close(torch.stack(logits), expected[:, rows - 1], rtol=1e-3, atol=1e-4)
    assert head.taps == (2, 3, 5)
