"""Names of decoding methods on the page."""

from __future__ import annotations

import re

from specdemo.drafters import METHODS

_LABELS = {name: method.label for name, method in METHODS.items() if method.label}
_IDENTIFIER = re.compile(rf"(?<![\w/-])({'|'.join(_LABELS)})(?![\w/-])")  # not in paths


def method_name(method: str) -> str:
    """Return the visible name of a method."""
    return _LABELS.get(method, method)


def with_method_names(text: str) -> str:
    """Add visible names to a message."""
    return _IDENTIFIER.sub(lambda match: f"{_LABELS[match[1]]} ({match[1]})", text)


def visible_recipe(label: str) -> str:
    """Replace the method of a recipe's label."""
    name, space, options = label.partition(" ")
    return method_name(name) + space + options
