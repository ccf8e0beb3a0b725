"""Output distributions by enumeration of all random outcomes.

Errors of exact rules are rounding errors; lossy rules are detected. Joint distributions of up to three tokens from
vocabularies of three or four.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from fakes.enumeration import (
    DRAFTERS,
    FORESTS,
    PROMPT,
    ROUNDING,
    SAMPLING,
    SMALL,
    STOP,
    TARGET,
    VOCAB,
    Make,
    distance,
    enumerate_distribution,
    enumerated,
    true_distribution,
)
from fakes.tiny_models import EnumeratedVerifier, Explorer, committed, run
from torch import Tensor

from specdemo.core.distributions import DenseProbs, residual
from specdemo.core.policies import POLICIES, CostModel, DraftLengths, Fixed, PathProbability
from specdemo.core.rules import RULES, match, ratio, rejection, threshold, typical
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft, Verdict
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.lookahead import LookaheadDrafter

pytestmark = pytest.mark.long


@pytest.mark.parametrize("stop", [(), STOP], ids=["no stop", "stop"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_rejection_is_exact(sampling: str, drafter: str, stop: tuple[int, ...]) -> None:
    probs, drafted, accepted = enumerate_distribution(SAMPLING[sampling], DRAFTERS[drafter], stop=stop)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, stop)) < ROUNDING
    if drafter != "none":
        assert drafted > 0
    if drafter not in ("none", "n-grams", "suffix", "lookup", "lookahead") and sampling in ("plain", "warm"):
        assert accepted > 0


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_length_and_gamma(length: int, gamma: int) -> None:
    probs, _, _ = enumerate_distribution(SamplingParams(), DRAFTERS["model"], length=length, gamma=gamma, each_run=True)
    assert distance(probs, true_distribution(SamplingParams(), length, ())) < ROUNDING


@pytest.mark.parametrize("stop", [(), STOP], ids=["no stop", "stop"])
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in FORESTS])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_block_verification_of_chains_is_exact(sampling: str, drafter: str, stop: tuple[int, ...]) -> None:
    probs, *_ = enumerate_distribution(SAMPLING[sampling], DRAFTERS[drafter], RULES["block"].apply, stop=stop)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, stop)) < ROUNDING


def test_lookahead_with_teeth_is_exact() -> None:
    """A text long enough for a comb with teeth and for n-grams that were read from it."""
    probs, drafted, accepted = enumerate_distribution(
        SamplingParams(), lambda sampling, source: LookaheadDrafter(window=1, n=3, guesses=2), length=5, gamma=3
    )
    assert distance(probs, true_distribution(SamplingParams(), 5, ())) < ROUNDING and drafted > accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_match_is_exact(sampling: str, drafter: str) -> None:
    probs, _, _ = enumerate_distribution(SAMPLING[sampling], DRAFTERS[drafter], match)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, ())) < ROUNDING


@pytest.mark.parametrize("drafter", ["model", "siblings", "sparse siblings", "guessed forest"])
@pytest.mark.parametrize(
    "name", [name for name, rule in RULES.items() if not rule.exact(SamplingParams()) and not rule.lenient]
)
def test_lossy_rules_are_exact_at_temperature_0_only(name: str, drafter: str) -> None:
    rule = RULES[name].apply
    if RULES[name].threshold is not None:
        rule = partial(rule, threshold=RULES[name].threshold)
    greedy = SamplingParams(temperature=0)
    probs, _, _ = enumerate_distribution(greedy, DRAFTERS[drafter], rule)
    assert distance(probs, true_distribution(greedy, 3, ())) < ROUNDING
    probs, drafted, accepted = enumerate_distribution(SamplingParams(), DRAFTERS[drafter], rule)
    assert drafted > accepted > 0
    assert distance(probs, true_distribution(SamplingParams(), 3, ())) > 0.02


P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])


def one_token(rule: Any) -> list[float]:
    """Return the distribution of the token after a step that drafts one token from `Q` for the target `P`."""
    explorer = Explorer()

    def once() -> int:
        token = explorer.sample(Q)
        draft = Draft.chain((token,), (float(Q[token]),), DenseProbs(Q[None]))
        verdict = rule(draft, torch.stack([P, P]), explorer, explorer, 1)
        return token if verdict.accepted else verdict.token

    probs = explorer.distribution(once)
    return [probs.get(token, 0.0) for token in range(3)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (partial(ratio, threshold=0.9), [0.2 + 0.5 * 0.6, 0.3 + 0.5 * 0.3, 0.5 * 0.1]),  # rejects the last token only
        (partial(threshold, threshold=0.4), [0.2 + 0.8 * 0.6, 0.8 * 0.3, 0.8 * 0.1]),  # accepts the first only
        (partial(typical, threshold=0.09), [0.2, 0.3, 0.5]),  # accepts every token: the text is the drafter's
    ],
)
def test_lossy_rules_have_the_predicted_error(rule: Any, expected: list[float]) -> None:
    """The accepted mass of q plus the rejected mass, spread by the correction distribution."""
    assert one_token(rule) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        *product(("model", "straight", "head"), ("rejection", "block", "match")),
        *product(("tree",), ("rejection", "match")),
    ],
)
@pytest.mark.parametrize(("target", "own"), [("plain", "top-p"), ("top-p", "greedy"), ("greedy", "warm")])
def test_a_drafter_with_its_own_sampling_is_exact(target: str, own: str, drafter: str, rule: str) -> None:
    def make(sampling: SamplingParams, source: Explorer) -> Any:
        return DRAFTERS[drafter](SAMPLING[own], source)

    probs, drafted, accepted = enumerate_distribution(SAMPLING[target], make, RULES[rule].apply)
    assert distance(probs, true_distribution(SAMPLING[target], 3, ())) < ROUNDING and drafted > 0
    if target != "greedy":
        assert accepted > 0


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.2])
def test_lenience_bounds_the_error(lenience: float) -> None:
    """Of a draft token min(q, p / l) is accepted, the rest follows norm(max(0, p - l q)); none exceeds p / l."""
    probs = one_token(partial(RULES["lenient"].apply, threshold=lenience))
    accepted, excess = torch.minimum(Q, P / lenience), (P - lenience * Q).clamp(min=0)
    expected = accepted + (1 - accepted.sum()) * excess / excess.sum()
    assert probs == pytest.approx(expected.tolist(), abs=1e-6)
    assert all(prob <= float(p) / lenience + 1e-6 for prob, p in zip(probs, P, strict=True))
    assert (distance(dict(enumerate(probs)), dict(enumerate(P.tolist()))) < ROUNDING) == (lenience == 1)


@pytest.mark.parametrize("sampling", ["plain", "warm", "greedy"])
@pytest.mark.parametrize("drafter", ["model", "siblings", "guessed forest"])
def test_full_lenience_is_speculative_sampling(sampling: str, drafter: str) -> None:
    rule = partial(RULES["lenient"].apply, threshold=1.0)
    probs, drafted, accepted = enumerate_distribution(SAMPLING[sampling], DRAFTERS[drafter], rule)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, ())) < ROUNDING and drafted > 0


@pytest.mark.parametrize("lenience", [0.3, 0.6, 1.0])
def test_greedy_lenience_compares_raw_probabilities(lenience: float) -> None:
    """At temperature 0 a draft token needs l times the largest probability; corrections are the largest."""
    greedy, noise = SamplingParams(temperature=0), Noise(0, "unused")
    verifier = ModelVerifier(TARGET.score, greedy, partial(RULES["lenient"].apply, threshold=lenience), noise, noise)
    raw = TARGET.logits(list(PROMPT)).softmax(-1)
    near = raw >= lenience * raw.max()
    assert near.any() and (lenience == 0.3 or not near.all())
    for token in range(VOCAB):
        verdict = verifier.verify(PROMPT, Draft.chain((token,)))
        assert bool(verdict.accepted) == bool(near[token])
        assert verdict.accepted or verdict.token == int(raw.argmax())


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", ["model", "straight", "draft vocabulary", "head", "n-grams", "universal", "guesses", "guessed forest"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_coupled_text_equals_ar_text(temperature: float, drafter: str) -> None:
    """Token by token, at any temperature, for every drafter and gamma, from the same seed."""
    sampling, accepted, texts = SamplingParams(temperature=temperature), 0, set()
    for seed in range(12):

        def text(make: Make, gamma: int, seed: int = seed) -> tuple[int, ...]:
            nonlocal accepted
            verifier = ModelVerifier(TARGET.score, sampling, match, SharedNoise(seed), SharedNoise(seed), 2)
            steps = run(PROMPT, verifier, make(sampling, SharedNoise(seed)), Fixed(gamma), 12)
            accepted += sum(len(step.verdict.accepted) for step in steps)
            return tuple(committed(steps))

        plain = text(DRAFTERS["none"], 1)
        texts.add(plain)
        for gamma in (1, 2, 5):
            assert text(DRAFTERS[drafter], gamma) == plain
    assert accepted > 0 and (len(texts) > 10 or temperature == 0)


_FAST = ("fixed", "egag")  # a policy without and one with logits
# Two likely tokens per position keep the enumeration small where several drafts follow each other.
_TEXTS = {
    "plain": (SamplingParams(), 2),
    "processed": (SamplingParams(top_k=2, repetition_penalty=1.5), 3),
    "top-p": (SamplingParams(top_p=0.7), 3),
    "greedy": (SamplingParams(temperature=0), 3),
}
_CONFIDENT = (*PROMPT, 0)  # followed by a distribution of low entropy: every policy drafts


def _marks(policy: str, drafter: str, rule: str) -> tuple[pytest.MarkDecorator, ...]:
    """Rules match and block are combined with all policies for one drafter, and with two for the others."""
    if rule != "rejection" and policy not in _FAST and drafter != "model":
        return (pytest.mark.slow, pytest.mark.exhaustive)
    return () if policy in _FAST and rule != "match" else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("policy", "drafter", "rule"),
    [
        pytest.param(policy, drafter, rule, marks=_marks(policy, drafter, rule))
        for policy, drafter, rule in product(POLICIES, DRAFTERS, ("rejection", "block", "match"))
        if not (RULES[rule].chains_only and drafter in FORESTS)
    ],
)
def test_every_drafter_rule_and_policy_is_exact(policy: str, drafter: str, rule: str) -> None:
    """The output has the target's distribution at any temperature; the first step drafts, too."""
    lengths = set()
    for name, (sampling, length) in _TEXTS.items():
        verifier = enumerated(sampling, RULES[rule].apply)

        def once(sampling: SamplingParams = sampling, verifier: EnumeratedVerifier = verifier, n: int = length) -> Any:
            gamma = POLICIES[policy].make(DraftLengths(2, 0, 3), CostModel())
            new = DRAFTERS[drafter](sampling, verifier.explorer)
            steps = run(_CONFIDENT, verifier, new, gamma, n, first_target=False)
            lengths.update(len(step.draft) for step in steps)
            return tuple(committed(steps))

        truth = true_distribution(sampling, length, (), _CONFIDENT)
        assert distance(verifier.explorer.distribution(once), truth) < ROUNDING, name
    assert (max(lengths) > 0) == (drafter != "none")


@pytest.mark.slow
@pytest.mark.parametrize("name", _TEXTS)
@pytest.mark.parametrize("drafter", ["model", "head", "tree", "suffix", "hybrid", "universal"])
def test_rising_costs_and_pauses_after_losses_are_exact(drafter: str, name: str) -> None:
    """Policy `path`, where each loss pauses it for a step and copies become shorter."""
    sampling, length = _TEXTS[name]
    explorer, drafted = Explorer(), set()

    def once() -> Any:
        policy = PathProbability(3, costs=(0.2, 0.4, 0.6), most_lost=(0.3, 0.3), retry_after=(1, 1))
        verifier = ModelVerifier(TARGET.score, sampling, rejection, explorer, explorer, 2)
        steps = run(_CONFIDENT, verifier, DRAFTERS[drafter](sampling, explorer), policy, length, first_target=False)
        drafted.update(len(step.draft) for step in steps)
        return tuple(committed(steps))

    assert distance(explorer.distribution(once), true_distribution(sampling, length, (), _CONFIDENT)) < ROUNDING
    assert len(drafted) > 1


def test_corrections_from_p_are_lossy() -> None:
    """Skipping the adjustment adds the rejected mass to p: the error is sum max(q-p,0) * TV(p, residual)."""
    probs = one_token(partial(rejection, adjust=False))
    expected = torch.minimum(P, Q) + (Q - P).clamp(min=0).sum() * P
    assert probs == pytest.approx(expected.tolist(), abs=1e-6)
    assert distance(dict(enumerate(probs)), dict(enumerate(P.tolist()))) == pytest.approx(0.16, abs=1e-6)


# --- mutants: bugs of well-known projects, which the enumeration must detect ----------------------


def mutant_distribution(make: Make, rule: Any = rejection, sampling: SamplingParams = SAMPLING["top-k"]) -> float:
    return distance(enumerate_distribution(sampling, make, rule)[0], true_distribution(sampling, 3, ()))


def test_mutant_greedy_draft_verified_by_softmax() -> None:
    greedy = SamplingParams(temperature=0)
    probs, _, _ = enumerate_distribution(
        SamplingParams(), lambda sampling, source: ModelDrafter(SMALL.score, greedy, source, VOCAB)
    )
    assert distance(probs, true_distribution(greedy, 3, ())) > 0.02


def test_mutant_match_with_a_second_sample() -> None:
    """A sample outside the draft is the correction; a second sample gives the draft token 2p - p^2."""

    def drawing(draft: Draft, p: Tensor, accept: Any, correct: Any, start: int, again: bool) -> Verdict:
        accepted = []
        for node, token in enumerate(draft.tokens):
            drawn = accept.sample(p[node])
            if drawn != token:
                return Verdict(tuple(accepted), correct.sample(p[node]) if again else drawn)
            accepted.append(node)
        return Verdict(tuple(accepted), correct.sample(p[len(draft)]))

    def of(again: bool) -> float:
        return mutant_distribution(DRAFTERS["guesses"], lambda *args: drawing(*args, again=again), SamplingParams())

    assert of(again=False) < ROUNDING
    assert of(again=True) > 0.02
    p = torch.tensor([[0.3, 0.7], [0.3, 0.7]])
    explorer = Explorer()

    def once() -> int:
        verdict = drawing(Draft.chain((0,)), p, explorer, explorer, 1, again=True)
        return 0 if verdict.accepted else verdict.token

    assert explorer.distribution(once)[0] == pytest.approx(2 * 0.3 - 0.09)


def test_mutant_raw_q() -> None:
    """q must be the distribution sampled from, not the softmax of the raw logits."""

    class Raw(ModelDrafter):
        def propose(self, tokens: Sequence[int], budget: Any) -> Draft:
            draft = super().propose(tokens, budget)
            if not draft.tokens:
                return draft
            probs = torch.stack([SMALL.logits([*tokens, *draft.tokens[:i]]) for i in range(len(draft))]).softmax(-1)
            q = tuple(float(row[token]) for row, token in zip(probs, draft.tokens, strict=True))
            return replace(draft, token_probs=q, probs=DenseProbs(probs))

    assert mutant_distribution(lambda sampling, source: Raw(SMALL.score, sampling, source, VOCAB)) > 0.02


def test_mutant_dropping_sampled_tokens() -> None:
    """Dropping improbable samples biases the text; deciding before sampling does not."""

    class Dropping(ModelDrafter):
        def propose(self, tokens: Sequence[int], budget: Any) -> Draft:
            draft = super().propose(tokens, budget)
            keep = next((i for i, q in enumerate(draft.token_probs or ()) if q < 0.4), len(draft))
            if keep == 0:
                return Draft()
            return Draft.chain(draft.tokens[:keep], draft.token_probs[:keep], DenseProbs(draft.probs.dense()[:keep]))

    class Deciding(Fixed):
        def may_extend(self, n: int, logits: Any) -> bool:
            return n < self.gamma and (logits is None or float(logits.softmax(-1).max()) > 0.4)

    def dropping(sampling: SamplingParams, source: Explorer) -> Dropping:
        return Dropping(SMALL.score, sampling, source, VOCAB)

    assert mutant_distribution(dropping, sampling=SamplingParams()) > 0.02
    explorer = Explorer()
    verifier = ModelVerifier(TARGET.score, SamplingParams(), rejection, explorer, explorer)

    def once() -> tuple[int, ...]:
        drafter = ModelDrafter(SMALL.score, SamplingParams(), explorer, VOCAB)
        return tuple(committed(run(PROMPT, verifier, drafter, Deciding(2), 3)))

    assert distance(explorer.distribution(once), true_distribution(SamplingParams(), 3, ())) < ROUNDING


def test_mutant_lenient_acceptance() -> None:
    """An acceptance probability 5 % too large is detected."""

    class Lenient:
        def __init__(self, source: Explorer) -> None:
            self.source = source

        def test(self, probability: float) -> tuple[bool, float]:
            return self.source.test(min(1.0, 1.05 * probability))

    def rule(draft: Draft, p: Tensor, accept: Explorer, correct: Explorer, start: int) -> Verdict:
        return rejection(draft, p, Lenient(accept), correct, start)

    assert mutant_distribution(DRAFTERS["model"], rule, SamplingParams()) > 100 * ROUNDING


def chi_square(shared: bool) -> float:
    """Chi-square statistic of 4,000 samples with one draft token each."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    streams = ["draft", "draft", "draft"] if shared else ["draft", "accept", "correct"]
    counts = [0] * 4
    for seed in range(4_000):
        draw, accept, correct = (Noise(seed, stream) for stream in streams)
        token = draw.sample(q)
        verdict = rejection(
            Draft.chain((token,), (float(q[token]),), DenseProbs(q[None])), torch.stack([p, p]), accept, correct, 1
        )
        counts[token if verdict.accepted else verdict.token] += 1
    return sum((n - 4_000 * x) ** 2 / (4_000 * x) for n, x in zip(counts, p.tolist(), strict=True))


@pytest.mark.slow
def test_noise_streams_are_independent_and_sharing_is_detected() -> None:
    """Fixed seeds make it deterministic; by chance, 1 choice in 10^5 exceeds 26 (3 degrees of freedom)."""
    assert chi_square(shared=False) < 26
    assert chi_square(shared=True) > 100


# --- corners -----------------------------------------------------------------------------------------------------


def test_residual_of_equal_distributions_is_p() -> None:
    p = torch.tensor([0.25, 0.75])
    assert residual(p, p).tolist() == p.tolist()
    assert residual(p, torch.tensor([0.5, 0.5])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_raise(bad: float) -> None:
    for sampling in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2, top_p=0.5)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            sampling(torch.full((1, 5), bad), [[0]])
    assert SamplingParams()(torch.tensor([[0.0, -math.inf]]), [[0]]).tolist() == [[1.0, 0.0]]
