"""Registry of decoding methods; each has a file and an entry here."""

from __future__ import annotations

from specdemo.core.options import OptionSet
from specdemo.drafters import (
    autoregressive,
    beam,
    corpus,
    hybrid,
    lookahead,
    lookup,
    model,
    ngram,
    self_speculation,
    suffix,
)
from specdemo.drafters import tree as trees
from specdemo.drafters.heads import block, eagle, medusa
from specdemo.drafters.method import Method

_MODULES = (
    *(model, eagle, medusa, block, ngram, suffix, hybrid, trees),
    *(self_speculation, lookahead, lookup, corpus, autoregressive, beam),
)
METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in _MODULES}


def option_classes() -> tuple[type[OptionSet], ...]:
    return tuple(dict.fromkeys(group for method in METHODS.values() for group in method.options))


def draft_shape(method: str) -> str:
    """Return the draft shape; the method may be unknown, as in traces of other versions."""
    return METHODS[method].shape if method in METHODS else "chain"
