"""Generation: kinds of prompts, events, resources reused between runs and released, and ends of a text."""

import gc
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import FrozenInstanceError, replace
from datetime import datetime
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.traces import step_events, text_of, tokens_of

from specdemo.core import trace
from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, Loading, StepEvent
from specdemo.core.explain import Reason, explain
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, Outcome, Source, Step, Verdict
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.cached_head import CachedHead
from specdemo.models.chat_caches import Stores
from specdemo.models.engines.engine import Cache
from specdemo.models.kv_cache import CachedModel, UncachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import CloudConfig
from specdemo.ui.lane import baseline_of
from specdemo.worker import Worker

PROMPT = "for i in range(10):"


def run(recipe: Recipe, pool: ModelPool, stores: dict[Any, Any] | None = None) -> Metrics:
    *_, end = generate(recipe, PROMPT, pool, stores)
    return end.metrics


def header_of(events: Iterable[Event]) -> Header:
    return next(event for event in events if isinstance(event, Header))


def traced(events: Iterable[Event]) -> list[Any]:
    """Header, steps and end."""
    return [event for event in events if not isinstance(event, Loading)]


@pytest.mark.parametrize("levels", ["multi", "one"])
def test_stored_ngrams_draft_a_previous_text(target: str, levels: str) -> None:
    """The same greedy text again: all n-grams are cached, so nearly every draft token is accepted."""
    pool, stores = ModelPool(), Stores()
    recipe = Recipe(
        target=target, method="nasd", temperature=0, max_tokens=48, device="cpu", ngram_levels=levels, ngram_keep=True
    )
    first, second = run(recipe, pool, stores), run(recipe, pool, stores)
    assert second.accepted > first.accepted and second.steps < first.steps


def test_stores_of_many_settings_are_bounded(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores used least recently are dropped when a run ends; without the option nothing is stored."""
    pool, stores, text = ModelPool(), Stores(), list(range(3, 40)) * 2

    def stored(**changes: Any) -> float:
        settings = {"target": target, "method": "nasd", "max_tokens": 2, "device": "cpu", "ngram_keep": True} | changes
        *_, end = generate(Recipe(**settings), text, pool, stores)
        return end.peak.store

    stored(ngram_keep=False)
    assert not stores.drafts
    largest = stored(ngram=16)
    monkeypatch.setattr("specdemo.models.chat_caches.MAX_STORE_BYTES", int(1.2 * largest))
    for changes in ({"ngram": 2}, {"method": "suffix"}, {"ngram": 2}, {"ngram": 16}):
        stored(**changes)
    assert stores.drafts and stores.size_bytes <= 1.2 * largest


def test_a_run_may_be_closed_at_any_step_and_the_next_is_not_affected(target: str) -> None:
    pool = ModelPool()
    recipe = Recipe(target=target, method="nasd", temperature=0, max_tokens=32, device="cpu")
    whole = tokens_of(generate(recipe, PROMPT, pool))
    for steps in (1, 3):
        cut = generate(recipe, PROMPT, pool)
        seen = list(islice((event for event in cut if isinstance(event, StepEvent)), steps))
        cut.close()
        assert len(seen) == steps
    assert tokens_of(generate(recipe, PROMPT, pool)) == whole


@pytest.mark.parametrize("method", ["draft", "tree", "beam", "ar"])
def test_events_are_frozen_and_picklable(target: str, method: str) -> None:
    sampling = {} if method == "beam" else {"temperature": 0.7, "top": 2}
    recipe = Recipe(target=target, drafter=target, method=method, max_tokens=6, device="cpu", **sampling)
    events = list(generate(recipe, PROMPT))
    assert {type(event) for event in events} == {Loading, Header, StepEvent, End}
    for event in events:
        again = pickle.loads(pickle.dumps(event))
        assert again == event and trace.write(again) == trace.write(event)
        with pytest.raises(FrozenInstanceError):
            setattr(event, next(iter(event.__slots__)), None)
    *_, last, end = events
    assert last.metrics == end.metrics == Metrics.of(event.step for event in step_events(events))


@pytest.mark.parametrize("kind", [Loading, Header, StepEvent, End])
def test_closing_releases_the_pipeline(target: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []

    def watched(*args: Any) -> Any:
        pipeline = build_pipeline(*args)
        opened.append(pipeline)
        return replace(pipeline, close=lambda: closed.append(pipeline))

    monkeypatch.setattr(import_module("specdemo.generate"), "build_pipeline", watched)
    recipe = Recipe(target=target, method="lookup", max_tokens=4, device="cpu")
    events = generate(recipe, PROMPT)
    next(event for event in events if isinstance(event, kind))
    events.close()
    assert len(closed) == len(opened) == (kind is not Loading)
    with pytest.raises(UserError, match="shorten it by at least"):
        list(generate(recipe, PROMPT * 100))
    assert len(closed) == len(opened) == 1 + (kind is not Loading)


class Oracle:
    """Drafts a known continuation."""

    def __init__(self, prompt: int, text: Sequence[int]) -> None:
        self.prompt, self.text, self.observed = prompt, text, 0

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        rest, n = self.text[len(tokens) - self.prompt :], 0
        while n < len(rest) and budget.may_extend(n, None):
            n += 1
        return Draft.chain(tuple(rest[:n]))

    def observe(self, step: Step) -> None:
        self.observed += 1


def test_a_drafter_object_replaces_the_drafter_of_the_recipe(target: str) -> None:
    recipe = Recipe(target=target, drafter="missing", gamma=4, temperature=0, max_tokens=20, device="cpu")
    baseline = list(generate(replace(recipe, method="ar", drafter=None), PROMPT))
    text = tokens_of(baseline)
    oracle = Oracle(len(header_of(baseline).prompt_tokens), text)
    head, *steps, end = traced(generate(recipe, PROMPT, drafter=oracle))
    assert tokens_of(steps) == text
    assert end.metrics.accepted == end.metrics.drafted > 0 and oracle.observed == end.metrics.steps
    assert head.recipe["method"] == "draft" and head.recipe["drafter"] == "missing" and not head.bit_equal
    for method in ("ar", "beam"):
        with pytest.raises(UserError, match="does not draft"):
            list(generate(replace(recipe, method=method, drafter=None), PROMPT, drafter=oracle))


def test_the_context_ends_the_text_unless_its_last_token_is_a_stop_token(target: str) -> None:
    pool, recipe = ModelPool(), Recipe(target=target, method="ar", temperature=1.0, max_tokens=5000, device="cpu")
    for seed in range(20):
        header, *steps, end = traced(generate(replace(recipe, seed=seed), PROMPT, pool))
        tokens = tokens_of(steps)
        if end.context_full and tokens[-1] not in tokens[:-1]:
            break
    assert end.reason == "length" and end.metrics.tokens == len(tokens) == 128 - len(header.prompt_tokens)
    *_, end = generate(replace(recipe, seed=seed, stop_tokens=(tokens[-1],)), PROMPT, pool)
    assert (end.reason, end.metrics.tokens, end.context_full) == ("stop", len(tokens), False)
    *_, end = generate(replace(recipe, max_tokens=2), PROMPT, pool)
    assert not end.context_full


@pytest.mark.slow
@pytest.mark.parametrize(("method", "context"), [("draft", 12), ("tree", 40), ("hybrid", 12)])
def test_a_shorter_context_of_the_drafter_does_not_end_the_text(
    target: str, method: str, context: int, tmp_path: Path
) -> None:
    drafter = str(save_model(tmp_path / "drafter", byte_level_tokenizer(), seed=1, max_position_embeddings=context))
    recipe = Recipe(target=target, drafter=drafter, method=method, temperature=0, max_tokens=5000, device="cpu")
    pool = ModelPool()
    plain, drafted = ([*generate(replace(recipe, method=name), PROMPT, pool)] for name in ("ar", method))
    assert tokens_of(drafted) == tokens_of(plain) and drafted[-1].reason == plain[-1].reason
    lengths = [len(header_of(drafted).prompt_tokens)]
    for event in step_events(drafted):
        assert event.step.draft.depth <= max(0, context - lengths[-1] + 1) or method == "hybrid"
        lengths.append(lengths[-1] + len(event.step.tokens))
    assert lengths[-1] > 40 and (drafted[-1].metrics.drafted > 0) == (context == 40 or method == "hybrid")


@pytest.mark.parametrize("method", ["ar", "draft", "nasd", "self", "tree", "lookahead"])
def test_equal_bits_hold_for_all_methods_of_the_native_engine(method: str, target: str) -> None:
    recipe = Recipe(method=method, target=target, drafter=target, temperature=0, max_tokens=4, device="cpu")
    head = header_of(generate(recipe, PROMPT, ModelPool()))
    assert head.environment["parity"]["by_construction"] and head.bit_equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *((method, "rejection") for method in ("draft", "self", "corpus", "tree", "lookahead", "eagle", "block")),
        ("draft", "coupled"),
        ("tree", "coupled"),
    ],
)
def test_the_default_type_of_torch_changes_no_step(target: str, method: str, rule: str, tmp_path: Path) -> None:
    """Loading a model in 16 bits changes it for all threads, and buffers of that type would be too small."""
    head = {"head": head_for(target, tmp_path, method)} if method in ("eagle", "block") else {}
    other = str(save_model(tmp_path / "drafter", byte_level_tokenizer(), seed=1))
    drafter = {"drafter": other} if METHODS[method].uses_model else {}
    recipe = Recipe(target=target, method=method, rule=rule, max_tokens=12, top_k=40, device="cpu", **drafter, **head)

    pool = ModelPool()

    def verdicts() -> list[Verdict]:
        return [event.step.verdict for event in step_events(generate(recipe, PROMPT, pool))]

    expected = verdicts()
    torch.set_default_dtype(torch.float64)
    try:
        assert verdicts() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_steps_of_the_mode_edge_only_have_no_target_pass(target: str) -> None:
    cloud = CloudConfig("http://cloud:1", mode="edge_only")
    recipe = Recipe(target=target, drafter=target, temperature=0, max_tokens=4, device="cpu", cloud=cloud)
    head, *steps, end = traced(generate(recipe, PROMPT, ModelPool()))
    assert {event.step.verdict.source for event in steps} == {Source.ALONE} and not head.exact
    assert trace.to_json(steps[1])["remote"] == {"escalated": 0.0, "edge": 1.0}
    assert (end.metrics.tokens, end.metrics.unverified, end.metrics.target_passes) == (4, 4, 0)
    assert {shown.outcome for event in steps for shown in event.shown()} == {Outcome.UNVERIFIED}
    assert {trace.to_json(event)["kind"] for event in steps} == {"unverified"}
    assert explain(steps[1].step, None, head.recipe) == Reason.EDGE_ONLY.value


@pytest.mark.parametrize("method", ["ar", "draft", "tree", "self"])
def test_passes_after_the_first_step_read_the_weights(method: str, target: str, tmp_path: Path) -> None:
    """A pass of the target per step, and one of the drafter per token, or per level of a tree."""
    drafter = str(save_model(tmp_path / "drafter", byte_level_tokenizer(), num_hidden_layers=1))
    recipe = Recipe(method=method, target=target, drafter=drafter, temperature=0, max_tokens=24, device="cpu")
    pool = ModelPool()
    *events, end = generate(recipe, PROMPT, pool)
    _, *drafts = (event.step.draft for event in step_events(events))
    passes = sum(draft.depth for draft in drafts)
    specs = plan_run(recipe).target, plan_run(replace(recipe, method="draft")).drafter
    target_bytes, drafter_bytes = (pool.get(spec).weight_bytes for spec in specs)
    assert end.peak.read == target_bytes * len(drafts) + drafter_bytes * passes


def test_a_refused_run_releases_its_caches(target: str) -> None:
    """Although the refusal, whose traceback references them, is still displayed."""

    def caches() -> int:
        return sum(type(item) is CachedModel for item in gc.get_objects())

    recipe, pool, worker = Recipe(target=target, method="nasd", max_tokens=4, device="cpu"), ModelPool(), Worker()
    pool.get(plan_run(recipe).target)
    before = caches()
    stream = worker.submit(lambda: generate(recipe, PROMPT * 1000, pool))
    assert stream.wait(60) and "shorten it by at least" in str(stream.error)
    assert caches() == before
    worker.close()


# --- ends of a text: the same for every method and at every position of a draft ---------------------------------------

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def recipe_of(target: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    heads = {
        name: head_for(target, tmp_path_factory.mktemp(name), name)
        for name, method in METHODS.items()
        if method.drafter == "head"
    }

    def make(method: str, **values: Any) -> Recipe:
        models = {"drafter": target} if METHODS[method].uses_model else {}
        models |= {"head": heads[method]} if method in heads else {}
        sampling = {} if method == "beam" else {"temperature": 0}
        return Recipe(method=method, target=target, device="cpu", max_tokens=MAX_TOKENS, **models, **sampling, **values)

    return make


def decoded(recipe: Recipe, pool: ModelPool) -> tuple[list[StepEvent], End]:
    *events, end = generate(recipe, PROMPT, pool)
    return step_events(events), end


def piece_ends(steps: list[StepEvent]) -> Iterator[int]:
    length = 0
    for event in steps:
        for piece in event.pieces:
            length += len(piece)
            yield length


@pytest.mark.parametrize("method", METHODS)
def test_the_text_ends_before_a_stop_text_and_its_tokens_stay(
    method: str, recipe_of: Callable[..., Recipe], pool: ModelPool
) -> None:
    whole, _ = decoded(recipe_of(method), pool)
    text, tokens = text_of(whole), tokens_of(whole)
    assert len(text) > 12
    for start in (0, 5, len(text) - 4):
        stop = text[start : start + 3]
        first = text.find(stop)
        steps, end = decoded(recipe_of(method, stop_texts=("never", stop)), pool)
        kept = next(n for n, length in enumerate(piece_ends(whole), 1) if length >= first + len(stop))
        assert text_of(steps) == text[:first]
        assert tokens_of(steps) == tokens[:kept]
        assert end.reason == "stop" and end.metrics.tokens == kept
        assert end.metrics == Metrics.of(event.step for event in steps)


@pytest.mark.parametrize("last", [False, True])
def test_a_stopped_beam_search_has_no_pending_text(
    last: bool, recipe_of: Callable[..., Recipe], pool: ModelPool
) -> None:
    """Stop texts that end with the first, or last, token of a step before others are certain."""
    whole, _ = decoded(recipe_of("beam"), pool)
    step = next(event for event in whole if event.pieces)
    assert step.pending_text and len(step.pieces) > 1
    count = len(step.pieces) if last else 1
    steps, _ = decoded(recipe_of("beam", stop_texts=("".join(step.pieces[:count]),)), pool)
    stopped = steps[-1].step
    assert stopped.tokens == stopped.verdict.target_tokens == step.step.tokens[:count]
    assert (stopped.verdict.pending, steps[-1].pending_text) == ((), "")


def test_a_withheld_text_is_shown_at_the_end(recipe_of: Callable[..., Recipe], pool: ModelPool) -> None:
    whole, _ = decoded(recipe_of("nasd"), pool)
    steps, end = decoded(recipe_of("nasd", stop_texts=(text_of(whole)[-2:] + "never",)), pool)
    assert text_of(steps) == text_of(whole) and end.reason == "length"


# --- prompts as token ids, and runs without a KV cache ----------------------------------------------------------------


LOCAL_METHODS = "ar draft nasd tree self eagle medusa block hybrid lookahead beam".split()


def header_and_tokens(
    recipe: Recipe, prompt: Any, pool: ModelPool, stores: Stores | None = None
) -> tuple[Header, list[int]]:
    events = list(generate(recipe, prompt, pool, stores))
    return header_of(events), tokens_of(events)


@pytest.mark.parametrize("method", ["ar", "nasd"])
def test_token_ids_continue_as_their_text(method: str, target: str, pool: ModelPool) -> None:
    recipe = Recipe(target=target, method=method, temperature=0, max_tokens=8, device="cpu")
    header, tokens = header_and_tokens(recipe, PROMPT, pool)
    again, same = header_and_tokens(recipe, list(header.prompt_tokens), pool)
    assert same == tokens and again.prompt == PROMPT and again.prompt_tokens == header.prompt_tokens
    split = [*byte_level_tokenizer().encode("for"), *byte_level_tokenizer().encode(" i")]
    assert header_and_tokens(recipe, split, pool)[0].prompt_tokens == tuple(split)


@pytest.mark.parametrize(
    ("prompt", "values", "sentence"),
    [
        ([1, 2], {"chat": True}, "token ids takes no chat template: set chat to False"),
        ([1, "2"], {}, "must contain whole numbers only, not '2'"),
        ([1, 1 << 40], {}, "is not among the .* token ids"),
        ([1, -1], {}, "-1 is not among the .* token ids"),
        ([], {}, "the prompt is empty"),
        ([1.5, 2], {}, "the prompt is invalid"),
        (["text"], {}, "the prompt is invalid"),
        ({"role": "user", "content": "x"}, {"chat": True}, "the prompt is invalid"),
        ([{"role": "user"}], {"chat": True}, "messages with a content"),
        ([{"role": "user", "content": ["x"]}], {"chat": True}, "a content that is a text"),
        ([{"role": "user", "content": "x"}], {}, "messages need a chat template"),
    ],
)
def test_wrong_prompts_are_refused(
    prompt: Any, values: dict[str, Any], sentence: str, target: str, pool: ModelPool
) -> None:
    recipe = Recipe(target=target, method="ar", max_tokens=2, device="cpu", **values)
    with pytest.raises(UserError, match=sentence):
        header_and_tokens(recipe, prompt, pool)


@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_without_cache_the_text_is_the_same_and_every_pass_computes_all_tokens(
    method: str, recipe_of: Callable[..., Recipe], pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe_of(method), max_tokens=12)
    _, tokens = header_and_tokens(recipe, PROMPT, pool)
    held: list[int] = []
    engine_run = CachedModel.score

    def recorded(self: CachedModel, *arguments: Any) -> Any:
        assert isinstance(self, UncachedModel)
        held.append(self._keep(*arguments)[0])
        return engine_run(self, *arguments)

    monkeypatch.setattr(CachedModel, "score", recorded)
    _, same = header_and_tokens(replace(recipe, use_cache=False), PROMPT, pool)
    assert same == tokens and held and not any(held)


@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_caches_are_freed_without_a_garbage_collection(
    method: str, recipe_of: Callable[..., Recipe], pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a page accumulates those of many runs."""
    recipe = replace(recipe_of(method), max_tokens=12)

    def caches() -> int:
        return sum(issubclass(type(one), (Cache, CachedHead)) for one in gc.get_objects())

    monkeypatch.setattr(gc, "collect", lambda: 0)
    counts = []
    gc.disable()
    try:
        for _ in range(3):
            header_and_tokens(recipe, PROMPT, pool, Stores(began=datetime.now()))
            counts.append(caches())
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 2


def test_baselines_have_a_cache_and_services_need_it() -> None:
    assert baseline_of(Recipe(use_cache=False)).use_cache
    with pytest.raises(UserError, match="use_cache can be disabled for a local target only"):
        Recipe(use_cache=False, cloud=CloudConfig("http://127.0.0.1:1"))
