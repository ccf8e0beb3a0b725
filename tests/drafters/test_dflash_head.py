"""DFlash and DSpark heads: rows by content, branches of drafts, and published layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import BLOCK, RANK, dflash_config, dflash_tensors, opened, save_head
from fakes.native_models import CONFIGS, random_model
from torch import Tensor

from specdemo.core.step import Draft
from specdemo.models.cached_head import Head
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.heads import load_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

CONFIG = CONFIGS["tied"]
IDS = [*range(0, 300, 3)]
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
KINDS = (False, True)


@pytest.fixture(scope="module")
def weights() -> NativeWeights:
    return NativeWeights(random_model(CONFIG))


def read(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], weights: NativeWeights) -> Head:
    spec = ModelSpec("small/target")
    name = save_head(folder, tensors, config)
    return load_head(HeadSpec(name, spec), LoadedModel(spec, weights, None, 0, ""))


def head_of_kind(folder: Path, markov: bool, weights: NativeWeights) -> Head:
    config = dflash_config(CONFIG, len(IDS), markov)
    config["transformer_layer_config"] |= WINDOW
    return read(folder, dflash_tensors(CONFIG, IDS, markov), config, weights)


TEXTS = ([*range(9)], [*range(12)], [*range(10), 99, 98], [*range(4), *range(50, 62)])


def drafts(head: Head, weights: NativeWeights, keep: bool = True) -> list[Tensor]:
    """Return the logits of drafts for a text that grows, loses tokens and changes; `keep` its rows in between."""
    target, results = CachedModel(weights, taps=head.taps), []
    cached = head.open(target)
    for tokens in TEXTS:
        if not keep:
            target = CachedModel(weights, taps=head.taps)
            cached = head.open(target)
        target.score(tokens[:-1], Draft())
        logits = cached.start(tokens)
        assert logits is not None
        count = cached.longest_draft(tokens)
        results.append(torch.stack([logits, *(cached.step(3 * i) for i in range(1, count))]))
    return results


@pytest.mark.parametrize("markov", KINDS)
def test_kept_rows_give_the_drafts_of_a_recomputation(markov: bool, tmp_path: Path, weights: Any) -> None:
    head = head_of_kind(tmp_path, markov, weights)
    for kept, expected in zip(drafts(head, weights), drafts(head, weights, keep=False), strict=True):
        torch.testing.assert_close(kept, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("markov", KINDS)
def test_branches_of_a_draft_are_independent(markov: bool, tmp_path: Path, weights: Any) -> None:
    text, states = opened(head_of_kind(tmp_path, markov, weights)), torch.randn(6, 3, CONFIG.hidden_size)
    text.start_rows([*range(6)], states, 0)
    first = [text.step(token) for token in (3, 6)]
    text.start_rows([*range(6)], states, 0)
    text.step(3)
    rows = text.draft_rows()
    other = text.step(9)
    text.restore(rows)
    assert torch.equal(text.step(6), first[1])
    assert torch.equal(other, first[1]) == (not markov)  # without it, tokens of a draft are independent


@pytest.mark.parametrize("wrong", [-1, CONFIG.vocab_size])
def test_tokens_outside_the_vocabulary_are_refused(wrong: int, tmp_path: Path, weights: Any) -> None:
    text = opened(head_of_kind(tmp_path, True, weights))
    text.start_rows([*range(6)], torch.randn(6, 3, CONFIG.hidden_size), 0)
    with pytest.raises(ValueError, match="is outside the vocabulary of 301 tokens"):
        text.step(wrong)


def test_confidence_may_ignore_the_token_before(tmp_path: Path, weights: Any) -> None:
    """The weights of that token are then not stored."""
    tensors, config = dflash_tensors(CONFIG, IDS, True), dflash_config(CONFIG, len(IDS), True)
    state_weights = tensors["confidence_head.proj.weight"][:, : CONFIG.hidden_size]
    states, confidences = torch.randn(6, 3, CONFIG.hidden_size), []
    for with_markov in (True, False):
        padding = torch.zeros(1, RANK if with_markov else 0)
        tensors["confidence_head.proj.weight"] = torch.cat([state_weights, padding], -1)
        settings = config | {"confidence_head_with_markov": with_markov}
        text = opened(read(tmp_path / str(with_markov), tensors, settings, weights))
        text.start_rows([*range(6)], states, 0)
        confidences.append(text.confidence)
    assert confidences[0] == pytest.approx(confidences[1]) and 0 < confidences[0] < 1


def test_drafts_end_with_block_and_context(tmp_path: Path, weights: Any) -> None:
    for markov, first in ((False, 1), (True, 0)):
        config = dflash_config(CONFIG, len(IDS), markov)
        config["transformer_layer_config"]["max_position_embeddings"] = 12
        head = read(tmp_path / str(markov), dflash_tensors(CONFIG, IDS, markov), config, weights)
        for length in range(8, 15):
            count = head.longest_draft(length)
            assert count == max(0, min(BLOCK, 13 - length) - first)
            if count:
                states = torch.randn(length - 1, 3, CONFIG.hidden_size)
                logits = opened(head).start_rows([*range(length - 1)], states, 0)
                assert len(logits) == len(IDS)


@pytest.mark.parametrize("layout", ["z-lab", "DeepSpec"])
def test_published_layouts_are_those_of_speculators(layout: str, tmp_path: Path, weights: Any) -> None:
    """They nest no configuration of layers, and list outputs of layers instead of hidden states."""
    markov = layout == "DeepSpec"
    tensors, config = dflash_tensors(CONFIG, None, markov), dflash_config(CONFIG, CONFIG.vocab_size, markov)
    expected = drafts(read(tmp_path / "speculators", tensors, config, weights), weights)
    flat = config | config.pop("transformer_layer_config")
    taps, mask = [tap - 1 for tap in config.pop("aux_hidden_state_layer_ids")], config.pop("mask_token_id")
    own = {"target_layer_ids": taps, "mask_token_id": mask}
    architecture = "Qwen3DSparkModel" if markov else "DFlashDraftModel"
    flat |= {"architectures": [architecture], **(own if markov else {"dflash_config": own})}
    for key in ("speculators_model_type", "aux_hidden_state_layer_ids", "transformer_layer_config"):
        flat.pop(key, None)
    actual = drafts(read(tmp_path / layout, tensors, flat, weights), weights)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
