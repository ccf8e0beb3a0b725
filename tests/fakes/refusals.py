"""Refusals: a printable sentence with cause and remedy."""

from collections.abc import Callable

from specdemo.core.errors import UserError


def refusal(function: Callable[..., object], *arguments: object) -> str:
    """Return the sentence of the `UserError`, or an empty text if the function returns."""
    try:
        function(*arguments)
    except UserError as error:
        check_sentence(str(error))
        return str(error)
    return ""


def check_sentence(sentence: str) -> None:
    assert sentence.isprintable() and len(sentence) < 450 and ": " in sentence, sentence
