"""Drafted chains, random streams and rows of logits, with the compiled engine and without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes.enumeration import reference_probs
from torch import Tensor

from specdemo.core import sampling as sampling_module
from specdemo.core.banned_text import BannedText
from specdemo.core.distributions import SparseProbs
from specdemo.core.errors import UserError
from specdemo.core.sampling import (
    ChainSampler,
    Noise,
    SamplingParams,
    SharedNoise,
    fitted,
    top_tokens,
    with_tokens,
)
from specdemo.native import sampling as native

VOCAB, START = 11, 5
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(params=["compiled", "torch", "device"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`device`: tensors are treated like those of an accelerator."""
    if request.param != "compiled":
        request.getfixturevalue("torch_engine")
    if request.param == "device":
        monkeypatch.setattr(sampling_module, "is_on_host", lambda x: False)
    yield request.param


def rows_of(seed: int, count: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_records_the_distributions_that_its_tokens_were_sampled_from(engine: str, temperature: float) -> None:
    sampling = SamplingParams(temperature, top_k=4)
    for seed in range(5):
        logits = rows_of(seed, 3, VOCAB - 2)  # a smaller vocabulary than the target's
        sampler = ChainSampler(sampling, Noise(seed, "draft"), START, VOCAB)
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


def test_shared_noise_of_a_chain_is_keyed_by_position(engine: str) -> None:
    logits, noise = rows_of(0, 4), SharedNoise(3)
    sampler = ChainSampler(SamplingParams(), SharedNoise(3), START, VOCAB)
    tokens = [int(sampler(row[None], i)) for i, row in enumerate(logits)]
    assert tokens == [noise.sample(row.softmax(-1), START + i) for i, row in enumerate(logits)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_logits_of_a_chain_are_refused_at_its_end(engine: str, broken: float, temperature: float) -> None:
    sampler = ChainSampler(SamplingParams(temperature), Noise(0, "draft"), START, VOCAB)
    rows = [torch.zeros(1, VOCAB), torch.full((1, VOCAB), broken), torch.zeros(1, VOCAB)]
    tokens = [int(sampler(row, i)) for i, row in enumerate(rows)]
    with pytest.raises(UserError, match="NaN or infinite logits"):
        sampler.chain(tokens)


def test_uniform_numbers_determine_a_chain() -> None:
    assert ChainSampler(SamplingParams(0), Noise(1, "draft"), START, VOCAB).uniforms(3) == []
    assert ChainSampler(SamplingParams(), SharedNoise(1), START, VOCAB).uniforms(3) is None
    numbers = ChainSampler(SamplingParams(), Noise(1, "draft"), START, VOCAB).uniforms(3)
    noise = Noise(1, "draft")
    assert numbers == [noise.test(0.5)[1] for _ in range(3)]


def test_a_recorded_chain_has_the_recorded_figures() -> None:
    probs = rows_of(1, 2).softmax(-1)
    sampler = ChainSampler(SamplingParams(), Noise(0, "draft"), START, VOCAB)
    sampler.record([1.0, 2.0], [0.25, 0.5], probs)
    draft = sampler.chain([3, 4])
    assert draft.token_probs == (0.25, 0.5) and torch.equal(draft.probs.dense(), probs)
    sampler.record([1.0], [], None)
    assert sampler.chain([3]).probs is None
    sampler.record([1.0, math.nan], [0.25, 0.5], probs)
    with pytest.raises(UserError, match="NaN or infinite logits"):
        sampler.chain([3, 4])


def test_rows_of_a_head_are_distributions_of_its_tokens() -> None:
    sampler = ChainSampler(SamplingParams(), Noise(0, "draft"), START, VOCAB)
    sampler.ids = torch.tensor([[9, 2, 4]])
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])
    sampler.record([0.0, 0.0], [0.25, 0.75], probs)
    draft = sampler.chain([2, 4])
    assert isinstance(draft.probs, SparseProbs) and draft.probs.vocab_size == VOCAB
    dense = torch.zeros(2, VOCAB)
    dense[:, [9, 2, 4]] = probs
    assert torch.equal(draft.probs.dense(), dense) and draft.token_probs == (0.25, 0.75)


def test_logits_are_fitted_to_a_vocabulary() -> None:
    logits = rows_of(2, 2)
    assert torch.equal(fitted(logits, VOCAB), logits) and torch.equal(fitted(logits, 4), logits[:, :4])
    for missing in (1, 2):
        padded = fitted(logits, VOCAB + missing)
        assert torch.equal(padded[:, :VOCAB], logits) and padded.shape == (2, VOCAB + missing)
        assert padded[:, VOCAB:].eq(-torch.inf).all()


def test_the_largest_logits_of_rows(engine: str) -> None:
    logits = rows_of(3, 4)
    logits[1, 7] = logits[1, 2] = 50.0
    tokens, values = native.largest_logits(logits)
    assert tokens == [max(range(VOCAB), key=lambda token: row[token]) for row in logits.tolist()] and tokens[1] == 2
    assert all(type(token) is int for token in tokens)
    assert values == [max(row) for row in logits.tolist()]


def test_top_tokens_of_rows_exclude_impossible_ones(engine: str) -> None:
    probs = torch.tensor([[0.5, 0.0, 0.125, 0.375], [0.0, 0.0, 1.0, 0.0]])
    first, second = top_tokens(probs, 2)
    assert first.top == ((0, 0.5), (3, 0.375)) and second.top == ((2, 1.0),)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.125, 0.375))
    assert first.entropy == pytest.approx(entropy) and second.entropy == pytest.approx(0.0, abs=1e-6)
    first, second = with_tokens(top_tokens(probs, 1), probs, [{1, 2, 0}, ()])
    assert first.top == ((0, 0.5), (2, 0.125), (1, 0.0)) and second.top == ((2, 1.0),)
    assert first.entropy == pytest.approx(entropy)
    assert [row.top for row in top_tokens(probs, 9)] == [((0, 0.5), (3, 0.375), (2, 0.125)), ((2, 1.0),)]


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


@pytest.mark.parametrize("temperature", [0.0, 0.25, 1.0, 4.0])
def test_the_largest_logit_must_be_finite_after_the_temperature(temperature: float) -> None:
    limit = LARGEST * min(1.0, temperature or 1.0)
    sampling = SamplingParams(temperature)
    sampling.refuse_broken([limit, -limit, 0.0])
    for wrong in (math.nextafter(limit, math.inf), -math.nextafter(limit, math.inf), math.inf, math.nan):
        with pytest.raises(UserError) as error:
            sampling.refuse_broken([0.0, wrong])
        assert str(error.value) == (
            "the model returned NaN or infinite logits: try dtype float32, or another checkpoint"
        )


PARAMETERS = [
    SamplingParams(0.7),
    SamplingParams(1.5, top_k=3),
    SamplingParams(1.0, top_k=VOCAB),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_p=0.6),
    SamplingParams(0.8, top_k=5, top_p=0.9),
    SamplingParams(0.0),
]


@pytest.mark.parametrize("sampling", PARAMETERS)
def test_distributions_of_both_engines_equal_the_reference(engine: str, sampling: SamplingParams) -> None:
    logits = rows_of(4, 6)
    for row, probs in zip(logits.tolist(), sampling(logits, [()] * 6).tolist(), strict=True):
        assert probs == pytest.approx(reference_probs(row, sampling, ()), abs=1e-6)


def test_a_nucleus_whose_mass_equals_top_p_is_complete(engine: str) -> None:
    probs = SamplingParams(top_p=0.5).logits_to_probs(torch.zeros(1, 4))
    assert sorted(probs[0].tolist()) == [0.0, 0.0, 0.5, 0.5]


def test_a_nucleus_of_everything_leaves_the_softmax_unchanged(torch_engine: None) -> None:
    logits = rows_of(8, 20, 1000)
    assert torch.equal(SamplingParams(top_p=1.0).logits_to_probs(logits), logits.softmax(1))


def test_a_wide_nucleus_without_the_compiled_engine(torch_engine: None) -> None:
    """The candidates grow until they contain the nucleus."""
    for vocab, top_p in ((3000, 0.97), (3000, 0.5), (1024, 0.999), (1025, 0.999), (300, 0.999)):
        logits, sampling = rows_of(5, 2, vocab) / 4, SamplingParams(top_p=top_p)
        probs = sampling.logits_to_probs(logits)
        for row, ours in zip(logits.double().softmax(-1), probs, strict=True):
            mass, order = row.sort(descending=True)
            kept = int((mass.cumsum(-1) - mass < top_p).sum())
            assert ours.count_nonzero() == kept and float(ours.sum()) == pytest.approx(1.0, abs=1e-5)
            assert torch.allclose(ours[order[:kept]].double(), mass[:kept] / mass[:kept].sum(), atol=1e-6)


def test_constraints_in_their_order() -> None:
    """Penalty of each token of the path once, then single and longer bad words, on the row of their path."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]] * 3, dtype=torch.bfloat16)
    sampling = SamplingParams(repetition_penalty=2.0, bad_words=((3,), (0, 1, 2)))
    assert sampling.needs_paths and not SamplingParams(0.5, top_k=2, top_p=0.5).needs_paths
    rows = sampling.process_logits(logits, [[], [0, 1, 1], [1, 0, 0]])
    assert rows.dtype == torch.float32
    assert rows.tolist() == [[2, -2, 1, -math.inf], [1, -4, 1, -math.inf], [1, -4, 1, -math.inf]]
    assert sampling.process_logits(logits[:1], [[3, 0, 1]]).tolist() == [[1, -4, -math.inf, -math.inf]]
    assert logits.tolist() == [[2, -2, 1, 3]] * 3
    with pytest.raises(UserError, match="^the bad words exclude every token: ban fewer words$"):
        SamplingParams(bad_words=((0,), (1,))).process_logits(torch.zeros(1, 2), [[]])
    with pytest.raises(UserError, match="NaN or infinite"):
        sampling.process_logits(torch.full((1, 4), math.nan), [[]])
    with pytest.raises(UserError, match="NaN or infinite"):  # not the sentence about processors
        SamplingParams(repetition_penalty=2.0).process_logits(torch.full((1, 4), -math.inf), [[]])
    with pytest.raises(ValueError, match="zip"):
        sampling.constrain(logits, [[]])


def test_bad_words_and_banned_texts_are_excluded_together() -> None:
    """Tokens of the text outside the vocabulary of a model are ignored."""
    banned = BannedText(["b"], [b"a", b"b", b"c", b"cb", b"b"])
    sampling = SamplingParams(bad_words=((0,),), banned=banned)
    assert sampling.needs_paths and SamplingParams(banned=banned).needs_paths
    rows = sampling.process_logits(torch.zeros(2, 4), [[], [2]])
    assert rows.tolist() == [[-math.inf, -math.inf, 0, -math.inf]] * 2


def processor(result: Any) -> Any:
    return lambda path, logits: result


def test_processors_must_return_a_row_with_a_finite_logit() -> None:
    logits = torch.zeros(1, 3)
    for wrong, shown in ((torch.zeros(4), r"\[4\]"), (None, "NoneType"), ([0.0] * 3, "list")):
        with pytest.raises(UserError, match=rf"^a logits processor must return a tensor of shape \[3\], not {shown}$"):
            SamplingParams(processors=(processor(wrong),)).process_logits(logits, [[]])
    with pytest.raises(UserError, match="^the logits processors exclude every token: leave one token finite$"):
        SamplingParams(processors=(processor(torch.full((3,), -torch.inf)),)).process_logits(logits, [[]])
    half = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    assert SamplingParams(processors=(processor(half),)).process_logits(logits, [[]]).dtype == torch.float32


def test_streams_have_different_seeds_and_reproducible_numbers() -> None:
    numbers = {tuple(Noise(seed, name).uniforms(3)) for seed in (0, 1) for name in ("draft", "accept")}
    assert len(numbers) == 4 and Noise(1, "draft").uniforms(3) == Noise(1, "draft").uniforms(3)
    noise, again = Noise(2, "accept"), Noise(2, "accept")
    for probability in (0.0, 0.3, 0.7, 1.0):
        accepted, u = noise.test(probability)
        assert [u] == again.uniforms(1) and accepted == (u < probability)


def test_probability_zero_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(0, "accept")
    monkeypatch.setattr(noise._uniform, "random", lambda: 0.0)
    assert noise.test(0.0) == (False, 0.0)


def test_the_race_and_the_inverse_distribution_use_the_seed_of_the_stream() -> None:
    probs = rows_of(6, 1)[0].softmax(-1)
    for way in (Noise.sample_on_device, Noise.sample):
        samples = [
            [int(way(noise, probs)) for _ in range(8)] for noise in (Noise(1, "a"), Noise(1, "a"), Noise(2, "a"))
        ]
        assert samples[0] == samples[1] != samples[2] and len(set(samples[0])) > 1
    assert Noise(1, "a").sample_on_device(probs).shape == (1,)


@pytest.mark.usefixtures("torch_engine")
def test_small_probabilities_after_a_large_one_are_sampled() -> None:
    """Float32 sums of them all equal 1."""
    probs = torch.tensor([1.0] + [1e-9] * 10)
    for token in range(1, 11):
        assert native.sample_at(probs, (1 + (token - 0.5) * 1e-9) / (1 + 1e-8)) == token


def test_distributions_of_another_device_are_sampled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, noise = torch.ones(3, device="meta"), Noise(0, "a")
    monkeypatch.setattr(noise, "sample_on_device", lambda received: 2)
    assert noise.sample(probs) == 2


@pytest.mark.parametrize("u", [0.0, 0.2499, 0.25, 0.9999999999, 1.0])
@pytest.mark.usefixtures("torch_engine")
def test_the_inverse_distribution_ends_at_possible_tokens(u: float) -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 1.0, 0.0])  # need not be normalised
    assert native.sample_at(probs, u) == (1 if u < 0.25 else 3 if u < 0.5 else 4)


def test_shared_noise_is_limited_to_recent_positions_and_repeats() -> None:
    probs = rows_of(7, 1)[0].softmax(-1)
    noise = SharedNoise(4, memory=3)
    first = [noise.sample(probs, position) for position in range(8)]
    assert list(noise._arrival) == [5, 6, 7]
    assert [noise.sample(probs, position) for position in range(8)] == first  # also after they were forgotten
    assert [SharedNoise(4).sample(probs, position) for position in range(8)] == first and len(set(first)) > 1
    assert [SharedNoise(5).sample(probs, position) for position in range(8)] != first
    default = SharedNoise(4)
    for position in range(200):
        default.sample(probs, position)
    assert list(default._arrival) == list(range(72, 200))
    assert default.sample_on_device(probs, 3).shape == (1,)
