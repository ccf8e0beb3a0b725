"""Training: training-time test, gradients, exact resumption, removal of evaluation prompts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.heads import opened
from fakes.tiny_models import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.heads import load_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec
from training.fit import Schedule, fit
from training.head import conversations, eagle3
from training.head.conversations import Batch, Batches, Conversation
from training.head.eagle3 import Eagle3
from training.head.target import Target

pytestmark = pytest.mark.slow
TAPS = (0, 1)
STEPS = 4
SYSTEM = [7, 7, 3]  # first tokens of every conversation
RNG = np.random.default_rng(0)


def conversation(length: int, setting: str = "greedy") -> Conversation:
    """Two turns of random tokens without neighbouring equal ones; the second half of each turn is an answer."""
    tokens = np.concatenate([SYSTEM, RNG.integers(1, 61, length).cumsum() % 61]).astype(np.uint16)
    place = (np.arange(length) * 4 // length) % 2 == 1
    return Conversation(tokens, np.concatenate([np.zeros(len(SYSTEM), bool), place]), setting)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "max_position_embeddings": 256}, tie_word_embeddings=True)).eval()
    for parameter in model.parameters():  # far from uniform distributions
        parameter.data.mul_(3.0 if parameter.ndim == 2 else 1.0)
    return model


@pytest.fixture(scope="module")
def target(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return Target(str(folder), TAPS)


def random_head(target: Target) -> Eagle3:
    torch.manual_seed(1)
    head = Eagle3(target.config, len(TAPS), torch.randperm(61)[:40].sort().values)
    for parameter in head.parameters():
        parameter.data.normal_(0.0, 0.3)
    return head


def saved(folder: Path, items: list[Conversation]) -> None:
    spans = []
    for number, item in enumerate(items):
        edges = np.flatnonzero(np.diff(item.answers.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        spans += [(number, begin, end) for begin, end in edges]
    np.savez(
        folder / "part1.npz",
        tokens=np.concatenate([item.tokens for item in items]),
        lengths=np.array([len(item.tokens) for item in items], np.int32),
        spans=np.array(spans, np.int32),
        settings=np.array([item.setting for item in items]),
    )


def test_conversations_that_share_13_tokens_with_a_prompt_are_removed(tmp_path: Path) -> None:
    items = [conversation(40) for _ in range(400)]
    saved(tmp_path, items)
    texts = [item.tokens.tolist() for item in items]
    prompts = [[60, *texts[1][10:23], 60], [60, *texts[2][10:22], 60, *texts[3][20:32]], texts[4][5:30], [1, 2]]
    split = conversations.load(tmp_path, prompts)
    assert split.shared == 2 and len(split.held_out) == conversations.HELD_OUT >= 300
    remaining = [item.tokens.tolist() for item in (*split.train, *split.held_out)]
    assert sorted(remaining) == sorted(text for i, text in enumerate(texts) if i not in (1, 4))
    assert {item.answers.tolist() == items[0].answers.tolist() for item in split.train} == {True}


def test_a_saved_head_drafts_in_the_program_as_in_training(
    model: LlamaForCausalLM, target: Target, tmp_path: Path
) -> None:
    """Rows of all unrolled steps equal drafts that receive states of the head."""
    head = random_head(target).bfloat16().float()
    eagle3.save(head, target, tmp_path, 4096)
    tensors = eagle3.load_file(tmp_path / "model.safetensors")
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(ids, head.vocabulary) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert eagle3.trained_tokens(tmp_path) == 4096
    tokens = torch.from_numpy(conversation(20).tokens.astype(np.int64))
    taps = torch.randn(1, len(tokens), len(TAPS) * target.config.hidden_size)
    unrolled = eagle3.load(tmp_path, target)(taps, tokens[None], target.embeddings, STEPS)
    spec = ModelSpec("target")
    loaded = load_head(HeadSpec(str(tmp_path), spec), LoadedModel(spec, model, None, 0, "transformers"))
    for last in (0, 5, len(tokens) - 1 - STEPS):
        text, states = opened(loaded), taps[0, : last + 1].unflatten(-1, (len(TAPS), -1))
        rows = [text.start_rows(tokens[1 : last + 2].tolist(), states, 0)]
        rows += [text.step(int(token)) for token in tokens[last + 2 : last + 1 + STEPS]]
        for i, row in enumerate(rows):
            logits = unrolled[i][0, last] @ target.rows[head.vocabulary].T
            assert torch.allclose(row[: len(logits)], logits, atol=1e-3), (last, i)


def test_the_loss_in_blocks_equals_the_loss_of_all_rows(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients."""
    monkeypatch.setattr(eagle3, "BLOCKS", {"cpu": 7})
    head, batch = random_head(target), conversations.padded([conversation(340), conversation(24)])
    assert set(np.unique(batch.weights)) == {0, 1, 2}
    value = eagle3.loss(head, target, STEPS, batch)
    value.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        drafted, rows = eagle3.states_of(head, target, batch, STEPS)
        p = (rows.final.bfloat16() @ target.output.T).float().softmax(-1)[:, head.vocabulary]
        terms = []
        for i, states in enumerate(drafted):
            q = (rows.of(states, i) @ target.output[head.vocabulary].T).float().softmax(-1)
            row = -(p * q.log()).sum(-1) + 1 - torch.minimum(p, q).sum(-1)
            terms.append(0.8**i * (rows.weight * row).sum() / rows.weight.sum())
    expected = sum(terms) / sum(0.8**i for i in range(STEPS))
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, parameter in head.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 0.03 * parameter.grad.norm(), name


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(target: Target, tmp_path: Path) -> None:
    batches = Batches([conversation(30) for _ in range(12)], 128, seed=0)
    schedule = Schedule(steps=5, lr=1e-2, warmup=1, save_every=2)

    def train(folder: Path, stop_at: int | None = None) -> Eagle3:
        torch.manual_seed(0)
        head = Eagle3(target.config, len(TAPS), torch.arange(40))
        head.start_from(target)

        def batch(step: int) -> Batch:
            if step == stop_at:
                raise KeyboardInterrupt
            return batches(step)

        fit(head, partial(eagle3.loss, head, target, 2), batch, schedule, folder / "state.pt", lambda _: 0.0, "head")
        return head

    complete = train(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", stop_at=3)
    resumed = train(tmp_path / "b")
    for (name, first), second in zip(complete.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(first, second), name
