"""Parts and options that each method passes from the context of a run to its drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.tiny_models import TableHead, TableModel, up_to

from specdemo.core.decode import EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.origin import MODEL
from specdemo.core.policies import Fixed
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.drafters import METHODS, draft_shape, option_classes
from specdemo.drafters.heads.chain import HeadDrafter, build_head_drafter
from specdemo.drafters.hybrid import HybridDrafter
from specdemo.drafters.lookahead import LookaheadDrafter
from specdemo.drafters.model import ModelDrafter, readable
from specdemo.drafters.ngram import NGramDrafter, NGramStore
from specdemo.drafters.suffix import SuffixDrafter, SuffixStore
from specdemo.drafters.tree import HeadNodes, ModelNodes, TreeDrafter
from specdemo.drafters.universal import UniversalDrafter

VOCAB, OWN = 12, 9


class Context:
    """Every part is different, and requests are recorded."""

    vocab_size, stop, seed = VOCAB, (3,), 5
    source: Sequence[int] = ()

    def __init__(self, head: Any = None, bridge: Any = None, has_drafter: bool = True, **options: Any) -> None:
        defaults = {name: option.default for group in option_classes() for name, option in group.OPTIONS.items()}
        self.options = SimpleNamespace(**defaults | {"max_tokens": 40, "top_k": 6} | options)
        self.bridge, self.has_drafter, self._head = bridge, has_drafter, head
        self.sampling = SamplingParams(temperature=0.5)
        self.draft_sampling = SamplingParams(temperature=0.6)
        self.drafter_sampling = SamplingParams(temperature=0.7, top_k=4)
        self.model = SimpleNamespace(score=object(), extend=object(), vocab_size=OWN, context=30)
        self.roles: list[tuple[str, Any]] = []
        self.keys: list[tuple[Any, ...]] = []
        self.store: Any = None

    @property
    def corpus(self) -> Sequence[Sequence[int]]:
        self.roles.append(("corpus", None))
        return [1, 2, 1, 2, 1, 3], [4]

    def head(self) -> Any:
        return self._head

    def scorer(self, role: str, layers: Any = None) -> Any:
        self.roles.append((role, layers))
        return self.model

    def noise(self, name: str, *, shared: bool = True) -> Any:
        return name, shared

    def with_store(self, make: Callable[[Any], Any], *key: Any) -> Any:
        self.keys.append(key)
        return make(self.store)


def build(method: str, **values: Any) -> tuple[Any, Context]:
    context = Context(**values)
    return METHODS[method].build(context), context  # type: ignore[arg-type]


def check_model_drafter(drafter: Any, context: Context, role: str = "drafter") -> None:
    assert isinstance(drafter, ModelDrafter) and [role for role, _ in context.roles] == [role]
    parts = (drafter.score, drafter.sampling, drafter.noise, drafter.vocab_size, drafter.own_size, drafter.extend)
    assert parts == (
        context.model.score, context.draft_sampling, ("draft", True), VOCAB, OWN, context.model.extend,
    )  # fmt: skip


def check_head_drafter(drafter: Any, context: Context, head: TableHead) -> None:
    assert isinstance(drafter, HeadDrafter) and not context.roles
    parts = (drafter.head, drafter.sampling, drafter.noise, drafter.vocab_size)
    assert parts == (head, context.draft_sampling, ("draft", True), VOCAB)


def table_head(kind: str) -> TableHead:
    return TableHead(TableModel(VOCAB, 1), None, kind)


def test_a_model_of_the_vocabulary_drafts_with_the_parameters_of_drafts() -> None:
    check_model_drafter(*build("draft"))


def test_a_model_of_another_vocabulary_drafts_its_most_probable_tokens() -> None:
    bridge = SimpleNamespace(read=object(), write=object())
    drafter, context = build("draft", bridge=bridge)
    assert isinstance(drafter, UniversalDrafter)
    assert (drafter.read, drafter.write, drafter.context) == (bridge.read, bridge.write, 30)
    inner = drafter.inner
    assert isinstance(inner, ModelDrafter) and inner.sampling == SamplingParams(temperature=0, top_k=4)
    parts = (inner.score, inner.noise, inner.vocab_size, inner.own_size, inner.extend)
    assert parts == (context.model.score, ("draft", False), OWN, None, context.model.extend)
    assert context.roles == [("drafter", None)]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block"])
def test_heads_draft_with_the_method_of_their_kind(kind: str) -> None:
    head = table_head(kind)
    check_head_drafter(*build(kind, head=head), head)
    for method in {"eagle", "medusa", "block"} - {kind}:
        with pytest.raises(UserError) as refused:
            build(method, head=head)
        assert str(refused.value) == f"the head is not of kind {method}: choose method {kind} or hybrid"
    with pytest.raises(UserError) as refused:
        build(kind)
    assert str(refused.value) == "this method needs a head: set head to a directory or Hugging Face id"
    context = Context(head=head)
    check_head_drafter(build_head_drafter(context), context, head)  # type: ignore[arg-type]


def test_the_hybrid_prefers_a_head_to_a_model() -> None:
    head = table_head("medusa")
    drafter, context = build("hybrid", head=head)
    assert isinstance(drafter, HybridDrafter) and context.keys == [()]
    check_head_drafter(drafter.model, context, head)
    drafter, context = build("hybrid")
    check_model_drafter(drafter.model, context)
    drafter, context = build("hybrid", has_drafter=False)
    assert drafter.model is None and context.roles == []


@pytest.mark.parametrize("with_head", [True, False])
def test_trees_have_the_sizes_of_the_options(with_head: bool) -> None:
    head = table_head("eagle") if with_head else None
    tree, context = build("tree", head=head, tree_nodes=7, tree_width=4)
    assert isinstance(tree, TreeDrafter) and (tree.nodes, tree.width, tree.beam) == (7, 4, 2)
    assert (tree.sampling, tree.noise, tree.vocab_size) == (context.draft_sampling, ("draft", True), VOCAB)
    if with_head:
        assert tree.scorer == HeadNodes(head) and context.roles == []
    else:
        assert tree.scorer == ModelNodes(context.model.score, VOCAB, OWN, 30) and context.roles == [("drafter", None)]
    with pytest.raises(UserError) as refused:
        build("tree", bridge=object())
    assert str(refused.value) == "method tree needs one vocabulary for both models: choose method draft or hybrid"


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, [0, 1, 2]),
        ({"exit_layer": 5}, [0, 1, 2, 3, 4]),
        ({"skip_layers": (1, 6)}, [0, 2, 3, 4, 5]),
    ],
)
def test_self_speculation_selects_layers_of_the_target(values: dict[str, Any], layers: list[int]) -> None:
    drafter, context = build("self", **values)
    check_model_drafter(drafter, context, "target")
    assert [*context.roles[0][1](7)] == layers


def test_half_of_an_odd_number_of_layers_is_rounded_down() -> None:
    for count, half in ((1, 0), (6, 3), (7, 3)):
        _, context = build("self")
        assert [*context.roles[0][1](count)] == [*range(half)]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_corpus_is_counted_unless_tokens_are_random(order: int) -> None:
    drafter, context = build("corpus", corpus_order=order)
    assert isinstance(drafter, ModelDrafter) and drafter.own_size is None and drafter.extend is None
    assert (drafter.noise, drafter.vocab_size) == (("draft", True), VOCAB)
    assert bool(context.roles) == (order > 0)  # reading the corpus takes time
    assert drafter.sampling == (context.draft_sampling if order else SamplingParams(temperature=1.0))
    probs = drafter.score([2], Draft()).softmax(-1)[0].tolist()
    share = 1 / VOCAB
    unigram = {1: (3 + share) / 8, 5: share / 8}
    expected = {0: dict.fromkeys((1, 5), share), 1: unigram, 2: {1: (2 + unigram[1]) / 3, 5: unigram[5] / 3}}[order]
    assert {token: probs[token] for token in expected} == pytest.approx(expected)


TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]


def test_n_grams_have_the_order_fillers_and_source_of_the_run() -> None:
    values = {"ngram": 3, "ngram_levels": "one", "filler_top_k": 2, "filler_weight": "equal", "ngram_random": True}
    context = Context(**values)
    context.source = (8, 9, 8, 9, 10)
    drafter = METHODS["nasd"].build(context)  # type: ignore[arg-type]
    same = NGramDrafter(3, "one", 2, None, context.source, VOCAB, 5, True)
    assert isinstance(drafter, NGramDrafter) and context.keys == [("nasd", 3, "one")]
    assert drafter.store.lengths == [2] and drafter.store.predict([8, 9]) == same.store.predict([8, 9]) is not None
    for text in (TEXT, [*TEXT, 11, 11]):
        draft = drafter.propose(text, up_to(8))
        assert draft == same.propose(text, up_to(8))
    assert {origin.source for origin in draft.origin} == {"random"} and max(draft.tokens) == VOCAB - 1
    assert (drafter._filler_top_k, drafter._equal_filler) == (2, True)
    drafter, context = build("nasd")
    assert context.keys == [("nasd", 4, "multi")] and drafter.store.lengths == [3, 2, 1]
    assert (drafter._filler_top_k, drafter._equal_filler) == (3, False)
    assert not drafter.propose([1, 2], up_to(4)).tokens  # no random tokens


def test_stores_of_earlier_runs_are_continued() -> None:
    context = Context(ngram=3)
    context.store = NGramStore([1])
    context.store.add([1], 2)
    assert METHODS["nasd"].build(context).store is context.store  # type: ignore[arg-type,union-attr]
    earlier = SuffixDrafter()
    earlier.propose(TEXT, up_to(0))
    context = Context()
    context.store, context.source = earlier.store, (7, 8, 9, 7)
    drafter = METHODS["suffix"].build(context)  # type: ignore[arg-type]
    assert isinstance(drafter, SuffixDrafter) and drafter.store is earlier.store and context.keys == [()]
    assert drafter.propose([2, 3, 4], up_to(1)).tokens == (1,)
    assert drafter.propose([2, 3, 4, 7, 8], up_to(1)).tokens == (9,)
    other = METHODS["suffix"].build(Context())  # type: ignore[arg-type]
    assert isinstance(other, SuffixDrafter) and isinstance(other.store, SuffixStore) and not other.store.text


def test_lookahead_has_the_sizes_and_the_seed_of_the_run() -> None:
    drafter, _ = build("lookahead", lookahead_window=3, lookahead_n=2, lookahead_guesses=4)
    assert isinstance(drafter, LookaheadDrafter) and drafter._guesses == 4
    text = [*range(40)]
    draft = drafter.propose(text, up_to(9))
    assert draft == LookaheadDrafter(3, 2, 4, seed=5).propose(text, up_to(9))
    assert draft.tokens != LookaheadDrafter(3, 2, 4, seed=6).propose(text, up_to(9)).tokens
    policy = METHODS["lookahead"].policy
    assert policy is not None and policy(SimpleNamespace(lookahead_window=3, lookahead_n=2)) == Fixed(5)


def test_beam_search_has_the_options_of_the_run() -> None:
    values = {"num_beams": 3, "length_penalty": 0.5, "min_length": 2}
    drafter, context = build("beam", **values)
    context.model.score = TableModel(VOCAB, 2).score
    method = METHODS["beam"]
    assert isinstance(drafter, EmptyDrafter) and method.verifier is not None
    search: Any = method.verifier(context)  # type: ignore[arg-type]
    assert context.roles == [("target", None)]
    assert (search.score, search.sampling, search.stop) == (context.model.score, context.sampling, (3,))
    assert (search.max_tokens, search.context, search.top_k) == (40, 30, 6)
    assert (search.num_beams, search.length_penalty, search.min_length) == (3, 0.5, 2)


def test_shapes_and_options_of_methods() -> None:
    assert {name for name in METHODS if draft_shape(name) == "forest"} == {"tree", "lookahead", "beam"}
    assert draft_shape("of another version") == "chain"
    groups = option_classes()
    assert len(groups) == len(set(groups)) and {group for method in METHODS.values() for group in method.options} == {
        *groups
    }
    assert METHODS["nasd"].option_names == (
        *("ngram", "filler_top_k", "filler_weight", "ngram_levels", "ngram_random", "ngram_keep"),
    )
    with pytest.raises(UserError) as refused:
        METHODS["nasd"].options[0](filler_weight="equal", filler_top_k=1)
    sentence = "filler_weight equal has no effect with filler_top_k 1: choose 2 or more, or weight rank"
    assert str(refused.value) == sentence
    assert METHODS["nasd"].options[0](filler_weight="equal", filler_top_k=2)
    assert METHODS["nasd"].options[0](filler_weight="rank", filler_top_k=1)
    with pytest.raises(UserError) as refused:
        METHODS["self"].options[0](exit_layer=1, skip_layers=(1,))
    assert str(refused.value) == "give either exit_layer or skip_layers, not both"
    assert METHODS["self"].options[0](exit_layer=1) and METHODS["self"].options[0](skip_layers=(1,))


@pytest.mark.parametrize(
    ("tokens", "own_size", "vocab_size", "expected"),
    [
        ([1, 9], None, 10, True),
        ([1, 9], 10, 10, True),
        ([1, 9], 10, 12, True),
        ([9, 1], 9, 12, False),
        ([1, 9], 9, 9, True),  # texts of a smaller vocabulary
        ([8, 1], 9, 12, True),
    ],
)
def test_drafters_read_texts_of_their_ids(
    tokens: list[int], own_size: int | None, vocab_size: int, expected: bool
) -> None:
    assert readable(tokens, own_size, vocab_size) is expected


class Inner:
    """Drafts 50, 51, ... up to the budget and records the texts."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def propose(self, tokens: Sequence[int], budget: Any) -> Draft:
        self.texts.append(list(tokens))
        count = 0
        while budget.may_extend(count, None):
            count += 1
        return Draft.chain(tuple(range(50, 50 + count)))


@pytest.mark.parametrize(
    ("prefix", "budget", "drafted"),
    [(3, 9, (50, 51)), (3, 1, (50,)), (4, 9, (50,)), (5, 9, None), (6, 9, None), (0, 9, None), (3, 0, ())],
)
def test_drafts_of_another_vocabulary_fit_the_context_and_the_budget(
    prefix: int, budget: int, drafted: tuple[int, ...] | None
) -> None:
    """Each drafter token is half a token of the target, but the budget limits both."""
    inner, written = Inner(), []

    def write(tokens: Sequence[int], new: Sequence[int]) -> list[int]:
        written.append((list(tokens), list(new)))
        return [token for token in new for _ in range(2)]

    def read(tokens: Sequence[int]) -> list[int]:
        assert tokens == [1, 2]
        return [7] * prefix

    drafter = UniversalDrafter(inner, read, write, 5)  # type: ignore[arg-type]
    draft = drafter.propose([1, 2], up_to(budget))
    expected = [token for token in drafted or () for _ in range(2)][:budget]
    assert draft == Draft.chain(tuple(expected), origin=(MODEL,) * len(expected))
    assert inner.texts == ([] if drafted is None else [[7] * prefix])
    assert written == ([] if drafted is None else [([1, 2], [*drafted])])
