"""Training of the bundled pair: complete batches, correct objectives, a tokenizer that agrees with prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_models import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from training import objectives
from training.corpus import batch, standard_library, train_tokenizer

pytestmark = pytest.mark.slow


def test_an_epoch_shows_every_piece_once() -> None:
    length, size = 16, 8
    tokens = np.arange(1000).astype(np.uint16)
    pieces = (1000 - length) // length // size * size
    rows = np.concatenate([batch(tokens, step, size, length, seed=2) for step in range(pieces // size)])
    assert len({row[0] for row in rows.tolist()}) == len(rows) == pieces
    assert all(row == list(range(row[0], row[0] + length)) for row in rows.tolist())
    again = batch(tokens, pieces // size, size, length, seed=2)
    assert again.tolist() != rows[:size].tolist()  # the next epoch has other cuts and another order


def test_losses_are_least_for_equal_distributions_and_have_gradients() -> None:
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    other = LlamaForCausalLM(target.config)
    ids = torch.randint(0, 61, (2, 256))
    assert objectives.agreement(target, target, ids).item() == pytest.approx(0, abs=1e-3)
    apart = objectives.agreement(other, target, ids)
    apart.backward()
    assert apart.item() > 1e-3 and all(parameter.grad.norm() > 0 for parameter in other.parameters())
    looping = objectives.without_loops(other, target, ids, prompts=2, new=24)
    assert objectives.without_loops(target, target, ids, prompts=2, new=24).item() < looping.item()
    tokens = [1, 2, 3, *[4, 5] * 6, 6]
    assert objectives.loops(torch.tensor([tokens]))[0].tolist() == [False] * 12 + [True] * 3 + [False]


def test_prompts_that_end_with_a_line_or_indentation_keep_their_tokens() -> None:
    """Tokens of such a prefix are a prefix of the tokens of the text."""
    files = standard_library()
    assert {"argparse.py", "threading.py"} <= {path.name for path in files}
    tokenizer = train_tokenizer([path.read_text("utf-8") for path in files[:40]])
    text = "def f(a):\n    if a:\n        return g(a)\n\n\nclass B:\n    pass\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for end in ("f(a):\n", "f(a):\n    ", "if a:\n        ", "return"):
        prefix = text[: text.index(end) + len(end)]
        assert ids[: len(tokenizer.encode(prefix))] == tokenizer.encode(prefix)


def test_the_card_of_the_pair_has_the_weight_of_the_objective() -> None:
    sentence = f"{objectives.REJECTION_WEIGHT:g} times the rejection rate"
    assert sentence in (Path(__file__).parents[2] / "assets/pair/README.md").read_text("utf-8")
