"""Rows of a head see a window: long prompts need no other rows, and drafts depend on the text alone."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import checkpoint, opened, save_head
from fakes.native_models import CONFIGS, random_model
from torch import Tensor

from specdemo.core.sampling import ChainSampler, Noise, SamplingParams
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_pass import CHAIN_ROWS
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.head_kinds.eagle import TorchEagle3
from specdemo.models.heads import load_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

TARGET = CONFIGS["llama"]
IDS = [*range(3, 40), 77, 300]
WINDOW = 8
TEXT = [(31 * i) % 290 for i in range(1, 30)]
WEIGHTS = NativeWeights(random_model(TARGET))
MAKERS: dict[str, Callable[..., Head] | None] = {
    "native": partial(NativeHead, form="float32"),
    "torch": TorchEagle3,
    "eagle": None,
    "medusa": None,
    "dflash": None,
}


@pytest.fixture(params=MAKERS)
def head(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(Head, "window", WINDOW)
    make, spec = MAKERS[request.param], ModelSpec("small/target")
    name = save_head(tmp_path, *checkpoint("eagle3" if make else request.param, TARGET, IDS))
    return load_head(HeadSpec(name, spec), LoadedModel(spec, WEIGHTS, None, 0, "native"), make=make)


def states(head: Head) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(len(TEXT), len(head.taps), TARGET.hidden_size, generator=generator)


def draft(text: CachedHead, tokens: Sequence[int]) -> Tensor:
    """Return the logits of three draft tokens over the static vocabulary."""
    rows = [text.start(tokens), text.step(7), text.step(9)]
    return torch.stack([row[: len(IDS)].clone() for row in rows if row is not None])


def difference(head: Head, rows: Tensor, tokens: Sequence[int], first: int) -> float:
    """Return the largest difference from a head that is given the text from `first` on, at positions from 0."""
    expected = draft(opened(head, states(head)[first:]), tokens[first:])
    return float((rows - expected).abs().max())


@pytest.mark.parametrize("length", [5, WINDOW + 1, WINDOW + 2, 21])
def test_drafts_of_a_prompt_need_the_rows_of_its_window(head: Head, length: int) -> None:
    text: Any = opened(head, states(head))
    first_rows: list[int] = []
    given = text.target.states

    def recorded(tokens: Sequence[int], start: int) -> Tensor | None:
        first_rows.append(start)
        return given(tokens, start)

    text.target.states = recorded
    rows, first = draft(text, TEXT[:length]), max(0, length - 1 - WINDOW)
    assert first_rows == [first]
    assert difference(head, rows, TEXT[:length], first) < 1e-3
    cut = difference(head, rows, TEXT[:length], first + 1)
    assert (cut > 1e-2) is (head.kind != "medusa")


def test_texts_draft_alike_after_all_texts_before(head: Head) -> None:
    """Answers and turns continue rows, edits end before the window."""
    text = opened(head, states(head))
    for length in (6, 9, 12, 13, 27, 29, 26, 14, 5, 7, 28):
        rows = draft(text, TEXT[:length])
        exact = isinstance(head, NativeHead)
        assert difference(head, rows, TEXT[:length], 0) <= (0 if exact else 1e-4), length


def test_tokens_of_missing_rows_extend_the_draft_vocabulary(head: Head) -> None:
    text = opened(head, states(head))
    for length in (24, 27, 4, 26):
        text.start(TEXT[:length])
        if head.extends:
            assert text.ids is not None
            assert text.ids.tolist() == [*IDS, *(token for token in TEXT[1:length] if token not in IDS)]


def test_rows_without_logits_store_the_same_keys_and_values(tmp_path: Path) -> None:
    name = save_head(tmp_path, *checkpoint("eagle3", TARGET, IDS))
    spec = ModelSpec("small/target")
    head = load_head(HeadSpec(name, spec), LoadedModel(spec, WEIGHTS, None, 0, "native"), make=NativeHead)
    by_token, at_once = opened(head, states(head)), opened(head, states(head))
    by_token.start(TEXT)
    sampler = ChainSampler(SamplingParams(temperature=0), Noise(1, "draft"), len(TEXT), TARGET.vocab_size)
    assert len(at_once.sample_chain(TEXT, sampler, [0.0])) == 1
    assert len(TEXT) > CHAIN_ROWS + 1 and by_token.cache.kv.any()
    assert torch.equal(by_token.cache.kv, at_once.cache.kv)
