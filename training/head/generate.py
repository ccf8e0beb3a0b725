"""Write conversations of the target: `python -m training.head.generate --prompts FILE --out DIR`.

A quarter begin with a user turn that the target writes, the others with the prompts in their order (lines of JSON with
`text`, see `training.head.prompts`); 30 % have a second turn. Answers end before the third repetition of a
block. Files that exist are not written again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from training.head.conversations import SETTINGS
from training.head.prompts import FOLLOWING
from training.head.target import Request, Slots, Target

SHARES = {"pair": 0.4, "greedy": 0.35, "one": 0.25}  # of conversations, by how answers are chosen
OWN, FOLLOWED = 0.25, 0.3
OWN_CHOICE = (1.0, 0.95)  # temperature and top-p of user turns by the target
MOST_ANSWER, MOST_QUESTION, LEAST_ANSWER = 400, 80, 32  # tokens


@dataclass(frozen=True)
class Format:
    """Token ids around the messages of a chat template."""

    system: list[int]  # up to the first user message
    answer: list[int]  # between a user message and its answer
    following: list[int]  # between an answer without its end token and the next user message
    end: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Format:
        messages = [
            {"role": role, "content": text}
            for role, text in (("user", "first"), ("assistant", "second"), ("user", "third"))
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        system, rest = text.split("first", 1)
        answer, rest = rest.split("second", 1)
        following = rest.split("third", 1)[0]
        (end,) = tokenizer.encode(tokenizer.eos_token, add_special_tokens=False)
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (system, answer, following)]
        return cls(*parts, end)


@dataclass
class Dialogue:
    """A conversation under construction."""

    parts: Format
    setting: str
    prompt: list[int] | None  # None: the target writes it
    follow: list[int] | None  # second user turn
    spans: list[tuple[int, int]] = field(default_factory=list)  # begin and end of each answer
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens += self.parts.system
        if self.prompt is not None:
            self.tokens += self.prompt + self.parts.answer

    def request(self, length: int, limit: int) -> Request | None:
        """Return the next request in a context of `length`, None if no answer fits."""
        if self.prompt is None:
            return Request(self.tokens, OWN_CHOICE, MOST_QUESTION, self)
        room = length - len(self.tokens) - 1
        return Request(self.tokens, SETTINGS[self.setting], min(limit, room), self) if room >= LEAST_ANSWER else None

    def receive(self, tokens: list[int]) -> bool:
        """Add what the target wrote; return whether the conversation goes on."""
        if self.prompt is None:
            self.prompt = tokens[:-1] if tokens and tokens[-1] == self.parts.end else tokens
            self.tokens += self.prompt + self.parts.answer
            return bool(self.prompt)
        begin = len(self.tokens)
        self.tokens += tokens
        self.spans.append((begin, len(self.tokens)))
        if self.follow is None or not tokens:
            return False
        self.tokens += self.parts.following[tokens[-1] == self.parts.end :] + self.follow + self.parts.answer
        self.follow = None
        return True


def converse(slots: Slots, begun: Iterator[Dialogue], limit: int) -> list[Dialogue]:
    waiting: list[Dialogue] = []
    done: list[Dialogue] = []

    def take(most: int) -> list[Request]:
        requests: list[Request] = []
        while len(requests) < most and (dialogue := waiting.pop() if waiting else next(begun, None)):
            if request := dialogue.request(slots.length, limit):
                requests.append(request)
            elif dialogue.spans:
                done.append(dialogue)
        return requests

    def give(request: Request, tokens: list[int]) -> None:
        dialogue: Dialogue = request.owner
        if dialogue.receive(tokens):
            waiting.append(dialogue)
        elif any(end > begin for begin, end in dialogue.spans):
            done.append(dialogue)

    slots.serve(take, give)
    return done


def dialogues(
    prompts: Sequence[list[int]], following: Sequence[list[int]], parts: Format, seed: str
) -> Iterator[Dialogue]:
    """Yield the beginnings of conversations with these prompts, and of others."""
    rng = random.Random(seed)

    def begin(prompt: list[int] | None) -> Dialogue:
        (setting,) = rng.choices(list(SHARES), list(SHARES.values()))
        follow = rng.choice(following) if rng.random() < FOLLOWED else None
        return Dialogue(parts, setting, prompt, follow)

    for ids in prompts:
        while rng.random() < OWN:
            yield begin(None)
        yield begin(ids)


def save(path: Path, found: Sequence[Dialogue]) -> None:
    """Write conversations in the form that `training.head.conversations` reads."""
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        tokens=np.concatenate([np.array(dialogue.tokens[: dialogue.spans[-1][1]], np.uint16) for dialogue in found]),
        lengths=np.array([dialogue.spans[-1][1] for dialogue in found], np.int32),
        spans=np.array([(i, *span) for i, dialogue in enumerate(found) for span in dialogue.spans], np.int32),
        settings=np.array([dialogue.setting for dialogue in found]),
    )
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.head.generate", description=__doc__)
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory of a chat model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-file", type=int, default=10_000, help="prompts")
    parser.add_argument("--texts", type=int, default=32, help="conversations per pass; 1,536 on a large GPU")
    parser.add_argument("--length", type=int, default=1024, help="most positions of a conversation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    tokenizer = read_tokenizer(ModelSpec(options.target))
    parts = Format.of(tokenizer)
    slots = Slots(Target(options.target, device=options.device), parts.end, options.texts, options.length, MOST_ANSWER)
    lines = [json.loads(line) for line in options.prompts.read_text("utf-8").split("\n") if line]
    following = [tokenizer.encode(text, add_special_tokens=False) for text in FOLLOWING]
    for first in range(0, len(lines), options.per_file):
        path = options.out / f"{options.prompts.stem}{first // options.per_file:04d}.npz"
        if path.exists():
            continue
        start, slots.written = time.monotonic(), 0
        chosen = lines[first : first + options.per_file]
        prompts = [tokenizer.encode(line["text"], add_special_tokens=False) for line in chosen]
        torch.manual_seed(options.seed + first)
        found = converse(slots, dialogues(prompts, following, parts, f"{options.seed} {first}"), MOST_ANSWER)
        save(path, found)
        rate = slots.written / (time.monotonic() - start)
        print(f"{path.name}: {len(found):,} conversations, {slots.written:,} written tokens, {rate:,.0f}/s", flush=True)


if __name__ == "__main__":
    main()
