"""Registry of decoding methods."""

from __future__ import annotations

from specdemo.core.options import OptionSet
from specdemo.drafters import autoregressive, chain, lookahead, ngram, suffix, tree
from specdemo.drafters.method import Method

_METHODS = (
    chain.DRAFT,
    *chain.HEAD_METHODS,
    ngram.NASD,
    suffix.SUFFIX,
    suffix.HYBRID,
    tree.TREE,
    chain.SELF,
    lookahead.LOOKAHEAD,
    suffix.LOOKUP,
    ngram.CORPUS,
    autoregressive.AR,
    autoregressive.BEAM,
)
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def option_classes() -> tuple[type[OptionSet], ...]:
    return tuple(dict.fromkeys(group for method in METHODS.values() for group in method.options))


def draft_shape(method: str) -> str:
    """Return the draft shape; the method may be unknown, as in traces of other versions."""
    return METHODS[method].shape if method in METHODS else "chain"
