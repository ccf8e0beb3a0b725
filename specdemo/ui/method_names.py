"""Names of decoding methods on the page. Links, settings, traces and files contain the identifiers."""

from __future__ import annotations

import re

from specdemo.drafters import METHODS

_LABELS = {name: method.label for name, method in METHODS.items() if method.label}
_IDENTIFIER = re.compile(rf"(?<![\w/-])({'|'.join(_LABELS)})(?![\w/-])")  # not in paths


def method_name(method: str) -> str:
    """Return the visible name of a method; the method may be unknown, as in traces of other versions."""
    return _LABELS.get(method, method)


def with_method_names(text: str) -> str:
    """Name the methods of a message; identifiers follow in parentheses, since messages also reach the API."""
    return _IDENTIFIER.sub(lambda match: f"{_LABELS[match[1]]} ({match[1]})", text)


def recipe_label(label: str) -> str:
    """Return a recipe's name in measurements with the visible name of its method, which comes first."""
    name, space, options = label.partition(" ")
    return method_name(name) + space + options
