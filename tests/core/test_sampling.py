"""Logits processing against transformers' processors, custom processors, samples against their distribution, chains."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fakes.enumeration import (
    DRAFTERS,
    PROMPT,
    ROUNDING,
    SAMPLING,
    distance,
    enumerate_distribution,
    reference_probs,
    true_distribution,
)
from fakes.tiny_models import byte_level_tokenizer, save_model, sentencepiece_tokenizer
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdemo.core import sampling as sampling_module
from specdemo.core.distributions import DenseProbs, PointMass, SparseProbs, residual
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.rules import RULES
from specdemo.core.sampling import ChainSampler, Noise, SamplingParams, SharedNoise, top_tokens
from specdemo.core.step import Draft
from specdemo.core.texts import BannedText
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import token_bytes
from specdemo.native import sampling as native
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

VOCAB = 50
CHAIN_VOCAB, START = 11, 5
BAD_WORDS = ((3,), (1, 2), (9, 30, 7), (5, 30, 8))


def without_engine(sampling: SamplingParams, logits: Tensor, paths: Sequence[Sequence[int]] = ()) -> Tensor:
    """Return the distributions as computed by torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "supports", lambda *tensors: False)
        return sampling(logits, paths)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty", "words"),
    list(itertools.product((0.5, 1.7), (0, 1, 5), (0.6, 1.0), (0.0, 0.2, 1.0), (1.0, 1.3), ((), BAD_WORDS))),
)
def test_distributions_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, words: tuple[tuple[int, ...], ...]
) -> None:
    """Of the compiled engine and of torch."""
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB) * 3
    paths = [[1], [5, 1], [2, 2, 9, 30], list(range(20))]
    oracle = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    if words:
        oracle.append(NoBadWordsLogitsProcessor([list(word) for word in words]))
    oracle.append(TemperatureLogitsWarper(temperature))
    if top_k:
        oracle.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        oracle.append(TopPLogitsWarper(top_p))
    if min_p:
        oracle.append(MinPLogitsWarper(min_p))
    before = logits.clone()
    sampling = SamplingParams(temperature, top_k, top_p, min_p, penalty, words)
    distributions = sampling(logits, paths), without_engine(sampling, logits, paths)
    assert torch.equal(logits, before)  # logits are not modified in place
    for row, path, *found in zip(logits, paths, *distributions, strict=True):
        expected = oracle(torch.tensor([path]), row[None].clone())[0].softmax(-1)
        assert all(torch.allclose(probs, expected, atol=1e-6) for probs in found)


def test_ties_of_the_largest_logit_are_kept_by_min_p() -> None:
    """In C and in torch, with a vocabulary that is no multiple of a vector."""
    torch.manual_seed(2)
    logits = torch.randn(5, 3001) * 2
    logits[1, 7] = logits[1, 2999] = logits[1].max() + 1
    for min_p in (0.02, 1.0):
        expected = MinPLogitsWarper(min_p)(torch.tensor([[0]] * 5), logits / 0.7).softmax(-1)
        sampling = SamplingParams(temperature=0.7, min_p=min_p)
        compiled = sampling(logits, [])
        assert ((compiled > 0) == (expected > 0)).all() and torch.allclose(compiled, expected, atol=1e-6)
        assert torch.allclose(without_engine(sampling, logits), expected, atol=1e-6)
        assert (compiled[1] > 0).sum() >= 2


@pytest.mark.parametrize("text", ["abc", "é"])
def test_a_banned_text_is_excluded_in_every_tokenisation(text: str) -> None:
    """All paths of four tokens: a path is possible if and only if it lacks the text (excepting what was given)."""
    pieces = [b"a", b"ab", b"b", b"c", b"bcd", b"xabcx", b"\xc3", b"\xa9x", b""]
    banned = BannedText([text], pieces)
    possible: list[tuple[int, ...]] = [()]
    for _ in range(4):
        possible = [(*path, t) for path in possible for t in range(len(pieces)) if t not in banned.tokens(path)]
    every = itertools.product(range(len(pieces)), repeat=4)
    assert possible == [path for path in every if text.encode() not in b"".join(pieces[t] for t in path)]
    assert len(possible) < len(pieces) ** 4


def test_banned_texts_and_bad_words_are_excluded_together() -> None:
    pieces = [b"a", b"b", b"c", b"d", b"a"]  # the row has no logit of the last token
    sampling = SamplingParams(bad_words=((1,),), banned=BannedText(["a"], pieces))
    assert sampling.process_logits(torch.zeros(1, 4), [[2]]).tolist() == [[-math.inf, -math.inf, 0.0, 0.0]]


def test_an_impossible_token_is_rejected_by_the_smallest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(0, "accept")
    monkeypatch.setattr(noise._uniform, "random", lambda: 0.0)
    assert noise.test(0.0) == (False, 0.0)


def test_the_bytes_of_tokens_concatenate_to_the_text() -> None:
    text = "def naïve(x):\n    return '東京🙂'  # a  b"
    for tokenizer in (byte_level_tokenizer(), sentencepiece_tokenizer()):
        pieces, tokens = token_bytes(tokenizer), tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(pieces[token] for token in tokens).decode()
        assert joined.strip() == tokenizer.decode(tokens, clean_up_tokenization_spaces=False).strip()


def test_extreme_parameters_return_distributions_or_one_sentence() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 30
    smallest = SamplingParams(0.001, top_p=0.001, repetition_penalty=0.01)(logits, [[1]] * 3)
    assert torch.isfinite(smallest).all() and torch.allclose(smallest.sum(-1), torch.ones(3))
    for sampling in (SamplingParams(1e-38), SamplingParams(repetition_penalty=1e-38)):
        with pytest.raises(UserError, match="NaN or infinite logits"):
            sampling(logits.abs() + 1, [list(range(VOCAB))] * 3)
    largest = torch.finfo(torch.float32).max
    SamplingParams(0.5).refuse_broken([0.5 * largest, -0.5 * largest])
    with pytest.raises(UserError, match="infinite"):
        SamplingParams(0.5).refuse_broken([0.75 * largest])


@pytest.mark.parametrize("way", [Noise.sample, Noise.sample_on_device, SharedNoise.sample])
def test_samples_follow_their_distribution(way: Callable[..., int]) -> None:
    """5,000 positions, fixed seed; by chance, 1 seed in 10^5 exceeds 26 (3 degrees of freedom)."""
    probs, n = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), 5_000
    noise = SharedNoise(3) if way is SharedNoise.sample else Noise(7, "draw")
    counts = torch.bincount(torch.tensor([way(noise, probs, place) for place in range(n)]), minlength=5)
    assert counts[4] == 0
    assert float(((counts[:4] - n * probs[:4]) ** 2 / (n * probs[:4])).sum()) < 26


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, -1, 0, 0, 1, 4)])
@pytest.mark.parametrize("drawn", [False, True], ids=["points", "probs"])
def test_point_masses_are_verified_like_one_hot_rows(name: str, parents: tuple[int, ...], drawn: bool) -> None:
    rule = RULES[name]
    apply = rule.apply if rule.threshold is None else partial(rule.apply, threshold=rule.threshold)
    rng, kept = random.Random(0), 0
    for seed in range(50):
        tokens, firsts = (tuple(rng.randrange(3) for _ in range(n)) for n in (len(parents), len(parents) + 1))
        probs = torch.nn.functional.one_hot(torch.tensor(tokens), 3).float() if drawn else None
        draft = Draft(tokens, parents, (1.0,) * len(tokens) if drawn else None, DenseProbs(probs) if drawn else None)
        whole = torch.nn.functional.one_hot(torch.tensor(firsts), 3).float()
        verdicts = [
            apply(draft, p, Noise(seed, "accept"), Noise(seed, "correct"), 5)
            for p in (whole, [PointMass(token) for token in firsts])
        ]
        if rule.lenient:  # compares raw probabilities with point masses of the target, without draws
            verdicts = [replace(verdict, draw=(), bound=()) for verdict in verdicts]
        assert verdicts[0] == verdicts[1]
        kept += len(verdicts[0].accepted)
    assert kept > 10


@pytest.mark.parametrize("vocab", [1, 7, 33, 20_001])
@pytest.mark.parametrize("spread", [0.3, 30.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (5, 1.0), (50, 0.5), (0, 0.9999), (0, 1e-6)])
def test_distributions_equal_double_precision(vocab: int, spread: float, top_k: int, top_p: float) -> None:
    """Of the compiled engine and of torch, whose candidates grow until they contain the nucleus.

    Torch adds in float32, which may exclude tokens of tiny probability.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = (spread * torch.randn(3, 2 * vocab, generator=generator))[:, :vocab]  # rows are not adjacent
    logits[1, 1:] = -torch.inf
    assert native.supports(logits)
    sampling = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    expected, order = (logits.double() / 0.8).softmax(-1).sort(descending=True)
    expected[:, top_k or vocab :] = 0
    expected /= expected.sum(-1, keepdim=True)
    before = expected.cumsum(-1) - expected
    certain = (before - top_p).abs() > 1e-6  # otherwise rounding decides
    expected *= before < top_p
    expected /= expected.sum(-1, keepdim=True)
    for found, tiny in ((sampling(logits, ()), 1e-37), (without_engine(sampling, logits), 1e-7)):
        probs = found.double().gather(-1, order)
        torch.testing.assert_close(probs * certain, expected * certain, rtol=2e-5, atol=tiny)
        assert found.sum(-1).tolist() == pytest.approx([1] * 3, abs=1e-5)


def test_equal_logits_at_the_end_of_a_nucleus_are_kept_in_order() -> None:
    logits = torch.tensor([[0.0] * 20 + [1.0]])
    kept = SamplingParams(top_p=0.5).logits_to_probs(logits)[0] > 0
    expected = next(n for n in range(20) if math.e + n >= 0.5 * (math.e + 20))
    assert kept.tolist() == [True] * expected + [False] * (20 - expected) + [True]


@pytest.mark.parametrize("mass", [1, 8])
@pytest.mark.parametrize("vocab", [1, 9, 4096])
def test_compiled_samples_equal_those_of_torch(vocab: int, mass: float, monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.randn(vocab, generator=torch.Generator().manual_seed(1)).mul_(4).softmax(0).mul_(mass)
    compiled, usual = Noise(3, "draft"), Noise(3, "draft")
    samples = [compiled.sample(probs) for _ in range(500)]
    monkeypatch.setattr(native, "supports", lambda *tensors: False)
    assert samples == [usual.sample(probs) for _ in range(500)]


@pytest.mark.parametrize("vocab", [9, 300, 1024])
def test_the_inverse_reads_its_row_only(vocab: int) -> None:
    rows = torch.rand(2, vocab, generator=torch.Generator().manual_seed(1))
    mass = rows[0].double().cumsum(0)
    for u in torch.linspace(0, 0.999, 200, dtype=torch.float64).tolist():
        assert native.sample_at(rows[0], u) == int((mass <= u * mass[-1]).sum())


def test_the_largest_uniform_number_gives_the_last_possible_token() -> None:
    """Also where the order of summation rounds the total up."""
    for seed in range(50):
        probs = torch.randn(5000, generator=torch.Generator().manual_seed(seed)).mul(8).exp()
        probs[4992], probs[4993:] = probs.max(), 0
        assert native.sample_at(probs, 1 - 2**-53) == 4992


def test_the_largest_logit_is_the_first_or_nan() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2)).clamp_(max=2)
    assert native.largest_logits(logits) == (logits.argmax(-1).tolist(), logits.amax(-1).tolist())
    assert native.largest_logits(torch.full((1, 21), -torch.inf)) == ([0], [-math.inf])
    for column in (0, 500, 999):
        logits[2, column] = torch.nan
        tokens, values = native.largest_logits(logits)
        assert tokens[2] == column and math.isnan(values[2]) and values[1] == logits[1].max()
        logits[2, column] = 0


@pytest.mark.parametrize(
    ("parents", "tokens", "accepted"),
    [
        ((-1, 0), (0, 8), True),
        ((-1, 0), (-1, 8), False),
        ((-1, 0), (0, 9), False),
        ((-2, 0), (0, 8), False),
        ((-1, 1), (0, 8), False),
        ((0, 0), (0, 8), False),
    ],
)
def test_tokens_and_parents_of_compared_drafts_have_limits(
    parents: tuple[int, int], tokens: tuple[int, int], accepted: bool
) -> None:
    p, q = torch.full((3, 9), 1 / 9), torch.full((2, 9), 1 / 9)
    with nullcontext() if accepted else pytest.raises(ValueError, match="outside the vocabulary or a parent after"):
        assert native.token_ranks(p, parents, tokens) == [1, 1]
    for ids in (None, torch.arange(9)):
        with nullcontext() if accepted else pytest.raises(ValueError, match="outside the vocabulary or a parent after"):
            assert native.compare_drafts(p, q, parents, tokens, ids)[0] == pytest.approx([1 / 9] * 2)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_sparse_rows_outside_the_vocabulary_are_refused(wrong: int) -> None:
    p, ids = torch.full((2, 50), 1 / 50), torch.tensor([3, wrong])
    sparse = SparseProbs(ids, torch.tensor([[0.5, 0.5]]), 50)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sparse.compare(p, (3,), (-1,))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        residual(p[0], sparse.row(0))


def test_sparse_samples_are_those_of_their_values_and_with_shared_noise_those_of_the_dense_row() -> None:
    row = SparseProbs(torch.tensor([4, 0, 3]), torch.tensor([[0.5, 0.3, 0.2]]), 6).row(0)
    noise, same, shared = Noise(2, "draft"), Noise(2, "draft"), SharedNoise(2)
    for i in range(100):
        assert noise.sample_sparse(row) == row.ids[same.sample(row.values)]
        assert shared.sample_sparse(row, i) == SharedNoise(2).sample(row.dense(), i)


# --- with the compiled engine, without it, and on a device ---


@pytest.fixture(params=["compiled", "torch", "device"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device`: tensors are treated like those of an accelerator."""
    if request.param != "compiled":
        request.getfixturevalue("torch_engine")
    if request.param == "device":
        monkeypatch.setattr(sampling_module, "is_on_host", lambda x: False)
    yield request.param


def rows_of(seed: int, count: int, vocab: int = CHAIN_VOCAB) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_records_the_distributions_that_its_tokens_were_sampled_from(engine: str, temperature: float) -> None:
    sampling = SamplingParams(temperature, top_k=4)
    for seed in range(5):
        logits = rows_of(seed, 3, CHAIN_VOCAB - 2)  # a smaller vocabulary than the target's
        sampler = ChainSampler(sampling, Noise(seed, "draft"), START, CHAIN_VOCAB)
        drawn = [sampler(row[None], i) for i, row in enumerate(logits)]
        assert {isinstance(token, Tensor) for token in drawn} == {engine == "device"}  # without host synchronisation
        assert engine != "device" or {token.shape for token in drawn} == {(1,)}
        tokens = list(map(int, drawn))
        draft = sampler.chain(tokens)
        assert draft.tokens == tuple(tokens) and draft.is_chain
        if temperature == 0:
            assert tokens == logits.argmax(-1).tolist() and draft.probs is None and draft.token_probs is None
            continue
        noise = Noise(seed, "draft")
        for node, row in enumerate(logits):
            expected = reference_probs([*row.tolist(), -math.inf, -math.inf], sampling, ())
            assert draft.probs.row(node).tolist() == pytest.approx(expected, abs=1e-6)
            assert draft.token_probs[node] == pytest.approx(expected[tokens[node]], abs=1e-6)
            assert tokens[node] == noise.sample(draft.probs.row(node))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_logits_of_a_chain_are_refused_at_its_end(engine: str, broken: float, temperature: float) -> None:
    sampler = ChainSampler(SamplingParams(temperature), Noise(0, "draft"), START, CHAIN_VOCAB)
    rows = [torch.zeros(1, CHAIN_VOCAB), torch.full((1, CHAIN_VOCAB), broken), torch.zeros(1, CHAIN_VOCAB)]
    tokens = [int(sampler(row, i)) for i, row in enumerate(rows)]
    with pytest.raises(UserError, match="NaN or infinite logits"):
        sampler.chain(tokens)


@pytest.mark.parametrize("vocab", [3, 255, 256, 257, 1000])
def test_top_tokens_of_many(engine: str, vocab: int) -> None:
    probs = rows_of(3, 6, vocab).mul(3).softmax(-1)
    probs[1, : vocab // 2] = 0
    probs[2] = torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab)
    probs = probs / probs.sum(-1, keepdim=True)
    for row, top in zip(probs.tolist(), top_tokens(probs, 4), strict=True):
        best = sorted(range(vocab), key=lambda token: -row[token])[:4]
        assert top.top == tuple((token, row[token]) for token in best if row[token] > 0)
        assert top.entropy == pytest.approx(-sum(p * math.log(p) for p in row if p), abs=1e-5)


def test_a_nucleus_whose_mass_equals_top_p_is_complete(engine: str) -> None:
    probs = SamplingParams(top_p=0.5).logits_to_probs(torch.zeros(1, 4))
    assert sorted(probs[0].tolist()) == [0.0, 0.0, 0.5, 0.5]


def test_constraints_that_leave_no_token_are_named() -> None:
    with pytest.raises(UserError, match="bad words exclude every token: ban fewer"):
        SamplingParams(bad_words=((0,), (1,))).process_logits(torch.zeros(1, 2), [[]])
    with pytest.raises(UserError, match="NaN or infinite"):  # not the sentence about processors
        SamplingParams(repetition_penalty=2.0).process_logits(torch.full((1, 4), -math.inf), [[]])


def test_processors_must_return_a_row_with_a_finite_logit() -> None:
    def processor(result: Any) -> Any:
        return lambda path, logits: result

    logits = torch.zeros(1, 3)
    for wrong, shown in ((torch.zeros(4), r"\[4\]"), (None, "NoneType"), ([0.0] * 3, "list")):
        with pytest.raises(UserError, match=rf"logits processor .* shape \[3\], not {shown}"):
            SamplingParams(processors=(processor(wrong),)).process_logits(logits, [[]])
    with pytest.raises(UserError, match="logits processors exclude every token"):
        SamplingParams(processors=(processor(torch.full((3,), -torch.inf)),)).process_logits(logits, [[]])
    half = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    assert SamplingParams(processors=(processor(half),)).process_logits(logits, [[]]).dtype == torch.float32


@pytest.mark.usefixtures("torch_engine")
def test_small_probabilities_after_a_large_one_are_sampled() -> None:
    """Float32 sums of them all equal 1."""
    probs = torch.tensor([1.0] + [1e-9] * 10)
    for token in range(1, 11):
        assert native.sample_at(probs, (1 + (token - 0.5) * 1e-9) / (1 + 1e-8)) == token


@pytest.mark.parametrize("u", [0.0, 0.2499, 0.25, 0.9999999999, 1.0])
@pytest.mark.usefixtures("torch_engine")
def test_the_inverse_distribution_ends_at_possible_tokens(u: float) -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 1.0, 0.0])  # need not be normalised
    assert native.sample_at(probs, u) == (1 if u < 0.25 else 3 if u < 0.5 else 4)


def test_shared_noise_repeats_at_forgotten_positions() -> None:
    probs = rows_of(7, 1)[0].softmax(-1)
    noise = SharedNoise(4, memory=3)
    first = [noise.sample(probs, position) for position in range(8)]
    assert [noise.sample(probs, position) for position in range(8)] == first and len(set(first)) > 1
    assert [SharedNoise(5).sample(probs, position) for position in range(8)] != first


# --- custom processors: exact if they depend on position and text only ------------------------------------------------


def no_repetition(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Exclude the last token, in place, and prefer even tokens at even positions."""
    logits[tokens[-1]] = -torch.inf
    logits[len(tokens) % 2 :: 2] += 1.0
    return logits


@pytest.mark.parametrize("drafter", ["model", "straight", "tree", "n-grams", "hybrid", "siblings", "guessed forest"])
@pytest.mark.parametrize("name", ["plain", "top-p", "greedy"])
def test_the_text_follows_the_processed_distribution(name: str, drafter: str) -> None:
    sampling = replace(SAMPLING[name], processors=(no_repetition,))
    probs, drafted, _ = enumerate_distribution(sampling, DRAFTERS[drafter])
    expected = true_distribution(sampling, 3, ())
    assert distance(probs, expected) < ROUNDING and drafted > 0
    assert distance(expected, true_distribution(SAMPLING[name], 3, ())) > 0.1


def no_rise(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Allow falling tokens only after the prompt: no token may follow a text that rises."""
    start = len(PROMPT) - 1
    rises = any(b > a for a, b in pairwise(tokens[start:]))
    logits[tokens[-1] + 1 if not rises else 0 :] = -torch.inf
    return logits


@pytest.mark.parametrize(
    "drafter", ["model", "tree", "tree of a head", "lookahead", "n-grams", "guesses", "guessed forest"]
)
@pytest.mark.parametrize("name", ["plain", "greedy"])
def test_drafts_may_contain_excluded_tokens(name: str, drafter: str) -> None:
    """The rows after them are not processed, since no text contains them."""
    sampling = replace(SAMPLING[name], processors=(no_rise,))
    probs, *_ = enumerate_distribution(sampling, DRAFTERS[drafter], length=4)
    assert distance(probs, true_distribution(sampling, 4, ())) < ROUNDING


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer()))


@pytest.mark.parametrize("method", ["ar", "draft", "nasd"])
def test_a_run_applies_the_processors_to_target_and_drafter(target: str, method: str) -> None:
    def letters(tokens: Sequence[int], logits: Tensor) -> Tensor:
        allowed = 40 + len(tokens) % 20
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([allowed]), 0.0)

    drafter = {"drafter": target} if method == "draft" else {}
    recipe = Recipe(target=target, **drafter, method=method, temperature=1.0, max_tokens=12, device="cpu")
    events = generate(recipe, "abc", ModelPool(), processors=[letters])
    steps = [event for event in events if isinstance(event, StepEvent)]
    tokens = [token for event in steps for token in event.step.tokens]
    assert len(tokens) == 12 and {(b - a) % 20 for a, b in pairwise(tokens)} == {1}
    if method == "draft":
        assert steps[-1].metrics.accepted == steps[-1].metrics.drafted > 0


def test_processors_need_a_local_target() -> None:
    recipe = Recipe(cloud=CloudConfig("http://127.0.0.1:1"))
    with pytest.raises(UserError, match="processors needs a local target"):
        list(generate(recipe, "abc", processors=[no_repetition]))
