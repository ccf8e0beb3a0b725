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


def loaded(folder: Path, make: Callable[..., Head]) -> tuple[dict[str, torch.Tensor], Head]:
    """Return the outputs recorded in `folder` and its head for a small target."""
    recorded = load_file(folder / "outputs.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**TARGET, head_dim=4, num_hidden_layers=8, vocab_size=20)).eval()
    if "output" in recorded:
        model.lm_head.weight.data = recorded["output"]
    if "embeddings" in recorded:
        model.model.embed_tokens.weight.data = recorded["embeddings"]
    weights, spec = NativeWeights(model), ModelSpec("small/target")
    return recorded, make(
        read_head(HeadSpec(str(folder), spec), LoadedModel(spec, weights, None, 0, "native")), weights
    )


def check(folder: Path, make: Callable[..., Head], key: str = "logits", taps: tuple[int, ...] = (2, 4, 5)) -> None:
    """Draft from every row: committed rows, then tokens of the text."""
    recorded, head = loaded(folder, make)
    tokens, states, cache = recorded["tokens"].tolist(), recorded["states"], head.open()
    expected, steps = recorded[key], len(recorded[key])
    rounding = 1e-4 + 1e-5 * float(expected.abs().max())  # random weights of EAGLE give logits of several hundred
    for rows in range(1, len(tokens) - steps + 2):
        logits = [head.start(cache, tokens[:rows], states[:rows], 0)]
        logits += [head.step(cache, token) for token in tokens[rows : rows + steps - 1]]
        torch.testing.assert_close(torch.stack(logits), expected[:, rows - 1], rtol=1e-3, atol=rounding)
    assert head.taps == taps


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("make", [NATIVE, TorchEagle3])
def test_speculators(make: Callable[..., Head], before: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "speculators_eagle3", tmp_path / "head")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_before_residual": before}))
    check(folder, make, "logits, {'norm_before_residual': True}" if before else "logits, {}", (2, 3, 5))


@pytest.mark.parametrize("variant", ["input_norm", "output_norm"])
def test_further_norms_of_speculators(variant: str) -> None:
    folder = FIXTURES / f"speculators_eagle3_{variant}"
    (key,) = (key for key in load_file(folder / "outputs.safetensors") if key.startswith("logits"))
    check(folder, head_of, key, (2, 3, 5))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_block_heads_of_speculators(name: str) -> None:
    """Recorded after each token from the second on; rows of a DFlash block after the first draft."""
    folder = FIXTURES / f"speculators_{name}"
    recorded, head = loaded(folder, head_of)
    tokens, states, cache = recorded["tokens"].tolist(), recorded["states"], head.open()
    first = 1 if name == "dflash" else 0
    for row, expected in enumerate(recorded["logits"]):
        text = tokens[1 : row + 2]
        logits, confidences = [head.start(cache, text, states[: row + 1], 0)], [head.confidence(cache)]
        for token in tokens[row + 2 : row + len(expected) - first + 1]:
            logits.append(head.step(cache, token))
            confidences.append(head.confidence(cache))
        assert len(logits) == head.longest_draft(len(text) + 1) == len(expected) - first
        torch.testing.assert_close(torch.stack(logits), expected[first:], rtol=1e-3, atol=1e-4)
        if "confidences" in recorded:
            torch.testing.assert_close(torch.tensor(confidences), recorded["confidences"][row], rtol=1e-3, atol=1e-4)
    assert head.kind == "block" and head.taps == (2, 3, 5)


@pytest.mark.parametrize("make", [NATIVE, TorchEagle3])
def test_eagle_3(make: Callable[..., Head]) -> None:
    check(FIXTURES / "eagle3", make)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_on_the_final_state(kind: str) -> None:
    check(FIXTURES / kind, head_of, taps=(8,))
