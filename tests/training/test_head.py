"""Draft heads in training: filters of conversations, shifts, training-time test, acceptance, exact resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_models import LLAMA, TEMPLATE, byte_level_tokenizer, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.heads import load_head
from specdemo.models.load import LoadedModel, load
from specdemo.models.spec import HeadSpec, ModelSpec
from training.fit import Schedule, fit
from training.head import checkpoint, conversations, generate, objective, vocabulary_study
from training.head.__main__ import HeldOut
from training.head.conversations import Batch, Batches, Conversation
from training.head.eagle3 import Eagle3
from training.head.kind import DraftHead
from training.head.layers import MergedAttention
from training.head.medusa import HEADS, Medusa
from training.head.target import Target

TAPS = (0, 1, 2)
STEPS = 4
SYSTEM = [7, 7, 3]  # first tokens of every conversation
RNG = np.random.default_rng(0)


def conversation(length: int, setting: str = "greedy", classes: tuple[str, ...] = ("own",)) -> Conversation:
    """Two turns of random tokens without neighbouring equal ones; the second half of each turn is an answer."""
    tokens = np.concatenate([SYSTEM, RNG.integers(1, 61, length).cumsum() % 61]).astype(np.uint16)
    place = (np.arange(length) * 4 // length) % 2 == 1
    return Conversation(tokens, np.concatenate([np.zeros(len(SYSTEM), bool), place]), setting, classes)


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


def taps_of(kind: type[DraftHead]) -> int:
    return min(len(TAPS), len(kind.taps))


def random_head(target: Target, own_output: bool = False, size: int = 40, kind: type[DraftHead] = Eagle3) -> DraftHead:
    torch.manual_seed(1)
    ids = torch.randperm(61)[:size].sort().values
    head = kind(target.config, taps_of(kind), ids, own_output)
    for parameter in head.parameters():
        parameter.data.normal_(0.0, 0.3)
    return head


def third_occurrence(tokens: list[int], longest: int) -> int:
    """Compare every pair of neighbouring blocks."""
    starts = (
        begin + 2 * size
        for size, begin in product(range(1, longest + 1), range(len(tokens)))
        if begin + 3 * size <= len(tokens)
        and tokens[begin : begin + size]
        == tokens[begin + size : begin + 2 * size]
        == tokens[begin + 2 * size : begin + 3 * size]
    )
    return min(starts, default=len(tokens))


def test_answers_end_at_the_third_repetition_of_a_block() -> None:
    rng = np.random.default_rng(1)
    lengths = set()
    for symbols, length in product((2, 3, 9), (0, 1, 2, 3, 7, 12, 40)):
        for _ in range(20):
            tokens = rng.integers(0, symbols, length).astype(np.uint16)
            assert conversations.loop_start(tokens) == third_occurrence(tokens.tolist(), 64)
            lengths.add(conversations.loop_start(tokens) == length)
    assert lengths == {True, False}
    block = np.arange(64, dtype=np.uint16)
    looping = np.concatenate([[99], block, block, block]).tolist()
    assert conversations.ends_in_loop(looping) and not conversations.ends_in_loop(looping[:-1])
    assert conversations.loop_start(np.concatenate([[99], block, block, block])) == 1 + 2 * 64
    longer = np.arange(65, dtype=np.uint16)
    assert conversations.loop_start(np.concatenate([longer] * 3)) == 3 * 65


def test_only_answers_lose_their_loops() -> None:
    tokens, answers = np.array([5, 5, 5, 5, 8, 9, 9, 9, 9, 4, 4, 4, 4, 6]), np.zeros(14, bool)
    answers[4:9] = answers[13] = True
    shorter = conversations.without_loops(Conversation(tokens.astype(np.uint16), answers, "one", ("own",)))
    assert shorter.tokens.tolist() == [5, 5, 5, 5, 8, 9, 9, 4, 4, 4, 4, 6]
    assert shorter.tokens[shorter.answers].tolist() == [8, 9, 9, 6]


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
        classes=np.array([",".join(item.classes) for item in items]),
    )


def test_conversations_that_share_13_tokens_with_a_prompt_are_removed(tmp_path: Path) -> None:
    items = [conversation(40, classes=("own", "free") if i % 50 == 0 else ("list",)) for i in range(400)]
    saved(tmp_path, items)
    texts = [item.tokens.tolist() for item in items]
    prompts = [[60, *texts[1][10:23], 60], [60, *texts[2][10:22], 60, *texts[3][20:32]], texts[4][5:30], [1, 2]]
    split = conversations.load(tmp_path, prompts)
    assert split.shared == 2
    parts = (split.train, split.held_out, split.held_out_class)
    remaining = [item.tokens.tolist() for part in parts for item in part]
    assert sorted(remaining) == sorted(text for i, text in enumerate(texts) if i not in (1, 4))
    assert len(split.held_out) == conversations.HELD_OUT >= 300 and len(split.held_out_class) == 8
    assert all("free" in item.classes for item in split.held_out_class)
    assert {item.answers.tolist() == items[0].answers.tolist() for item in split.train} == {True}
    assert split.cut_share == 0
    more = tmp_path / "more"
    more.mkdir()
    saved(more, [conversation(40, classes=("free",) if i == 0 else ("facts",)) for i in range(5)])
    longer = conversations.load(tmp_path, prompts, more)
    assert [item.classes for item in longer.more] == [("facts",)] * 4 and not split.more
    for part, before in (
        (longer.train, split.train),
        (longer.held_out, split.held_out),
        (longer.held_out_class, split.held_out_class),
    ):
        assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(part, before, strict=True))


def test_an_epoch_shows_every_answer_once_and_half_of_the_windows_are_long() -> None:
    items = [conversation(int(length)) for length in np.random.default_rng(2).integers(80, 300, 200)]
    batches = Batches(items, 4096, seed=3)
    count = len(batches._epoch(0))
    shown = [batches(step) for step in range(count)]
    answers = np.concatenate([batch.tokens[batch.answers] for batch in shown])
    assert sorted(answers) == sorted(np.concatenate([item.tokens[item.answers] for item in items]))
    assert all(batch.tokens.size <= 4096 for batch in shown)
    lengths = [len(np.flatnonzero(row)) for batch in shown for row in batch.tokens]
    long = sum(length for length in lengths if 1024 <= length <= conversations.WINDOW)
    assert long > 0.4 * sum(lengths) and all(row[:3].tolist() == SYSTEM for batch in shown for row in batch.tokens)
    assert batches.tokens_before(count) <= sum(len(item.tokens) for item in items)
    assert batches(count).tokens.tolist() != shown[0].tokens.tolist()
    assert Batches(items, 4096, seed=3)(count + 1).tokens.tolist() == batches(count + 1).tokens.tolist()


def test_taps_are_hidden_states_of_transformers(model: LlamaForCausalLM, target: Target) -> None:
    """Products in bfloat16 differ by less than 2 %; neighbouring layers and positions differ by more."""
    tokens = torch.from_numpy(np.stack([conversation(60).tokens, conversation(60).tokens]).astype(np.int64))
    expected = model(tokens, output_hidden_states=True).hidden_states
    states = target.states(tokens)
    width = target.config.hidden_size
    actual = [*states.taps.split(width, -1), states.final]
    for i, state in zip((*TAPS, len(expected) - 1), actual, strict=True):
        assert ((state - expected[i]).norm() / expected[i].norm()) < 0.02
        assert ((state - expected[(i + 1) % len(expected)]).norm() / expected[i].norm()) > 0.1
        assert ((state[:, 1:] - expected[i][:, :-1]).norm() / expected[i].norm()) > 0.1


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate pairs of components as complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = position * theta ** (-torch.arange(half) / half)
    turned = pairs * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], -1)


class RowDecoder:
    """A layer row by row, with names that start with `prefix`; all inputs are vectors."""

    def __init__(self, head: DraftHead, target: Target, prefix: str) -> None:
        self.weights = {name.removeprefix(prefix): value for name, value in head.state_dict().items()}
        self.config, self.keys, self.values = target.config, [], []

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def row(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the row `state` with the input `x` of its attention."""
        size, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        position = len(self.keys)
        query, key, value = (
            (self.weights[f"self_attn.{name}_proj.weight"] @ x).view(-1, size) for name in ("q", "k", "v")
        )
        self.keys.append(turn(key, position, theta))
        self.values.append(value)
        mixed = []
        for i, row in enumerate(turn(query, position, theta)):
            scores = torch.stack([key[i // repeats] @ row for key in self.keys]) / size**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[i // repeats] for value in self.values]))
        state = state + self.weights["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = self.norm("post_attention_layernorm", state)
        gate, up = (self.weights[f"mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return state + self.weights["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    def first_row(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.norm("input_layernorm", embedded), self.norm("hidden_norm", state)])
        return self.row(state, both)


def eagle_decoded(
    head: DraftHead, target: Target, taps: torch.Tensor, tokens: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    """Decode committed rows first, then draft rows that receive the head's own state."""
    layer, states = RowDecoder(head, target, "midlayer."), []
    for position in range(len(taps) + steps - 1):
        state = layer.weights["fc.weight"] @ taps[position] if position < len(taps) else states[-1]
        states.append(layer.first_row(state, target.embeddings[tokens[position + 1]]))
    return [layer.norm("norm", state) for state in states[len(taps) - 1 :]]


def medusa_rows(
    head: Medusa, target: Target, taps: torch.Tensor, tokens: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    """Apply each head to the last state."""
    weights, rows = head.state_dict(), []
    for i in range(steps):
        y = weights[f"{i}.0.linear.weight"] @ taps[-1] + weights[f"{i}.0.linear.bias"]
        rows.append(taps[-1] + y / (1 + (-y).exp()))
    return rows


@pytest.mark.parametrize("kind, expected_rows", [(Eagle3, eagle_decoded), (Medusa, medusa_rows)])
def test_training_equals_decoding_row_by_row(
    target: Target, kind: type[DraftHead], expected_rows: Callable[..., list[torch.Tensor]]
) -> None:
    head, item = random_head(target, kind=kind), conversation(20)
    tokens = torch.from_numpy(item.tokens.astype(np.int64))
    taps = torch.randn(len(tokens), taps_of(kind) * target.config.hidden_size)
    unrolled = head(taps[None], tokens[None], target.embeddings, STEPS)
    for last in (0, 5, len(tokens) - 1 - STEPS):
        expected = expected_rows(head, target, taps[: last + 1], tokens, STEPS)
        for i, state in enumerate(expected):
            assert torch.allclose(unrolled[i][0, last], state, atol=1e-4), (last, i)


def test_merged_attention_and_its_gradient_are_those_of_a_softmax() -> None:
    torch.manual_seed(2)
    shapes = [(2, 3, 9, 16)] * 3 + [(2, 2, 3, 9, 16)] * 2  # queries, keys and values, and those of two later steps
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    query, key, value, own_keys, own_values = inputs
    scores = (query @ key.mT).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    own_scores = torch.stack([(query * own_key).sum(-1) for own_key in own_keys], -1)
    weights = (torch.cat([scores, own_scores], -1) / 4).softmax(-1)
    expected = weights[..., :9] @ value + sum(weights[..., 9 + i, None] * own_values[i] for i in range(2))
    merged = MergedAttention.apply(*inputs)
    assert torch.allclose(merged, expected, atol=1e-5)
    direction = torch.randn_like(merged)
    for one, other in zip(
        torch.autograd.grad(merged, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_row_and_step_are_compared_with_the_target_after_the_same_tokens(target: Target) -> None:
    """Row t of step i has consumed tokens up to t + 1 + i, as has the target's state at t + 1 + i."""
    item = conversation(40)
    batch = conversations.padded([item, conversation(24)])

    def positions(taps: torch.Tensor, tokens: torch.Tensor, embeddings: torch.Tensor, steps: int) -> list[torch.Tensor]:
        rows = torch.arange(tokens.shape[1], dtype=torch.float32).expand(tokens.shape)
        return [rows + 1 + i for i in range(steps)]

    drafted, rows = objective.states_of(positions, target, batch, STEPS)
    final = target.states(torch.from_numpy(batch.tokens)).final
    for i, consumed in enumerate(drafted):
        assert torch.equal(rows.of(consumed, i), rows.position.float())
    assert torch.equal(rows.final, final[rows.window, rows.position])
    assert batch.answers[rows.window, rows.position + 1].all() and len(rows.position) == batch.answers.sum()


@pytest.mark.parametrize("own_output", [False, True])
def test_the_loss_in_blocks_equals_the_loss_of_all_rows(
    target: Target, own_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "BLOCK", 7)
    head, batch = random_head(target, own_output), conversations.padded([conversation(40), conversation(24)])
    value = objective.loss(head, target, STEPS, batch)
    value.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        drafted, rows = objective.states_of(head, target, batch, STEPS)
        p = (rows.final.bfloat16() @ target.output.T).float().softmax(-1)[:, head.vocabulary]
        terms = []
        for i, states in enumerate(drafted):
            logits = head.logits(rows.of(states, i), target.output[head.vocabulary]).float()
            q = logits.softmax(-1)
            overlap = torch.minimum(p, q).sum(-1)
            terms.append(0.8**i * (-(p * q.log()).sum(-1) + 1 - overlap).mean())
    expected = sum(terms) / sum(0.8**i for i in range(STEPS))
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, parameter in head.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 0.03 * parameter.grad.norm(), name


def greedy_text(target: Target, seed: int) -> Conversation:
    tokens = [*SYSTEM, 5 + seed, 9, 11]
    while len(tokens) < 60:
        final = target.states(torch.tensor([tokens])).final[0, -1]
        tokens.append(int((final.bfloat16() @ target.output.T).argmax()))
    return Conversation(np.array(tokens, np.uint16), np.arange(60) >= 6, "greedy", ("own",))


def test_acceptance_at_temperature_0_counts_first_choices_equal_to_the_text(target: Target) -> None:
    texts = [greedy_text(target, seed) for seed in range(3)]
    frequent = np.bincount(np.concatenate([text.tokens[6:] for text in texts]), minlength=61).argsort()[-3:]
    head, chains = random_head(target), []
    head.vocabulary = torch.from_numpy(np.sort(frequent))
    for text in texts:
        ids = torch.from_numpy(text.tokens.astype(np.int64))[None]
        with torch.autocast("cpu", torch.bfloat16):
            drafted = head(target.states(ids).taps, ids, target.embeddings, 3)
            logits = [head.logits(states, target.output[head.vocabulary])[0] for states in drafted]
        choices = [head.vocabulary[x.argmax(-1)].tolist() for x in logits]
        for start in range(4, 60 - 4):
            equal = [choices[i][start] == text.tokens[start + 2 + i] for i in range(3)]
            chains.append([*equal, False].index(False))
    figures = objective.acceptance(head, target, texts, 0.0, steps=3)
    assert 0 < np.mean(chains) < 3
    assert figures.tokens[3] == pytest.approx(1 + np.mean(chains), abs=0.02)
    reached = [sum(chain >= i for chain in chains) for i in range(4)]
    rates = [after / max(1, before) for before, after in zip(reached, reached[1:], strict=False)]
    assert figures.rates == pytest.approx(rates, abs=0.05)


def test_distributions_follow_temperature_and_top_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert objective.distribution(logits, 0, 1.0).tolist() == [[1, 0, 0, 0]]
    assert objective.distribution(logits, 1.0, 1.0)[0].tolist() == pytest.approx([0.5, 0.25, 0.15, 0.1])
    assert objective.distribution(logits, 1.0, 0.7)[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    squared = objective.distribution(logits, 0.5, 1.0)[0]
    assert squared.tolist() == pytest.approx((torch.tensor([0.5, 0.25, 0.15, 0.1]) ** 2 / 0.345).tolist())


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(target: Target, tmp_path: Path) -> None:
    batches = Batches([conversation(30) for _ in range(12)], 128, seed=0)
    schedule = Schedule(steps=5, lr=1e-2, warmup=1, save_every=2)

    def train(folder: Path, stop_at: int | None = None) -> DraftHead:
        torch.manual_seed(0)
        head = Eagle3(target.config, len(TAPS), torch.arange(40))
        head.start_from(target)

        def batch(step: int) -> Batch:
            if step == stop_at:
                raise KeyboardInterrupt
            return batches(step)

        fit(head, partial(objective.loss, head, target, 2), batch, schedule, folder / "state.pt", lambda _: 0.0, "head")
        return head

    complete = train(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", stop_at=3)
    resumed = train(tmp_path / "b")
    for (name, first), second in zip(complete.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(first, second), name


def test_the_curve_has_a_line_per_evaluated_step(target: Target, tmp_path: Path) -> None:
    """The last step is evaluated twice, and again by a repeated command; rows of a batch have equal lengths."""
    batches = Batches([conversation(30) for _ in range(12)], 128, seed=0)
    head, items = random_head(target), [conversation(30, setting) for setting in conversations.SETTINGS]
    schedule = Schedule(steps=20, lr=1e-2, warmup=1, save_every=1)
    for _ in range(2):
        held_out = HeldOut(head, target, items, tmp_path, batches.tokens_before, 1000)
        fit(head, partial(objective.loss, head, target, 2), batches, schedule, tmp_path / "state.pt", held_out, "head")
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text("utf-8").splitlines()]
    tokens = {steps: sum(batches(step).tokens.size for step in range(steps)) for steps in (10, 20)}
    assert [(line["step"], line["tokens"]) for line in lines] == [*tokens.items()]
    assert checkpoint.trained_tokens(tmp_path) == 1000 + tokens[20]


@pytest.mark.parametrize("own_output", [False, True])
def test_a_saved_head_has_published_names_and_drafts_the_same(target: Target, own_output: bool, tmp_path: Path) -> None:
    head = random_head(target, own_output)
    checkpoint.save(head, target, tmp_path, 4096)
    tensors = checkpoint.load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == own_output and checkpoint.trained_tokens(tmp_path) == 4096
    layer = ("midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight")
    assert {"fc.weight", *layer, "norm.weight"} <= {*tensors}
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(ids, head.vocabulary) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    again = checkpoint.load(Eagle3, tmp_path, target)
    taps, tokens = torch.randn(1, 12, 3 * target.config.hidden_size), torch.randint(0, 61, (1, 12))
    for first, second in zip(*(h(taps, tokens, target.embeddings, 2) for h in (head, again)), strict=True):
        assert torch.equal(first, second)


def test_a_saved_medusa_head_drafts_as_in_training(
    model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The loss reaches all heads, and the program reads the file."""
    model.save_pretrained(folder := tmp_path_factory.mktemp("medusa target"))
    target = Target(str(folder), Medusa.taps)
    head = random_head(target, kind=Medusa)
    objective.loss(head, target, HEADS, conversations.padded([conversation(40)])).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    checkpoint.save(head, target, tmp_path, 4096)
    again = checkpoint.load(Medusa, tmp_path, target)
    spec = ModelSpec(str(folder))
    loaded = load_head(HeadSpec(str(tmp_path), spec), LoadedModel(spec, model, None, 0, "transformers")).head
    state, cache = torch.randn(1, 1, target.config.hidden_size), loaded.open()
    drafted = [loaded.start(cache, [5], state, 0), *(loaded.step(cache, 3) for _ in range(HEADS - 1))]
    trained = again(state, torch.zeros(1, 1, dtype=torch.int64), target.embeddings, HEADS)
    output = model.get_output_embeddings().weight[head.vocabulary]
    assert loaded.ids is not None and torch.equal(loaded.ids, head.vocabulary)
    for row, states in zip(drafted, trained, strict=True):
        assert torch.allclose(row, again.logits(states[0, 0], output), atol=1e-3)
    with pytest.raises(ValueError, match="omit --own-output"):
        random_head(target, own_output=True, kind=Medusa)


@pytest.mark.parametrize("choice", [(1.0, 1.0), (0.5, 1.0)])
def test_draft_vocabularies_are_compared_by_their_acceptance(target: Target, choice: tuple[float, float]) -> None:
    """With its own vocabulary a head has the acceptance of `chances`; context adds the tokens up to each position."""
    head, item = random_head(target), conversation(60)
    assert isinstance(head, Eagle3)
    own = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    own[head.vocabulary] = True
    results = list(vocabulary_study.measured(head, target, item, choice, [own, torch.ones_like(own)]))
    expected = objective.chances(head, target, item, 1, *choice)[0][:, 0]
    assert torch.allclose(results[0][1], expected, atol=5e-3)  # products in bfloat16
    assert bool(results[2][0].all())
    assert torch.equal(results[2][1], results[3][1])
    answered = [i for i in range(1, len(item.tokens)) if item.answers[i]]
    for (covered, _), earlier in zip(results[:2], (False, True), strict=True):
        assert covered.tolist() == [
            bool(own[int(item.tokens[i])]) or (earlier and item.tokens[i] in item.tokens[:i]) for i in answered
        ]


def test_another_vocabulary_keeps_the_logits_of_its_tokens(target: Target) -> None:
    head, states = random_head(target), torch.randn(3, target.config.hidden_size)
    before = head.logits(states, target.output[head.vocabulary].float())
    chosen, places = head.vocabulary[::2], torch.arange(0, len(head.vocabulary), 2)
    head.choose_vocabulary(chosen)
    assert torch.equal(head.logits(states, target.output[head.vocabulary].float()), before[:, places])
    with pytest.raises(ValueError, match="omit --vocabulary"):
        random_head(target, own_output=True).choose_vocabulary(chosen)


def test_drawn_tokens_have_their_probabilities() -> None:
    """Inversion of the summed probabilities: 20,000 draws, tokens outside top-p are never drawn."""
    logits, generator = torch.tensor([1.0, -1.0, 0.5, 2.0, -9.0]), torch.Generator().manual_seed(0)
    for choice in ((0.7, 1.0), (1.0, 0.9)):
        counts = torch.zeros(5)
        for _ in range(20_000):
            counts[generate.choose(logits, choice, generator)] += 1
        expected = objective.distribution(logits[None], *choice)[0]
        assert torch.equal(counts > 0, expected > 1e-5)
        assert (counts / 20_000 - expected).abs().max() < 0.015
    assert generate.choose(logits, (0.0, 1.0), generator) == 3


def test_generated_conversations_do_not_depend_on_the_number_of_texts_per_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens have the form of the template, answers lie in their spans and end without a loop."""
    monkeypatch.setattr(generate, "MOST_ANSWER", 12)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    loaded = load(ModelSpec(str(save_model(tmp_path / "model", tokenizer, max_position_embeddings=512))), warm=False)
    contents = generate.Contents(long=0.0, classes=("list", "facts"))
    together = generate.Writer(loaded, 5, 3, contents).write(range(7))
    alone = [generate.Writer(loaded, 5, 1, contents).write([number])[0] for number in range(7)]
    assert {kind for text in together for kind in text.classes} <= {"own", "list", "facts", "follow"}
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    generate.save(tmp_path / "part0000.npz", together)
    stored = conversations.read(tmp_path / "part0000.npz")
    assert [item.tokens.tolist() for item in stored] == [text.tokens for text in together]
    for item, text in zip(stored, together, strict=True):
        assert item.answers.sum() == sum(end - begin for begin, end in text.spans) > 0
        assert conversations.loop_start(item.tokens[item.answers]) >= item.answers.sum() - 3 * 64
    assert len({text.setting for text in together}) > 1
