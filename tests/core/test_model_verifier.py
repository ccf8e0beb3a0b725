"""Records of a verification: most probable tokens, log-probabilities and ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes.tiny_models import TableModel
from torch import Tensor

from specdemo.core.distributions import DenseProbs
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Verdict
from specdemo.core.verifier import (
    ModelVerifier,
    committed_logprobs,
    position_tokens,
    with_top_tokens,
)

VOCAB = 7
TARGET, SMALL = TableModel(VOCAB, 1), TableModel(VOCAB, 2)
TEXT = (3, 1)
FOREST = Draft((5, 6, 2, 5), (-1, -1, 0, 1))


def verifier_of(sampling: SamplingParams = SamplingParams(), seed: int = 0, **options: Any) -> ModelVerifier:
    accept, correct = Noise(seed, "accept"), Noise(seed, "correct")
    return ModelVerifier(TARGET.score, sampling, rejection, accept, correct, **options)


def sampled_chain(seed: int, length: int = 3) -> Draft:
    rng, tokens, rows = torch.Generator().manual_seed(seed), list(TEXT), []
    for _ in range(length):
        rows.append(SMALL.logits(tokens).softmax(-1))
        tokens.append(int(torch.multinomial(rows[-1], 1, generator=rng)))
    chosen = tuple(tokens[len(TEXT) :])
    probs = tuple(float(row[token]) for row, token in zip(rows, chosen, strict=True))
    return Draft.chain(chosen, probs, DenseProbs(torch.stack(rows)))


def path_before(draft: Draft, row: int) -> list[int]:
    return [*TEXT, *(draft.tokens[node] for node in draft.path(row - 1))]


def sorted_tokens(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda token: -values[token])[:count]


@pytest.mark.parametrize("count", [0, 2, 100])
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_are_those_of_the_raw_logits_along_the_committed_path(seed: int, count: int) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3)
    draft = sampled_chain(seed) if seed % 2 else FOREST
    verdict = verifier_of(sampling, seed, logprobs=count).verify(TEXT, draft)
    text = [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
    assert len(verdict.logprobs) == len(text) == len(verdict.accepted) + 1
    path = list(TEXT)
    for token, logprob in zip(text, verdict.logprobs, strict=True):
        expected = TARGET.logits(path).log_softmax(-1).tolist()
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-6)
        listed = sorted_tokens(expected, count)
        assert [token for token, _ in logprob.top] == listed
        assert [value for _, value in logprob.top] == pytest.approx([expected[token] for token in listed], abs=1e-6)
        path.append(token)


def test_logprobs_of_a_search() -> None:
    logits = TARGET.score(TEXT, FOREST)
    verdict = Verdict((1, 3), None, committed=(2, 4))  # both tokens follow the last accepted node
    expected = logits.log_softmax(-1)
    rows_and_tokens = [(0, 6), (2, 5), (4, 2), (4, 4)]
    values = [item.logprob for item in committed_logprobs(logits, FOREST, verdict, 1)]
    assert values == pytest.approx([float(expected[pair]) for pair in rows_and_tokens], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tops_are_recorded_for_target_draft_and_residual(temperature: float) -> None:
    """At temperature 0 the softmax is recorded; residuals exist after a rejection only."""
    corrections = 0
    for seed in range(12):
        draft = sampled_chain(seed)
        verdict = verifier_of(SamplingParams(temperature), seed, top=2).verify(TEXT, draft)
        tokens = position_tokens(draft, verdict.token, verdict.accepted)
        for row, top in enumerate(verdict.target_top):
            p = (TARGET.logits(path_before(draft, row)) / (temperature or 1)).softmax(-1)
            wanted = tokens[row] | set(sorted_tokens(p.tolist(), 2))
            if row < len(draft):
                wanted |= set(sorted_tokens(draft.probs.row(row).tolist(), 2))
            assert dict(top.top).keys() == wanted
            assert list(top.top) == sorted(top.top, key=lambda pair: -pair[1])
            assert top.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
        for node, top in enumerate(verdict.draft_top):
            assert dict(top.top).keys() == dict(verdict.target_top[node].top).keys()
        assert len(verdict.target_top) == len(draft) + 1 and len(verdict.draft_top) == len(draft)
        corrected = temperature > 0 and len(verdict.accepted) < len(draft)
        assert (verdict.token_top is not None) == corrected
        if corrected:
            row = len(verdict.accepted)
            q, p = draft.probs.row(row), (TARGET.logits(path_before(draft, row)) / temperature).softmax(-1)
            expected = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
            shown = dict(verdict.token_top.top)
            assert {verdict.token, draft.tokens[row]} | set(sorted_tokens(p.tolist(), 2)) <= shown.keys()
            assert shown == pytest.approx({token: float(expected[token]) for token in shown}, abs=1e-5)
            corrections += 1
    assert corrections or not temperature


@pytest.mark.parametrize("change", [Tensor.contiguous, Tensor.double, lambda p: torch.cat([p, p], 1)[:, :VOCAB]])
def test_ranks_of_any_distributions_count_larger_probabilities(change: Callable[[Tensor], Tensor]) -> None:
    """Compiled, without the compiled engine, and in rows that are not contiguous."""
    draft = Draft((5, 6, 2, 5, 5), (-1, -1, 0, 1, 3))
    for seed in range(5):
        p = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)).softmax(1)
        p[0, 5] = p[0, 3]
        rows = [p[parent + 1].tolist() for parent in draft.parents]
        larger = [sum(value > row[token] for value in row) for token, row in zip(draft.tokens, rows, strict=True)]
        assert with_top_tokens(Verdict((), 0), draft, change(p), 1).rank == tuple(1 + count for count in larger)
