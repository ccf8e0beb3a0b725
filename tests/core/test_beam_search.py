"""Beam search: a beam for every text finds the best, narrow beams equal a plain search, and that of transformers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from fakes.tiny_models import TableModel, committed, run, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from specdemo.core.decode import EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.step_record import step_of
from specdemo.core.trace import to_json
from specdemo.core.verifier import Beam, BeamSearch
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel

PROMPT = (2, 0)
CONTEXT = 100


@dataclass(frozen=True)
class Setting:
    """A search and its model."""

    seed: int
    vocab: int = 3
    stop: tuple[int, ...] = (1,)
    length: int = 3
    num_beams: int = 40
    length_penalty: float = 1.0
    top_k: int = 0
    min_length: int = 0
    repetition_penalty: float = 1.0
    context: int = CONTEXT

    @property
    def longest(self) -> int:
        return min(self.length, self.context - len(PROMPT))


@cache
def model_of(vocab: int, seed: int) -> TableModel:
    return TableModel(vocab, seed)


def search(setting: Setting, score: object = None) -> BeamSearch:
    return BeamSearch(
        score or model_of(setting.vocab, setting.seed).score,
        SamplingParams(repetition_penalty=setting.repetition_penalty),
        setting.stop,
        setting.length,
        setting.context,
        setting.num_beams,
        setting.length_penalty,
        setting.top_k,
        setting.min_length,
    )


def steps_of(setting: Setting) -> list[Step]:
    return run(list(PROMPT), search(setting), EmptyDrafter(), Fixed(1), setting.longest, stop=setting.stop)


@cache
def log_probs(setting: Setting, text: tuple[int, ...]) -> list[float]:
    """Log-probability of each token after `text`; -inf if excluded."""
    path = [*PROMPT, *text]
    values = model_of(setting.vocab, setting.seed).logits(path).log_softmax(-1).tolist()
    for token in set(path):
        values[token] *= setting.repetition_penalty  # log-probabilities are negative
    if len(text) < setting.min_length:
        values = [-torch.inf if token in setting.stop else value for token, value in enumerate(values)]
    if setting.top_k:
        least = sorted(values)[-setting.top_k]
        values = [value if value >= least else -torch.inf for value in values]
    return values


def score_of(setting: Setting, text: tuple[int, ...]) -> float:
    total = sum(log_probs(setting, text[:i])[token] for i, token in enumerate(text))
    return total / len(text) ** setting.length_penalty


def texts(setting: Setting) -> list[tuple[int, ...]]:
    """All texts that end with their first stop token or at the length limit."""
    tokens, limit = range(setting.vocab), setting.longest
    return [
        text
        for n in range(1, limit + 1)
        for text in product(tokens, repeat=n)
        if not any(token in setting.stop for token in text[:-1]) and (n == limit or text[-1] in setting.stop)
    ]


EXHAUSTIVE = {
    "plain": Setting(0),
    "two stop tokens": Setting(0, vocab=4, stop=(1, 3), num_beams=60),
    "no stop token": Setting(0, stop=()),
    "short texts": Setting(0, length_penalty=-1.0),
    "sums": Setting(0, length_penalty=0.0),
    "long texts": Setting(0, length_penalty=2.0),
    "two per beam": Setting(0, top_k=2),
    "one per beam": Setting(0, top_k=1),
    "at least two": Setting(0, min_length=2, length_penalty=-1.0),
    "at least two without stop tokens": Setting(0, stop=(), min_length=2),
    "at least two with a stop token outside the vocabulary": Setting(0, stop=(1, 9), min_length=2),
    "penalised": Setting(0, repetition_penalty=1.5),
    "end of the context": Setting(0, length=4, context=len(PROMPT) + 2),
    "one token": Setting(0, length=1),
}


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_a_beam_for_every_text_finds_the_best_text(name: str) -> None:
    for seed in range(10):
        setting = replace(EXHAUSTIVE[name], seed=seed)
        best = max(texts(setting), key=lambda text: score_of(setting, text))
        assert committed(steps_of(setting)) == list(best), seed


def plain_search(setting: Setting) -> list[int]:
    """Oracle: beam search on complete texts, without forests and commits."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, setting.longest + 1):
        extended = [
            (total + value, (*text, token))
            for total, text in running
            for token, value in enumerate(log_probs(setting, text))
            if value > -torch.inf
        ]
        extended.sort(reverse=True)
        penalty = length**setting.length_penalty
        ended = [text[-1] in setting.stop or length == setting.longest for _, text in extended]
        for (total, text), end in list(zip(extended, ended, strict=True))[: setting.num_beams]:
            if end:
                finished.append((total / penalty, text))
        finished = sorted(finished, reverse=True)[: setting.num_beams]
        running = [beam for beam, end in zip(extended, ended, strict=True) if not end][: setting.num_beams]
        if not running or len(finished) == setting.num_beams and running[0][0] / penalty <= finished[-1][0]:
            break
    return list(finished[0][1])


NARROW = {
    "one beam": Setting(0, vocab=7, stop=(3, 5), length=9, num_beams=1),
    "two beams": Setting(0, vocab=7, stop=(3, 5), length=9, num_beams=2),
    "many stop tokens": Setting(0, vocab=9, stop=(1, 2, 3, 4, 5), length=9, num_beams=3),
    "three beams, short": Setting(0, vocab=7, stop=(3,), length=9, num_beams=3, length_penalty=-0.5),
    "long": Setting(0, vocab=7, stop=(3, 5), length=9, num_beams=3, length_penalty=3.0),
    "penalised": Setting(0, vocab=7, stop=(3, 5), length=9, num_beams=3, repetition_penalty=1.7),
    "two per beam, at least four": Setting(0, vocab=7, stop=(3, 5), length=9, num_beams=3, top_k=2, min_length=4),
}


@pytest.mark.parametrize("name", NARROW)
def test_forests_and_commits_do_not_change_the_result(name: str) -> None:
    early = 0
    for seed in range(25):
        setting = replace(NARROW[name], seed=seed)
        text = committed(steps_of(setting))
        assert text == plain_search(setting), seed
        early += len(text) < setting.longest
    assert early


def test_one_pass_per_token_scores_each_running_beam_once() -> None:
    """A forest contains each uncommitted prefix of the beams once, and its last level has a node per beam."""
    setting = Setting(3, vocab=7, stop=(), length=7, num_beams=4)
    model, forests = model_of(setting.vocab, setting.seed), []

    def score(tokens: Sequence[int], forest: Draft) -> Tensor:
        forests.append((tuple(tokens), forest))
        return model.score(tokens, forest)

    verifier = search(setting, score)
    run(list(PROMPT), verifier, EmptyDrafter(), Fixed(1), setting.length)
    assert len(forests) == setting.length
    for generated, (tokens, forest) in enumerate(forests):
        paths = [(*tokens, *(forest.tokens[i] for i in forest.path(node))) for node in range(len(forest))]
        assert len(set(paths)) == len(paths) and all(-1 <= parent < i for i, parent in enumerate(forest.parents))
        longest = [path for path in paths if len(path) == len(PROMPT) + generated]
        assert len(longest) in ((setting.num_beams, 0) if generated > 1 else (0, setting.num_beams))
        assert all(path[: len(PROMPT)] == PROMPT for path in paths)


@pytest.mark.parametrize("seed", range(8))
def test_the_committed_text_is_the_common_prefix_of_all_hypotheses(seed: int) -> None:
    """Nothing is committed before it is certain, nothing later, and `pending` continues it to the best beam."""
    setting = Setting(seed, vocab=5, stop=(3,), length=8, num_beams=3)
    verifier, tokens = search(setting), list(PROMPT)
    for _ in range(setting.length):
        verdict = verifier.verify(tokens, Draft())
        assert verdict.accepted == () and verdict.token is None
        tokens += verdict.committed
        text = tuple(tokens[len(PROMPT) :])
        if text and (text[-1] in setting.stop or len(text) == setting.length):
            assert not verdict.pending
            break
        alive = [beam.tokens for beam in (*verifier._running, *verifier._finished)]
        assert all(beam[: len(text)] == text for beam in alive)
        assert (*text, *verdict.pending) == alive[0]
        following = {beam[len(text) : len(text) + 1] for beam in alive}
        assert len(following) > 1 or () in following
    else:
        pytest.fail("the search does not end")


def test_without_alternatives_all_tokens_are_committed_at_once() -> None:
    """A single possible token per position: the only beam is final."""

    def score(tokens: Sequence[int], forest: Draft) -> Tensor:
        rows = torch.full((len(forest) + 1, 4), -torch.inf)
        rows[:, 2] = 0.0
        return rows

    verifier = BeamSearch(score, SamplingParams(), (), 3, CONTEXT, num_beams=4)
    assert verifier.verify([1], Draft()) == Verdict((), None, committed=(2,))
    assert verifier._running == [Beam((2,), 0.0)]


def test_the_search_ends_if_running_beams_only_equal_the_worst_hypothesis() -> None:
    """Two passes: tokens 0 and 1 have 0.3 each and are continued by the stop token 3 or by 2, with certainty."""
    passes = 0

    def score(tokens: Sequence[int], forest: Draft) -> Tensor:
        nonlocal passes
        passes += 1
        rows = [torch.tensor([0.3, 0.3, 0.0, 0.4]).log()]
        rows += [torch.nn.functional.one_hot(torch.tensor(2 if token == 1 else 3), 4).log() for token in forest.tokens]
        return torch.stack(rows)

    verifier = BeamSearch(score, SamplingParams(), (3,), 9, CONTEXT, num_beams=2, length_penalty=0.0)
    steps = run([1], verifier, EmptyDrafter(), Fixed(1), 9, stop=(3,))
    assert committed(steps) == [3] and passes == 2


# --- against transformers ---------------------------------------------------------------------------------------------


VOCAB, STOP = 61, (7, 19)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4},
    "long": {"num_beams": 3, "length_penalty": 2.0, "min_length": 6},
    "short": {"num_beams": 2, "length_penalty": -0.5, "top_k": 3},
    "penalised": {"num_beams": 5, "length_penalty": 0.0, "repetition_penalty": 1.3},
}


def searched(model: Any, prompt: list[int], length: int, settings: dict[str, Any]) -> list[Step]:
    """Steps of the beam search under test."""
    settings = dict(settings)
    sampling = SamplingParams(repetition_penalty=settings.pop("repetition_penalty", 1.0))
    cached = CachedModel(model)
    search = BeamSearch(cached.score, sampling, STOP, max_tokens=length, context=cached.context, **settings)
    return run(prompt, search, EmptyDrafter(), Fixed(1), length, stop=STOP)


@cache
def prompts(kind: str, settings: str) -> list[tuple[list[int], int, list[int]]]:
    """Prompts, lengths and texts of transformers, computed once for both engines."""
    model, rng = tiny_model(kind), random.Random(settings)
    drawn = [([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))], rng.randrange(8, 24)) for _ in range(8)]
    return [(prompt, length, found(model, prompt, length, SETTINGS[settings])) for prompt, length in drawn]


def found(model: PreTrainedModel, prompt: list[int], length: int, settings: dict[str, Any]) -> list[int]:
    """Oracle: beam search of transformers."""
    ids = torch.tensor([prompt])
    top_k = settings.get("top_k")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=settings.get("min_length"),
        num_beams=settings["num_beams"],
        length_penalty=settings.get("length_penalty", 1.0),
        repetition_penalty=settings.get("repetition_penalty"),
        logits_processor=LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else []),
        eos_token_id=list(STOP),
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    ends = [i for i, token in enumerate(out) if token in STOP]
    return out[: ends[0] + 1] if ends else out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [*(("llama lean", name) for name in SETTINGS), ("gpt2", "plain"), ("gpt2", "penalised")]
)
def test_results_equal_those_of_transformers(kind: str, settings: str) -> None:
    kind, _, lean = kind.partition(" ")
    model = tiny_model(kind)
    ours = LlamaWeights(model) if lean else model
    stopped = early = waited = 0
    for prompt, length, expected in prompts(kind, settings):
        steps = searched(ours, prompt, length, SETTINGS[settings])
        assert committed(steps) == expected, (prompt, length)
        stopped += committed(steps)[-1] in STOP
        early += len(committed(steps)) < length
        waited += any(not step.tokens for step in steps)
    assert waited
    if kind == "llama" and settings != "long":  # the others seldom end a text
        assert stopped and early


@pytest.mark.slow
def test_committed_tokens_are_final() -> None:
    """The best beam may change, but the committed text only grows."""
    model = tiny_model("llama")
    changed = 0
    for seed in range(10):
        whole: list[int] = []
        before: tuple[int, ...] = ()
        steps = searched(model, [seed, 5], 16, {"num_beams": 4})
        for step in steps:
            shown = (*whole, *step.tokens, *step.verdict.pending)
            changed += shown[: len(before)] != before
            whole += step.tokens
            before = shown
            assert step.searched and step.kind == "plain" and not len(step.draft)
            assert step_of(to_json(StepEvent(step, tuple(map(str, step.tokens))))) == step
    assert changed


@pytest.mark.slow
def test_beams_are_rejected_for_sliding_windows() -> None:
    with pytest.raises(UserError, match="sliding window"):
        searched(tiny_model("mistral-sliding"), [1, 2, 3], 8, {"num_beams": 3})
