"""Training: resumable to the bit, batches that cover the text, and objectives that mean what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_models import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from training import curve, objectives
from training.corpus import batch, standard_library, train_tokenizer
from training.fit import Schedule, fit

TOKENS = np.random.default_rng(0).integers(0, 61, 4000).astype(np.uint16)
SCHEDULE = Schedule(steps=6, tokens=64, short=16, long=32, warmup=2, save_every=3)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))


def train(folder: Path, schedule: Schedule, stop_at: int | None = None) -> LlamaForCausalLM:
    one = model()

    def batches(step: int, size: int, length: int) -> torch.Tensor:
        if step == stop_at:
            raise KeyboardInterrupt
        return torch.from_numpy(batch(TOKENS, step, size, length, seed=1))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return objectives.prediction(one, ids)

    fit(one, loss, batches, schedule, folder / "state.pt", lambda: 0.0, "test")
    return one


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "a", SCHEDULE)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", SCHEDULE, stop_at=4)
    resumed = train(tmp_path / "b", SCHEDULE)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), model().parameters(), strict=True))


def test_training_learns() -> None:
    one = model()
    ids = torch.from_numpy(batch(TOKENS, 0, 4, 32, seed=1))
    before = objectives.prediction(one, ids).item()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        objectives.prediction(one, ids).backward()
        optimizer.step()
    assert objectives.prediction(one, ids).item() < before - 1


def test_an_epoch_shows_every_piece_once() -> None:
    length, size = 16, 8
    tokens = np.arange(1000).astype(np.uint16)
    pieces = (1000 - length) // length // size * size
    rows = np.concatenate([batch(tokens, step, size, length, seed=2) for step in range(pieces // size)])
    assert len({row[0] for row in rows.tolist()}) == len(rows) == pieces
    assert all(row == list(range(row[0], row[0] + length)) for row in rows.tolist())
    again = batch(tokens, pieces // size, size, length, seed=2)
    assert again.tolist() != rows[:size].tolist()  # the next epoch cuts and shuffles anew


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    schedule = replace(SCHEDULE, steps=100, warmup=10, decay_part=0.4)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and set(rates[10:60]) == {1.0} and rates[80] == 0.5 and 0 < rates[99] < 0.03
    assert schedule.length(79) == 16 and schedule.length(80) == 32


def test_agreement_is_nothing_to_gain_only_where_the_laws_are_equal() -> None:
    target, ids = model(), torch.from_numpy(batch(TOKENS, 0, 2, 32, seed=1))
    assert objectives.agreement([target], target, ids).item() == pytest.approx(0, abs=1e-3)
    other = LlamaForCausalLM(target.config)
    alone = objectives.agreement([other], target, ids)
    assert alone.item() > 1e-3
    both = objectives.agreement([other, other], target, ids)
    assert both.item() == pytest.approx(2 * alone.item(), rel=1e-3)
    assert objectives.held_out_agreement(target, target, TOKENS, 64, 2) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_the_curve_of_drafters(tmp_path: Path) -> None:
    """A drafter that is the target agrees always, another less; what is kept is what is read."""
    target = model().eval()
    other = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 1}, tie_word_embeddings=True)).eval()
    same, less = curve.measure({"same": target, "other": other}, target, np.tile(TOKENS, 2)[:2048])
    assert (same.alpha, same.first) == pytest.approx((1.0, 1.0), abs=1e-3) and same.c > 0
    assert less.alpha < 0.99
    assert curve.write([same, less], tmp_path).count("\n") == 3
    assert curve.read(tmp_path) == [same, less] and curve.read(tmp_path / "nowhere") == []


def test_prompts_may_end_where_a_line_or_its_indentation_ends() -> None:
    """Cut after a line break or an indentation, a text has the tokens that it has in the whole."""
    tokenizer = train_tokenizer([path.read_text("utf-8") for path in standard_library()[:40]])
    text = "def f(a):\n    if a:\n        return g(a)\n\n\nclass B:\n    pass\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for cut in (
        "def f(a):\n",
        "def f(a):\n    ",
        "def f(a):\n    if a:\n        ",
        "def f(a):\n    if a:\n        return",
    ):
        assert ids[: len(tokenizer.encode(cut))] == tokenizer.encode(cut)


def test_the_corpus_is_the_standard_library() -> None:
    names = {path.name for path in standard_library()}
    assert {"argparse.py", "dataclasses.py", "threading.py"} <= names
    assert not any("site-packages" in str(path) for path in standard_library())
