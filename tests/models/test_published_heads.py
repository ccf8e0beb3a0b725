"""Heads written by published programs give the logits of these; see the recording programs in `fixtures/`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.engines.head import Head
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.select import head_of
from specdemo.models.engines.torch_head import TorchEagle3
from specdemo.models.heads import read_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

FIXTURES = Path(__file__).parent / "fixtures" / "published_heads"
NATIVE: Callable[..., Head] = partial(NativeHead, form="float32")
TARGET = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def check(folder: Path, make: Callable[..., Head], key: str = "logits", taps: tuple[int, ...] = (2, 4, 5)) -> None:
    """Draft from every row: committed rows, then tokens of the text."""
    recorded = load_file(folder / "outputs.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**TARGET, head_dim=4, num_hidden_layers=8, vocab_size=20)).eval()
    if "output" in recorded:
        model.lm_head.weight.data = recorded["output"]
    weights, spec = NativeWeights(model), ModelSpec("small/target")
    head = make(read_head(HeadSpec(str(folder), spec), LoadedModel(spec, weights, None, 0, "native")), weights)
    tokens, states, cache = recorded["tokens"].tolist(), recorded["states"], head.open()
    expected, steps = recorded[key], len(recorded[key])
    for rows in range(1, len(tokens) - steps + 2):
        logits = [head.start(cache, tokens[:rows], states[:rows], 0)]
        logits += [head.step(cache, token) for token in tokens[rows : rows + steps - 1]]
        torch.testing.assert_close(torch.stack(logits), expected[:, rows - 1], rtol=1e-3, atol=1e-4)
    assert head.taps == taps


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("make", [NATIVE, TorchEagle3])
def test_speculators(make: Callable[..., Head], before: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "speculators_eagle3", tmp_path / "head")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": before}))
    check(folder, make, f"logits, norm_before_residual {before}", (2, 3, 5))


@pytest.mark.parametrize("make", [NATIVE, TorchEagle3])
def test_eagle_3(make: Callable[..., Head]) -> None:
    check(FIXTURES / "eagle3", make)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_on_the_final_state(kind: str) -> None:
    check(FIXTURES / kind, head_of, taps=(8,))
