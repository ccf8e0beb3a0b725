"""KV caches of conversations: exclusive to a lane, bounded in bytes, freed with visitor and model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model

from specdemo.core.events import End, Header, Loading
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.models import model_pool
from specdemo.models.chat_caches import ChatCaches, Stores
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.pipeline import RunCaches
from specdemo.recipe import Recipe, plan_run
from specdemo.ui.service import Service

pytestmark = pytest.mark.slow

PATIENCE = 60.0
TALK = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("talker") / "target", byte_level_tokenizer(TEMPLATE)))


@pytest.fixture
def recipe(talker: str) -> Recipe:
    return Recipe(target=talker, method="nasd", temperature=0, max_tokens=12, device="cpu", chat=True)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens in each pass over more than ten rows."""
    counts: list[int] = []
    check_ids = CachedModel._check_ids

    def counting(self: CachedModel, new: list[int]) -> None:
        counts.append(len(new)) if len(new) > 10 else None
        check_ids(self, new)

    monkeypatch.setattr(CachedModel, "_check_ids", counting)
    return counts


def ended(events: Iterator[Any]) -> bool:
    *_, end = events
    return isinstance(end, End) and end.reason in ("stop", "length")


def cached(pool: ModelPool) -> list[CachedModel]:
    return [cache for caches in pool.chats._caches.values() for cache in caches.values()]


def test_unloading_frees_the_model_of_a_conversation(recipe: Recipe) -> None:
    pool, stores = ModelPool(), Stores()
    assert ended(generate(recipe, TALK, pool, stores)) and pool.chats.reserved_bytes > 0
    model = ref(pool.get(plan_run(recipe).target).model)
    pool.unload(plan_run(recipe).target)
    assert model() is None and pool.chats.reserved_bytes == 0 and stores.began
    assert ended(generate(recipe, TALK, pool, stores))  # with the model loaded again
    pool.clear()
    assert pool.chats.reserved_bytes == 0


def test_lanes_of_a_visitor(recipe: Recipe, prefilled: list[int]) -> None:
    """Each lane continues from its own cache, each repetition computes its prefill, and leaving frees the caches."""
    service, lanes = Service(ModelPool(), generate), [("spec", recipe), ("third", recipe)]

    def prefills(lanes: list[tuple[str, Recipe]], prompt: str, history: Sequence[ChatMessage] = ()) -> list[int]:
        prefilled.clear()
        stream = service.start(lanes, prompt, visitor="a", history=history)
        assert stream.wait(PATIENCE) and stream.error is None
        return prefilled.copy()

    assert service.start([("spec", recipe)], "one").wait(PATIENCE)  # loads and measures the model
    prompt = "a longer prompt than a draft " * 2
    first, second = prefills(lanes, prompt)
    history = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "yes"}]
    assert first == second and all(count < first / 2 for count in prefills(lanes, "more", history))
    assert prefills(lanes, prompt) == [first, first]  # a new conversation
    assert prefills([("spec", recipe)] * 2, prompt) == [first, first] and cached(service.models)
    service.visitors.end_session("a")
    assert not cached(service.models)
    service.worker.close()


def test_turns_keep_hidden_states_for_runs_with_the_same_taps(recipe: Recipe) -> None:
    """A cache without taps does not serve a run with taps; the cache of a run with other taps remains."""
    pool, stores = ModelPool(), Stores(began=datetime.now())
    loaded, first = pool.get(plan_run(recipe).target), list(range(20))
    expected: dict[tuple[int, ...], Any] = {}
    for turn, taps in enumerate([(), (1,), (0, 1), (1,)]):
        caches = RunCaches(plan_run(recipe), stores, pool.chats)
        cache = caches.reusable(loaded, "target", taps=taps)
        states = cache.states(first, 0)
        if taps in expected:  # the last turn
            assert states is not None and torch.equal(states, expected[taps])
        else:
            assert states is None
        cache.score([*first, turn], Draft())
        expected[taps] = cache.states(first, 0)
        caches.close()
    pool.clear()
    assert cache.states(first, 0) is None


def test_caches_give_way_to_models(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are freed before models are unloaded, and for the KV cache of another run."""
    pool, stores = ModelPool(), Stores()
    assert ended(generate(recipe, TALK, pool, stores)) and cached(pool)
    other = str(save_model(tmp_path / "other", byte_level_tokenizer()))
    monkeypatch.setattr(model_pool, "missing_bytes", lambda plans: {"cpu": (2, 1)} if cached(pool) else {})
    assert ended(generate(Recipe(target=other, method="ar", max_tokens=4, device="cpu"), "x = 1", pool))
    assert not cached(pool) and plan_run(recipe).target in pool
    assert ended(generate(recipe, TALK, pool, stores)) and cached(pool)
    monkeypatch.setattr(model_pool, "free_bytes", lambda device: 0)
    pool.get(plan_run(Recipe(target=other, method="ar", device="cpu")).target).release()
    assert ended(generate(Recipe(target=other, method="ar", max_tokens=4, device="cpu"), "x = 1", pool))
    assert not cached(pool)


# --- memory of conversations -----------------------------------------------------------------------------------------

LONG = 4096  # context of the model


@pytest.fixture(scope="module")
def long_talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, sizes = tmp_path_factory.mktemp("long") / "target", {"max_position_embeddings": LONG, "eos_token_id": None}
    return str(save_model(folder, byte_level_tokenizer(TEMPLATE), **sizes))


@dataclass(eq=False)
class TalkStores(Stores):
    """Stores with the messages so far."""

    talk: list[ChatMessage] = field(default_factory=list)


def turns(pool: ModelPool, recipe: Recipe, stores: TalkStores, count: int = 1, message: str = "one ") -> list[Header]:
    """Return the headers of `count` turns of a conversation with the answers of the model."""
    talk, headers = stores.talk, []
    for _ in range(count):
        talk.append({"role": "user", "content": message})
        header, *steps, end = (e for e in generate(recipe, talk, pool, stores) if not isinstance(e, Loading))
        assert isinstance(header, Header) and isinstance(end, End) and end.error is None
        talk.append({"role": "assistant", "content": "".join(step.text for step in steps)})
        headers.append(header)
    return headers


def reused(headers: list[Header]) -> bool:
    """Return True if each turn after the first continued from the tokens of the prompt before."""
    pairs = zip(headers, headers[1:], strict=False)
    return all(later.cached_tokens >= len(header.prompt_tokens) - 2 for header, later in pairs)


def long_recipe(target: str, method: str = "ar", max_tokens: int = 4) -> Recipe:
    return Recipe(target=target, method=method, temperature=0, max_tokens=max_tokens, device="cpu", chat=True)


@pytest.mark.parametrize(
    ("max_tokens", "count", "message", "free"),
    [(4, 11, "one " * 80, 16 << 20), (1 << 20, 2, "one", 16 << 20), (LONG // 2, 4, "one ", 0)],
    ids=["grows to the context", "answers of any length", "no free memory"],
)
def test_a_conversation_keeps_its_cache(
    long_talker: str, monkeypatch: pytest.MonkeyPatch, max_tokens: int, count: int, message: str, free: int
) -> None:
    pool, recipe = ModelPool(), long_recipe(long_talker, max_tokens=max_tokens)
    pool.get(plan_run(recipe).target)
    monkeypatch.setattr(model_pool, "free_bytes", lambda device: free)
    headers = turns(pool, replace(recipe, stop_texts=("a", "e", "i", "o", " ")), TalkStores(), count, message)
    assert reused(headers) and (count < 11 or len(headers[-1].prompt_tokens) > 0.9 * LONG)


def test_the_oldest_conversations_give_way_to_a_text(long_talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, recipe, visitors = ModelPool(), long_recipe(long_talker), [TalkStores() for _ in range(4)]
    for stores in visitors:
        turns(pool, recipe, stores)
    size = pool.chats.reserved_bytes // 4
    monkeypatch.setattr(model_pool, "free_bytes", lambda device: model_pool.TEXT_BYTES - size - 1)
    turns(pool, recipe, visitors[3])  # its own cache is in use
    retained = [ref(stores) in pool.chats._caches for stores in visitors]
    assert retained == [False, False, True, True]  # the oldest ones were closed
    monkeypatch.undo()
    assert all(turns(pool, recipe, visitors[i])[0].cached_tokens > 10 for i in (2, 3))


def test_the_last_conversation_is_not_closed_by_the_budget(long_talker: str) -> None:
    pool, recipe = ModelPool(), long_recipe(long_talker)
    pool.chats = ChatCaches(lambda model: True, lambda device: 1)
    first, second = TalkStores(), TalkStores()
    assert reused(turns(pool, recipe, first, 3)) and reused(turns(pool, recipe, second, 3))
    assert turns(pool, recipe, first)[0].cached_tokens == 0
