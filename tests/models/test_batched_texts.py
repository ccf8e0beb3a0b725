"""Continuous batching on the native engine: texts are equal, whichever texts share their passes."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from fakes.heads import head_for
from fakes.native_models import VOCAB, text, weights
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.worker_jobs import submitting

from specdemo import pipeline
from specdemo.core.errors import UserError
from specdemo.core.events import Event, StepEvent
from specdemo.core.policies import BatchLimit
from specdemo.core.step import Draft, Step
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.engines.native import NativePass
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import StreamRequest, VerifyConfig, VerifyRequest, digest
from specdemo.worker import Stream, Worker, last_pass

PATIENCE = 60.0  # seconds
TOKENS = 20
PROMPTS = ("for i in range(10):", "def f", "a, b = b, a")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(waiting=None, texts=32)
    yield worker
    worker.close()


def finished(streams: Sequence[Stream[Any]]) -> list[list[Any]]:
    assert all(stream.wait(PATIENCE) for stream in streams)
    assert [stream.error for stream in streams] == [None] * len(streams)
    return [stream.items for stream in streams]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Recipe]:
    """All methods, greedy and sampled."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        name: str(save_model(folder / name, byte_level_tokenizer(), seed))
        for seed, name in enumerate(("target", "drafter"))
    }
    heads = {n: head_for(models["target"], folder / n, n) for n in METHODS if METHODS[n].drafter == "head"}
    made = []
    for name, method in METHODS.items():
        chosen: dict[str, Any] = {"target": models["target"], "device": "cpu", "max_tokens": TOKENS, "method": name}
        chosen |= {"drafter": models["drafter"]} if method.uses_model else {}
        chosen |= {"head": heads[name]} if name in heads else {}
        chosen |= {"policy": "fixed"} if method.uses_policy else {}
        made += [Recipe(**chosen, **({} if name == "beam" else {"temperature": t, "seed": 5})) for t in (0.0, 0.9)]
    return made


def steps_of(events: Iterator[Event]) -> Iterator[tuple[int, ...]]:
    return (event.step.tokens for event in events if isinstance(event, StepEvent))


@pytest.mark.slow
def test_visitors_of_all_methods_get_the_texts_that_they_get_alone(recipes: list[Recipe], worker: Worker) -> None:
    """Greedy drafts may be shorter in shared passes; sampled texts have equal steps."""
    pool = ModelPool()
    runs = [(recipe, PROMPTS[n % len(PROMPTS)]) for n, recipe in enumerate(recipes)]
    alone = [[*steps_of(generate(recipe, prompt, pool))] for recipe, prompt in runs]
    streams = [
        worker.submit(lambda recipe=recipe, prompt=prompt: steps_of(generate(recipe, prompt, pool)))
        for recipe, prompt in runs
    ]
    for (recipe, _), before, together in zip(runs, alone, finished(streams), strict=True):
        assert sum(together, ()) == sum(before, ())
        assert recipe.temperature == 0 or together == before
    assert max(worker.texts_per_pass) > 4


def test_only_drafts_that_cannot_change_a_text_are_shorter_in_shared_passes(
    recipes: list[Recipe], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that costs as much as a pass pays in no shared pass, if there is no work between passes."""
    monkeypatch.setattr(LoadedModel, "pass_costs", {1: 1.0, 8: 8.0})
    monkeypatch.setattr(pipeline, "last_pass", lambda: (load := last_pass()) and replace(load, between_s=0.0))
    pool = ModelPool()
    base = next(recipe for recipe in recipes if recipe.method == "lookup")
    kinds = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "rule": "coupled"}]
    runs = [replace(base, seed=seed, **kind) for kind in kinds for seed in range(4)]

    def steps(recipe: Recipe) -> list[Step]:
        return [event.step for event in generate(recipe, PROMPTS[0], pool) if isinstance(event, StepEvent)]

    alone = [steps(recipe) for recipe in runs]
    streams = [worker.submit(lambda recipe=recipe: iter([steps(recipe)])) for recipe in runs]
    shorter = 0
    for recipe, before, (together,) in zip(runs, alone, finished(streams), strict=True):
        texts = [[step.tokens for step in run] for run in (before, together)]
        assert sum(texts[0], ()) == sum(texts[1], ())
        gammas = [sum(step.gamma for step in run) for run in (before, together)]
        if recipe.temperature and recipe.rule != "coupled":
            assert texts[0] == texts[1] and gammas[0] == gammas[1]
        else:  # how many of its passes are shared depends on the other jobs
            shorter += gammas[1] < gammas[0]
    assert shorter > len(runs) / 3


def test_the_limit_allows_the_longest_draft_of_the_policy(recipes: list[Recipe]) -> None:
    base = next(recipe for recipe in recipes if recipe.method == "lookup" and recipe.temperature == 0)
    target = ModelPool().get(plan_run(base).target)
    for name, longest in (("fixed", 2), ("dynamic", 12), ("heuristic", 20), ("auto", 8)):
        with closing(pipeline.build_pipeline(plan_run(replace(base, policy=name, gamma=2)), target, None)) as built:
            assert isinstance(built.policy, BatchLimit) and built.policy.longest == longest


class Edge:
    """An edge with random drafts; yields its text after each step."""

    def __init__(self, contexts: Contexts, name: str, temperature: float) -> None:
        self._contexts, self._name = contexts, name
        self._config = VerifyConfig(temperature=temperature, seed=3, rule="coupled")

    def steps(self, prompt: list[int]) -> Iterator[list[int]]:
        tokens = [*prompt]
        for step in range(TOKENS):
            base = len(tokens) if step else 0
            draft = text(step % 4, seed=step)
            request = VerifyRequest(
                context_id=self._name,
                step=step,
                base=base,
                digest=digest(tokens[:base]),
                tokens=tokens[base:],
                draft_tokens=draft,
                k=len(draft),
                config=None if base else self._config,
            )
            *_, response = self._contexts.verify(request)
            tokens += [*draft[: response.accepted_len], response.token]
            yield [*tokens]


def contexts(make: Callable[[], CachedModel]) -> Contexts:
    return Contexts(make, vocab_size=VOCAB, context=256)


def test_edges_and_streams_of_a_service_get_the_texts_that_they_get_alone(worker: Worker) -> None:
    """Edges with drafts, and autoregressive texts with equal seeds."""
    model = weights("llama", "float32")
    cases = [(n, temperature) for n in range(6) for temperature in (0.0, 1.0)]

    def jobs(service: Contexts) -> list[Callable[[], Iterator[Any]]]:
        prompts = {n: text(10 + n, seed=n) for n, _ in cases}
        config = VerifyConfig(temperature=1.0, seed=3)
        streams = [StreamRequest(tokens=prompts[n], config=config, max_tokens=TOKENS) for n in prompts]
        edges = [(Edge(service, f"{n}-{t:.0f}", t), prompts[n]) for n, t in cases]
        return [
            *(lambda edge=edge, prompt=prompt: edge.steps(prompt) for edge, prompt in edges),
            *(lambda request=request: service.stream(request) for request in streams),
        ]

    alone = [[*job()] for job in jobs(contexts(lambda: CachedModel(model)))]
    together = [worker.submit(job) for job in jobs(contexts(lambda: CachedModel(model)))]
    assert finished(together) == alone
    assert max(worker.texts_per_pass) > 4


def test_a_text_that_cannot_be_computed_does_not_disturb_others(worker: Worker) -> None:
    model = weights("llama", "float32")

    def job(tokens: list[int]) -> Iterator[int]:
        cached = CachedModel(model)
        for end in range(1, len(tokens) + 1):
            yield int(cached.score(tokens[:end], Draft())[0].argmax())

    texts = [text(12, seed=n) for n in range(4)]
    wrong = [*texts[0][:6], VOCAB + 5, *texts[0][6:]]
    alone = [[*job(tokens)] for tokens in texts]
    failing, *others = [worker.submit(lambda tokens=tokens: job(tokens)) for tokens in (wrong, *texts)]
    assert finished(others) == alone
    assert failing.wait(PATIENCE) and isinstance(failing.error, UserError) and failing.items == alone[0][:6]


def test_at_most_four_frames_lead_from_score_to_the_library(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside jobs, in the only job, and in a pass of several jobs."""
    frames: list[list[str]] = []
    model = weights("llama", "float32")
    run_pass = NativePass.check

    def check(described: NativePass, status: int) -> None:
        frame = sys._getframe(1)  # the caller of the library
        names = [frame.f_code.co_name]
        while names[-1] != "score" and frame.f_back is not None:
            frame = frame.f_back
            names.append(frame.f_code.co_name)
        frames.append(names)
        run_pass(described, status)

    def scores() -> Iterator[object]:
        cached = CachedModel(model)
        for length in range(1, 5):
            yield cached.score(text(length), Draft())
        cached.close()

    monkeypatch.setattr(NativePass, "check", check)
    list(scores())
    finished([worker.submit(scores)])
    with submitting(worker):
        streams = [worker.submit(scores) for _ in range(3)]
    finished(streams)
    assert {tuple(names) for names in frames} == {("_call", "run", "shared_pass", "score")}
    assert max(worker.texts_per_pass) == 3
