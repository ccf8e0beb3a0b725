"""Log-probabilities and texts of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from specdemo.core.step import Draft, TokenLogprob, Verdict
from specdemo.core.verifier import committed_logprobs
from specdemo.models.kv_cache import CachedModel
from specdemo.models.tokenizer import TextStream

_ROWS = 64  # logits in memory


def score_prompt(cache: CachedModel, tokens: Sequence[int], count: int) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield the log-probabilities of the tokens after the first, by pass, with `count` alternatives."""
    for start in range(1, len(tokens), _ROWS):
        draft = Draft.chain(tuple(tokens[start : start + _ROWS]))
        verdict = Verdict(tuple(range(len(draft))), None)
        yield committed_logprobs(cache.score(tokens[:start], draft), draft, verdict, count)


def prompt_pieces(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token; together they are the prompt."""
    stream, offset = TextStream(tokenizer), 0
    pieces: list[str] = []
    for token in tokens:
        texts = stream.push(token), str(tokenizer.convert_ids_to_tokens(token))
        pieces.append(next((text for text in texts if text and prompt.startswith(text, offset)), ""))
        offset += len(pieces[-1])
    return (*pieces[:-1], pieces[-1] + prompt[offset:])
