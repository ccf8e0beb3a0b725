"""Trial of a tokenizer with unknown rules on a text, in a process with limits."""

from __future__ import annotations

from specdemo.models.limited_process import LimitedProcess, serve

_CPU_SECONDS, _MAX_BYTES = 3, 4 << 30
_MARK = "\ufdd0"  # see `chat_prompt.py`

TOKENIZER_TRIAL = LimitedProcess(__name__)


def _try(path: str, text: str) -> int:
    """Return the number of tokens of a text, which are decoded again."""
    from tokenizers import Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(path)
        unmark = [normalizers.Replace(_MARK, ""), *filter(None, [tokenizer.normalizer])]
        tokenizer.normalizer = normalizers.Sequence(unmark)
        tokens = tokenizer.encode(text).ids
        tokenizer.decode(tokens)
    except BaseException as error:  # panics of Rust are no `Exception`
        raise ValueError(str(error)) from error
    return len(tokens)


if __name__ == "__main__":
    import tokenizers  # noqa: F401  # before the forks

    serve(lambda request: _try(*request), _CPU_SECONDS, _MAX_BYTES)
