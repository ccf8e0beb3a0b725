"""Write training conversations with the target: `python -m training.head.generate --out DIR --conversations N`.

User turns come from the templates of `turns.py` or are written by the target itself after the template's prefix.
Answers end at their third repetition of a block. A conversation depends only on the seed and its number.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.select import engine_of
from specdemo.models.load import LoadedModel, load
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from training.head import turns
from training.head.conversations import SETTINGS, ends_in_loop
from training.head.objective import distribution

SHARES = {"pair": 0.4, "greedy": 0.25, "one": 0.35}  # of conversations, by how answers are chosen
OWN_CHOICE = (1.0, 0.95)  # temperature and top-p of user turns by the target
MOST_ANSWER, MOST_QUESTION = 400, 80  # tokens
PER_FILE = 1000  # conversations


@dataclass(frozen=True)
class Contents:
    """Share of conversations of 1,024 positions or more, share of user turns by the target, classes of templates."""

    long: float = 0.5
    own: float = 0.35
    classes: tuple[str, ...] = turns.CLASSES


@dataclass
class Dialogue:
    """A conversation under construction."""

    setting: str
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # begin and end of each answer
    classes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """Token ids around the messages of a chat template."""

    system: list[int]  # up to the first user message
    answer: list[int]  # between a user message and its answer
    following: list[int]  # between an answer without its end token and the next user message
    end: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, end: int) -> Format:
        """Derive the parts from a rendered conversation."""
        messages = [
            {"role": role, "content": text}
            for role, text in (("user", "first"), ("assistant", "second"), ("user", "third"))
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        system, rest = text.split("first", 1)
        answer, rest = rest.split("second", 1)
        following = rest.split("third", 1)[0]
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (system, answer, following)]
        return cls(*parts, end)


Steps = Generator[None, Tensor, None]  # receives the logits after the dialogue's last token


def write(tokens: list[int], logits: Tensor, choice: tuple[float, float], limit: int, end: int, seed: int) -> Steps:
    """Continue `tokens` in place until the end token, a loop or `limit` tokens; `choice`: temperature and top-p."""
    generator, begin = torch.Generator().manual_seed(seed), len(tokens)
    while True:
        tokens.append(choose(logits, choice, generator))
        if tokens[-1] == end or len(tokens) - begin == limit or ends_in_loop(tokens[begin:]):
            return
        logits = yield


def choose(logits: Tensor, choice: tuple[float, float], generator: torch.Generator) -> int:
    """Draw a token by inversion, which is faster than `torch.multinomial`."""
    if choice[0] == 0:
        return int(logits.argmax())
    sums = distribution(logits[None].float(), *choice)[0].cumsum(0)
    drawn = torch.rand((), generator=generator) * sums[-1]
    return min(int(torch.searchsorted(sums, drawn, right=True)), int(torch.searchsorted(sums, sums[-1])))


def converse(
    result: Dialogue, rng: random.Random, parts: Format, tokenizer: PreTrainedTokenizerBase, contents: Contents
) -> Steps:
    """Write turns until the conversation has its length."""
    length = rng.randrange(1024, 1800) if rng.random() < contents.long else 0
    tokens = result.tokens
    tokens += parts.system
    while True:
        kind = rng.choices(["own", "template"], [contents.own, 1 - contents.own])[0]
        if kind == "template":
            kind = "follow" if result.spans and rng.random() < 0.5 else rng.choice(contents.classes)
            tokens += tokenizer.encode(turns.message(kind, rng), add_special_tokens=False)
        else:
            logits = yield
            yield from write(tokens, logits, OWN_CHOICE, MOST_QUESTION, parts.end, rng.getrandbits(62))
            if tokens[-1] == parts.end:
                tokens.pop()
        result.classes.append(kind)
        tokens += parts.answer
        begin, logits = len(tokens), (yield)
        yield from write(tokens, logits, SETTINGS[result.setting], MOST_ANSWER, parts.end, rng.getrandbits(62))
        result.spans.append((begin, len(tokens)))
        if len(tokens) >= length:
            return
        tokens += parts.following[tokens[-1] == parts.end :]


class Writer:
    """Conversations of a loaded target, several at a time."""

    def __init__(self, loaded: LoadedModel, seed: int, texts: int, contents: Contents) -> None:
        (end,) = loaded.tokenizer.encode(loaded.tokenizer.eos_token, add_special_tokens=False)
        self._parts, self._tokenizer = Format.of(loaded.tokenizer, end), loaded.tokenizer
        self._engine, self._seed, self._texts = engine_of(loaded.model), seed, texts
        self._contents = contents

    @torch.inference_mode()
    def write(self, numbers: Sequence[int]) -> list[Dialogue]:
        """Return the conversations of these numbers."""
        waiting, active, results = list(numbers), [], []
        while waiting or active:
            while waiting and len(active) < self._texts:
                rng = random.Random(f"{self._seed} {waiting.pop(0)}")
                result = Dialogue(rng.choices(list(SHARES), list(SHARES.values()))[0])
                steps = converse(result, rng, self._parts, self._tokenizer, self._contents)
                next(steps)
                results.append(result)
                active.append((result, steps, self._engine.open()))
            held = [cache.length for _, _, cache in active]
            entries = [
                Entry(cache, result.tokens[count:], count, Draft())
                for (result, _, cache), count in zip(active, held, strict=True)
            ]
            rows = self._engine.run(entries)
            remaining = []
            for text, logits in zip(active, rows, strict=True):
                result, steps, cache = text
                cache.keep(len(result.tokens), [])
                try:
                    steps.send(logits[-1])
                    remaining.append(text)
                except StopIteration:
                    self._engine.close(cache)
            active = remaining
        return results


def save(path: Path, dialogues: Sequence[Dialogue]) -> None:
    """Write conversations in the form that `training.head.conversations` reads."""
    spans = [(i, *span) for i, dialogue in enumerate(dialogues) for span in dialogue.spans]
    np.savez_compressed(
        path,
        tokens=np.concatenate([np.array(dialogue.tokens, np.uint16) for dialogue in dialogues]),
        lengths=np.array([len(dialogue.tokens) for dialogue in dialogues], np.int32),
        spans=np.array(spans, np.int32),
        settings=np.array([dialogue.setting for dialogue in dialogues]),
        classes=np.array([",".join(dialogue.classes) for dialogue in dialogues]),
    )


def main() -> None:
    """Write files of conversations; existing files are not written again."""
    parser = argparse.ArgumentParser(prog="python -m training.head.generate", description=__doc__)
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory of a chat model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=7000)
    parser.add_argument("--texts", type=int, default=8, help="conversations per pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--long", type=float, default=Contents.long, help="share that reaches 1,024 positions")
    parser.add_argument("--own", type=float, default=Contents.own, help="share of user turns that the target writes")
    parser.add_argument("--classes", nargs="+", choices=turns.CLASSES, default=turns.CLASSES, help="of templates")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = load(ModelSpec(options.target), warm=False)
    contents = Contents(options.long, options.own, tuple(options.classes))
    writer = Writer(loaded, options.seed, options.texts, contents)
    for first in range(0, options.conversations, PER_FILE):
        path = options.out / f"part{first // PER_FILE:04d}.npz"
        if not path.exists():
            start = time.monotonic()
            dialogues = writer.write(range(first, min(first + PER_FILE, options.conversations)))
            save(path, dialogues)
            count = sum(len(dialogue.tokens) for dialogue in dialogues)
            print(f"{path.name}: {count:,} tokens, {count / (time.monotonic() - start):.0f} per second", flush=True)


if __name__ == "__main__":
    main()
