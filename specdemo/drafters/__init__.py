"""Registry of decoding methods."""

from __future__ import annotations

from specdemo.core.options import OptionSet
from specdemo.drafters import (
    autoregressive,
    beam,
    corpus,
    heads,
    hybrid,
    lookahead,
    lookup,
    model,
    ngram,
    self_speculation,
    suffix,
)
from specdemo.drafters import tree as trees
from specdemo.drafters.method import Method

_MODULES = (ngram, suffix, hybrid, trees, self_speculation, lookahead, lookup, corpus, autoregressive, beam)
_METHODS = (model.METHOD, *heads.HEAD_METHODS, *(module.METHOD for module in _MODULES))
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def option_classes() -> tuple[type[OptionSet], ...]:
    return tuple(dict.fromkeys(group for method in METHODS.values() for group in method.options))


def draft_shape(method: str) -> str:
    """Return the draft shape; the method may be unknown, as in traces of other versions."""
    return METHODS[method].shape if method in METHODS else "chain"
