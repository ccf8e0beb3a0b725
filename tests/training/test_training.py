"""Training: exact resumption, complete batches, correct objectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_models import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from training import card, curve, objectives
from training.corpus import batch, standard_library, train_tokenizer
from training.fit import Schedule, fit

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 61, 4000).astype(np.uint16)
SCHEDULE = Schedule(steps=6, tokens=64, short=16, long=32, warmup=2, save_every=3)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))


def train(folder: Path, schedule: Schedule, stop_at: int | None = None) -> LlamaForCausalLM:
    trained = model()

    def batches(step: int) -> torch.Tensor:
        if step == stop_at:
            raise KeyboardInterrupt
        length = schedule.length(step)
        return torch.from_numpy(batch(TOKENS, step, schedule.tokens // length, length, seed=1))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return objectives.prediction(trained, ids)

    fit(trained, loss, batches, schedule, folder / "state.pt", lambda step: 0.0, "test")
    return trained


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    uninterrupted = train(tmp_path / "a", SCHEDULE)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", SCHEDULE, stop_at=4)
    resumed = train(tmp_path / "b", SCHEDULE)
    for parameter, resumed_parameter in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, resumed_parameter)
    assert any(not torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), model().parameters(), strict=True))


def test_training_learns() -> None:
    trained = model()
    ids = torch.from_numpy(batch(TOKENS, 0, 4, 32, seed=1))
    before = objectives.prediction(trained, ids).item()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        objectives.prediction(trained, ids).backward()
        optimizer.step()
    assert objectives.prediction(trained, ids).item() < before - 1


def test_an_epoch_shows_every_piece_once() -> None:
    length, size = 16, 8
    tokens = np.arange(1000).astype(np.uint16)
    pieces = (1000 - length) // length // size * size
    rows = np.concatenate([batch(tokens, step, size, length, seed=2) for step in range(pieces // size)])
    assert len({row[0] for row in rows.tolist()}) == len(rows) == pieces
    assert all(row == list(range(row[0], row[0] + length)) for row in rows.tolist())
    again = batch(tokens, pieces // size, size, length, seed=2)
    assert again.tolist() != rows[:size].tolist()  # the next epoch has other cuts and another order


def test_the_rate_has_warmup_constant_and_decay_phases() -> None:
    schedule = replace(SCHEDULE, steps=100, warmup=10, decay_part=0.4)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and set(rates[10:60]) == {1.0} and rates[80] == 0.5 and 0 < rates[99] < 0.03
    assert schedule.length(79) == 16 and schedule.length(80) == 32


def test_the_agreement_loss_is_zero_only_for_equal_distributions() -> None:
    target, ids = model(), torch.from_numpy(batch(TOKENS, 0, 2, 32, seed=1))
    assert objectives.agreement([target], target, ids).item() == pytest.approx(0, abs=1e-3)
    other = LlamaForCausalLM(target.config)
    single = objectives.agreement([other], target, ids)
    assert single.item() > 1e-3
    both = objectives.agreement([other, other], target, ids)
    assert both.item() == pytest.approx(2 * single.item(), rel=1e-3)
    assert objectives.held_out_agreement(target, target, TOKENS, 64, 2) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_the_curve_of_drafters(tmp_path: Path) -> None:
    """Alpha is 1 for the target and lower for another model; a saved curve is loaded unchanged."""
    target = model().eval()
    other = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 1}, tie_word_embeddings=True)).eval()
    same, less = curve.measure({"same": target, "other": other}, target, np.tile(TOKENS, 2)[:2048])
    assert (same.alpha, same.first) == pytest.approx((1.0, 1.0), abs=1e-3) and same.c > 0
    assert less.alpha < 0.99
    assert curve.write([same, less], tmp_path).count("\n") == 3
    assert curve.read(tmp_path) == [same, less] and curve.read(tmp_path / "nowhere") == []


def test_prompts_that_end_with_a_line_or_indentation_keep_their_tokens() -> None:
    """Tokens of such a prefix are a prefix of the tokens of the text."""
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


def test_the_card_of_the_pair_has_the_weight_of_the_objective() -> None:
    sentence = f"{objectives.REJECTION_WEIGHT:g} times the rejection rate"
    assert sentence in (Path(__file__).parents[2] / "assets/pair/README.md").read_text("utf-8")
    assert sentence in card.CARD.replace("{weight:g}", f"{objectives.REJECTION_WEIGHT:g}")
