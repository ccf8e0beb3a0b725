"""Draft heads in training: conversations of the target, shifts, training-time test, acceptance, exact resumption."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.tiny_models import LLAMA, TEMPLATE, byte_level_tokenizer, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.heads import load_head
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec
from training.fit import Schedule, fit
from training.head import checkpoint, conversations, generate, objective, prompts
from training.head.__main__ import HeldOut
from training.head.conversations import Batch, Batches, Conversation
from training.head.eagle3 import Eagle3
from training.head.target import Target
from training.head.texts import Request, Slots, draw, loop_starts

TAPS = (0, 1)
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


def random_head(target: Target, own_output: bool = False) -> Eagle3:
    torch.manual_seed(1)
    head = Eagle3(target.config, len(TAPS), torch.randperm(61)[:40].sort().values, own_output)
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
            expected = third_occurrence(tokens.tolist(), 64)
            assert conversations.loop_start(tokens) == expected
            padded = torch.zeros(2, 60, dtype=torch.int64)
            padded[1, :length] = torch.from_numpy(tokens.astype(np.int64))
            assert loop_starts(padded, torch.tensor([2, length])).tolist() == [2, expected]
            lengths.add(conversations.loop_start(tokens) == length)
    assert lengths == {True, False}
    block = np.arange(64, dtype=np.uint16)
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
    items = [conversation(40, classes=("list",)) for _ in range(400)]
    saved(tmp_path, items)
    texts = [item.tokens.tolist() for item in items]
    prompts = [[60, *texts[1][10:23], 60], [60, *texts[2][10:22], 60, *texts[3][20:32]], texts[4][5:30], [1, 2]]
    split = conversations.load(tmp_path, prompts)
    assert split.shared == 2 and split.cut_share == 0 and len(split.held_out) == conversations.HELD_OUT >= 300
    remaining = [item.tokens.tolist() for item in (*split.train, *split.held_out)]
    assert sorted(remaining) == sorted(text for i, text in enumerate(texts) if i not in (1, 4))
    assert {item.answers.tolist() == items[0].answers.tolist() for item in split.train} == {True}


def test_an_epoch_shows_every_answer_once_and_a_tenth_in_long_windows() -> None:
    items = [conversation(int(length)) for length in np.random.default_rng(2).integers(80, 300, 200)]
    batches = Batches(items, 4096, seed=3)
    count = len(batches._epoch(0))
    shown = [batches(step) for step in range(count)]
    answers = np.concatenate([batch.tokens[batch.weights > 0] for batch in shown])
    assert sorted(answers) == sorted(np.concatenate([item.tokens[item.answers] for item in items]))
    assert all(batch.tokens.size <= 4096 for batch in shown)
    lengths = [len(np.flatnonzero(row)) for batch in shown for row in batch.tokens]
    long = sum(length for length in lengths if 700 <= length <= conversations.WINDOW)
    assert 0.03 < long / sum(lengths) < 0.2
    assert all(row[:3].tolist() == SYSTEM for batch in shown for row in batch.tokens)
    assert batches.tokens_before(count) <= sum(len(item.tokens) for item in items)
    assert batches(count).tokens.tolist() != shown[0].tokens.tolist()
    assert Batches(items, 4096, seed=3)(count + 1).tokens.tolist() == batches(count + 1).tokens.tolist()


def test_the_first_128_tokens_of_first_answers_count_twice() -> None:
    short, long = conversation(40), conversation(800)
    batch = conversations.padded([short, long])
    for row, item in zip(batch.weights, (short, long), strict=True):
        positions = np.flatnonzero(item.answers)
        first = [i for i in positions if i < len(SYSTEM) + len(item.tokens) // 2][:128]
        expected = item.answers.astype(float)
        expected[first] = 2
        assert row[: len(expected)].tolist() == expected.tolist() and not row[len(expected) :].any()
        early = conversations.early_part(item)
        assert early.tokens[early.answers].tolist() == item.tokens[first].tolist()


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

    def __init__(self, head: Eagle3, target: Target, prefix: str) -> None:
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
    head: Eagle3, target: Target, taps: torch.Tensor, tokens: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    """Decode committed rows first, then draft rows that receive the head's own state."""
    layer, states = RowDecoder(head, target, "midlayer."), []
    for position in range(len(taps) + steps - 1):
        state = layer.weights["fc.weight"] @ taps[position] if position < len(taps) else states[-1]
        states.append(layer.first_row(state, target.embeddings[tokens[position + 1]]))
    return [layer.norm("norm", state) for state in states[len(taps) - 1 :]]


def test_training_equals_decoding_row_by_row(target: Target) -> None:
    head, item = random_head(target), conversation(20)
    tokens = torch.from_numpy(item.tokens.astype(np.int64))
    taps = torch.randn(len(tokens), len(TAPS) * target.config.hidden_size)
    unrolled = head(taps[None], tokens[None], target.embeddings, STEPS)
    for last in (0, 5, len(tokens) - 1 - STEPS):
        expected = eagle_decoded(head, target, taps[: last + 1], tokens, STEPS)
        for i, state in enumerate(expected):
            assert torch.allclose(unrolled[i][0, last], state, atol=1e-4), (last, i)


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
    assert torch.equal(rows.weight, torch.from_numpy(batch.weights)[rows.window, rows.position + 1])
    assert len(rows.position) == (batch.weights > 0).sum()


@pytest.mark.parametrize("own_output", [False, True])
def test_the_loss_in_blocks_equals_the_loss_of_all_rows(
    target: Target, own_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "BLOCKS", {"cpu": 7})
    head, batch = random_head(target, own_output), conversations.padded([conversation(340), conversation(24)])
    assert set(np.unique(batch.weights)) == {0, 1, 2}
    value = objective.loss(head, target, STEPS, batch)
    value.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        drafted, rows = objective.states_of(head, target, batch, STEPS)
        p = (rows.final.bfloat16() @ target.output.T).float().softmax(-1)[:, head.vocabulary]
        terms = []
        for i, states in enumerate(drafted):
            q = head.logits(rows.of(states, i), target.output[head.vocabulary]).float().softmax(-1)
            row = -(p * q.log()).sum(-1) + 1 - torch.minimum(p, q).sum(-1)
            terms.append(0.8**i * (rows.weight * row).sum() / rows.weight.sum())
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
    """Drafts come from the vocabulary and the tokens of the text so far."""
    texts = [greedy_text(target, seed) for seed in range(3)]
    frequent = np.bincount(np.concatenate([text.tokens[6:] for text in texts]), minlength=61).argsort()[-3:]
    head, chains = random_head(target), []
    head.vocabulary = torch.from_numpy(np.sort(frequent))
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(20):
        optimizer.zero_grad()
        objective.loss(head, target, 3, conversations.padded(texts)).backward()
        optimizer.step()
    head.requires_grad_(False)
    for text in texts:
        ids = torch.from_numpy(text.tokens.astype(np.int64))[None]
        with torch.autocast("cpu", torch.bfloat16):
            drafted = head(target.states(ids).taps, ids, target.embeddings, 3)
            logits = [(states @ target.output.T)[0].float() for states in drafted]
        for start in range(4, 60 - 4):
            equal = []
            for i in range(3):
                allowed = sorted({*frequent.tolist(), *text.tokens[: start + 2 + i].tolist()})
                best = allowed[int(logits[i][start, allowed].argmax())]
                equal.append(best == text.tokens[start + 2 + i])
            chains.append([*equal, False].index(False))
    figures = objective.acceptance(head, target, texts, steps=3)
    assert 0 < np.mean(chains) < 3
    assert figures.tokens == pytest.approx(1 + np.mean(chains), abs=0.02)
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

    def train(folder: Path, stop_at: int | None = None) -> Eagle3:
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
    head, groups = random_head(target), {setting: [conversation(30, setting)] for setting in conversations.SETTINGS}
    schedule = Schedule(steps=20, lr=1e-2, warmup=1, save_every=1)
    for _ in range(2):
        held_out = HeldOut(head, target, groups, tmp_path, batches.tokens_before, 1000)
        fit(head, partial(objective.loss, head, target, 2), batches, schedule, tmp_path / "state.pt", held_out, "head")
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text("utf-8").splitlines()]
    tokens = {steps: sum(batches(step).tokens.size for step in range(steps)) for steps in (10, 20)}
    assert [(line["step"], line["tokens"]) for line in lines] == [*tokens.items()]
    assert checkpoint.trained_tokens(tmp_path) == 1000 + tokens[20]


@pytest.mark.parametrize("own_output", [False, True])
def test_a_saved_head_has_published_names_and_the_program_drafts_the_same(
    model: LlamaForCausalLM, target: Target, own_output: bool, tmp_path: Path
) -> None:
    head = random_head(target, own_output).bfloat16().float()
    checkpoint.save(head, target, tmp_path, 4096)
    tensors = checkpoint.load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == own_output and checkpoint.trained_tokens(tmp_path) == 4096
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(ids, head.vocabulary) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    again = checkpoint.load(tmp_path, target)
    taps, tokens = torch.randn(1, 12, len(TAPS) * target.config.hidden_size), torch.randint(0, 61, (1, 13))
    expected = head(taps, tokens[:, :12], target.embeddings, 2)
    for first, second in zip(expected, again(taps, tokens[:, :12], target.embeddings, 2), strict=True):
        assert torch.equal(first, second)
    spec = ModelSpec("target")
    loaded = load_head(HeadSpec(str(tmp_path), spec), LoadedModel(spec, model, None, 0, "transformers")).head
    cache, states = loaded.open(), taps[0, :11].unflatten(-1, (len(TAPS), -1))
    row = loaded.start(cache, tokens[0, 1:12].tolist(), states, 0)
    logits = head.logits(expected[0][0, 10], target.rows[head.vocabulary])
    assert torch.allclose(row[: len(logits)], logits, atol=1e-3)


def test_another_vocabulary_keeps_the_logits_of_its_tokens(target: Target) -> None:
    states = torch.randn(3, target.config.hidden_size)
    for own_output in (False, True):
        head = random_head(target, own_output)
        before = head.logits(states, target.rows[head.vocabulary])
        chosen, missing = head.vocabulary[::2].clone(), [i for i in range(61) if i not in head.vocabulary][:1]
        head.choose_vocabulary(chosen)
        assert torch.allclose(head.logits(states, target.rows[head.vocabulary]), before[:, ::2])
        if own_output:
            with pytest.raises(ValueError, match="smaller --vocabulary"):
                head.choose_vocabulary(torch.tensor(missing))


def test_drawn_tokens_have_their_probabilities() -> None:
    """20,000 draws per row: greedy, with and without top-p; tokens outside of top-p are never drawn."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, -1.0, 0.5, 2.0, -9.0])
    for choice in ((0.0, 1.0), (0.7, 1.0), (1.0, 0.9)):
        temperature, top_p = (1.0, 0.0) if choice[0] == 0 else choice
        drawn = draw(logits.expand(20_000, 5), torch.full((20_000,), temperature), torch.full((20_000,), top_p))
        counts, expected = drawn.bincount(minlength=5), objective.distribution(logits[None], *choice)[0]
        assert torch.equal(counts > 0, expected > 1e-5)
        assert (counts / 20_000 - expected).abs().max() < 0.015


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_continuations_are_those_of_passes_over_whole_texts(target: Target, count: int) -> None:
    """Whatever the number of slots; a text ends at its end token, its limit, or before its third equal block."""
    rng = np.random.default_rng(3)
    requests = [
        Request(rng.integers(0, 61, n).tolist(), (0.0, 1.0), limit, None) for n, limit in product((2, 9, 20), (1, 12))
    ]
    waiting, found = list(requests), []
    slots = Slots(target, end=7, count=count, length=40, longest=12, steps=5)
    slots.serve(lambda most: [waiting.pop() for _ in range(min(most, len(waiting)))], lambda *pair: found.append(pair))
    assert {id(request) for request, _ in found} == {id(request) for request in requests}
    for request, tokens in found:
        context = [*request.context, *tokens]
        final = target.states(torch.tensor([context])).final[0, len(request.context) - 1 :]
        logits = final @ target.rows.T
        chosen = logits[:-1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits[:-1].max(-1).values - chosen < 0.1).all()
        assert 7 not in tokens[:-1] and len(tokens) <= request.limit
        following = [*tokens, int(logits[-1].argmax())]
        assert (
            len(tokens) == request.limit
            or tokens[-1] == 7
            or conversations.loop_start(np.array(following * 2)) < len(following) * 2
        )
    assert slots.written == sum(len(tokens) for _, tokens in found)


def test_generated_conversations_have_the_form_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MOST_QUESTION", 6)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target = Target(str(save_model(tmp_path / "model", tokenizer, max_position_embeddings=512)))
    torch.manual_seed(0)
    parts = generate.Format.of(tokenizer)
    asked = [("list", tokenizer.encode(f"name {i} of them")) for i in range(12)]
    begun = generate.dialogues(asked, [tokenizer.encode("why")], parts, False, "0")
    slots, rest = Slots(target, parts.end, 4, 200, 12), iter(begun)
    done = generate.converse(slots, lambda: next(rest, None), 12)
    generate.save(tmp_path / "part.npz", done)
    stored = conversations.stored(tmp_path)
    assert [item.tokens.tolist() for item in stored] == [
        dialogue.tokens[: len(item.tokens)] for item, dialogue in zip(stored, done, strict=True)
    ]
    assert {kind for item in stored for kind in item.classes} == {"own", "list", "follow"}
    assert len({item.setting for item in stored}) > 1
    for item, dialogue in zip(stored, done, strict=True):
        begin, end = dialogue.spans[0]
        ids = item.tokens.tolist()
        assert ids[:begin] == parts.system + (dialogue.prompt or []) + parts.answer
        assert item.answers.sum() == sum(end - begin for begin, end in dialogue.spans) > 0
        assert conversations.loop_start(item.tokens[begin:end]) == end - begin <= 12
    greedy = generate.dialogues(asked, [], parts, True, "0")
    assert [(dialogue.setting, dialogue.prompt) for dialogue in greedy] == [("greedy", ids) for _, ids in asked]


def test_prompts_occur_once_and_share_no_eight_words_with_evaluation_prompts() -> None:
    words = "one two three four five six seven eight nine".split()
    texts = {
        "a": " ".join(words),
        "b": " ".join(words[:7]),
        "c": "Zero, " + " ".join(words[:8]).upper() + "!",
        "d": "x" * 6000,
    }
    listed = [(kind, text) for kind, text in texts.items() for _ in range(2)]
    evaluation = ["and " + " ".join(words[:8]) + " more"]
    assert list(prompts.without(listed, evaluation)) == [("b", texts["b"])]
    assert [kind for kind, _ in prompts.without(listed, [])] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [*prompts._TASKS])
def test_tasks_contain_a_text(kind: str) -> None:
    sources: Any = prompts.Texts(
        ["A passage. Of two sentences."], [("Who?", "Somebody did.")], [("German", "Ein Satz.")]
    )
    made = {prompts._TASKS[kind](sources, random.Random(seed)) for seed in range(40)}
    texts = ("passage", "sentences", "Somebody", "Ein Satz", "article", "essay")
    assert len(made) > 8 and all(any(text in prompt for text in texts) for prompt in made)
    assert all("{" not in prompt for prompt in made)
