"""Training conversations: filters, loops, hold-out, and batches that depend only on the number of the step.

`training.head.generate` writes the files: `tokens`, `lengths`, `spans` of answers, `settings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SETTINGS = {"greedy": (0.0, 1.0), "pair": (0.2, 0.9), "one": (1.0, 1.0)}  # temperature and top-p of answers
SHARED = 13  # consecutive tokens that connect a conversation with an evaluation prompt
LONGEST_BLOCK = 64
HELD_OUT = 320  # conversations
WINDOW = 1536
JOINED = 0.1  # share of the conversations in windows of several
EARLY = 128  # tokens of first answers that count twice
MARKERS = 3  # tokens of a turn before the message


@dataclass(frozen=True)
class Conversation:
    """Token ids, a mask of the answer tokens, and how the answers were chosen."""

    tokens: np.ndarray  # [n] uint16
    answers: np.ndarray  # [n] bool
    setting: str  # a key of `SETTINGS`


@dataclass(frozen=True)
class Batch:
    """Token ids and weights of answer tokens, `[size, length]`; rows are padded at the end."""

    tokens: np.ndarray  # int64
    weights: np.ndarray  # float32, 0 outside of answers


@dataclass(frozen=True)
class Split:
    """Conversations to train on and to evaluate on, with the figures of the filters."""

    train: list[Conversation]
    held_out: list[Conversation]  # drawn at random
    shared: int  # conversations removed because they share tokens with an evaluation prompt


def load(folder: Path, forbidden: Sequence[Sequence[int]], seed: int = 0) -> Split:
    """Read all `*.npz` of `folder`, filter, cut loops and split; `forbidden` are token ids of evaluation prompts."""
    hashes = np.unique(np.concatenate([_hashes(np.asarray(prompt, np.uint64)) for prompt in forbidden]))
    found = [item for path in sorted(folder.glob("*.npz")) for item in read(path)]
    allowed = [item for item in found if not np.isin(_hashes(item.tokens), hashes).any()]
    cut = [item for item in map(without_loops, allowed) if item.answers.any()]
    order = np.random.default_rng(seed).permutation(len(cut))
    train, held_out = ([cut[i] for i in part] for part in (order[HELD_OUT:], order[:HELD_OUT]))
    return Split(train, held_out, len(found) - len(allowed))


def read(path: Path) -> list[Conversation]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("tokens", "lengths", "spans", "settings")}
    ends = np.cumsum(arrays["lengths"])
    answers = np.zeros(len(arrays["tokens"]), bool)
    starts = ends - arrays["lengths"]
    for number, begin, end in arrays["spans"]:
        answers[starts[number] + begin : starts[number] + end] = True
    rows = zip(starts, ends, arrays["settings"], strict=True)
    return [Conversation(arrays["tokens"][start:end], answers[start:end], str(setting)) for start, end, setting in rows]


def user_turns(tokenizer: PreTrainedTokenizerBase, messages: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each message with the markers of its turn, up to the beginning of the answer."""
    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in messages
    ]
    return [ids[max(0, common_prefix(turns) - MARKERS) :] for ids in turns]


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of equal first tokens."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, sequences)))


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of every `SHARED` consecutive tokens."""
    if len(tokens) < SHARED:
        return np.zeros(0, np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, SHARED, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), SHARED) @ factors


def loop_starts(tokens: Tensor, counts: Tensor) -> Tensor:
    """Return where a block of 1 to `LONGEST_BLOCK` tokens begins its third consecutive occurrence in each row.

    `counts` are the lengths of the rows, and the result of rows without loops.
    """
    length = tokens.shape[1]
    columns = torch.arange(length, device=tokens.device)
    tokens, first = torch.where(columns < counts[:, None], tokens, -1 - columns), counts
    for size in range(1, min(LONGEST_BLOCK, length // 3) + 1):
        equal = F.pad((tokens[:, size:] == tokens[:, :-size]).int().cumsum(1), (1, 0))
        runs = equal[:, 2 * size :] - equal[:, : -2 * size] == 2 * size
        start = torch.where(runs.any(1), runs.int().argmax(1) + 2 * size, length)
        first = torch.minimum(first, start)
    return first


def loop_start(tokens: np.ndarray) -> int:
    return int(loop_starts(torch.from_numpy(tokens.astype(np.int64))[None], torch.tensor([len(tokens)])))


def without_loops(conversation: Conversation) -> Conversation:
    """Remove the tokens of each answer from its third repetition of a block to its end."""
    edges = np.flatnonzero(np.diff(conversation.answers.astype(np.int8), prepend=0, append=0))
    remaining = np.ones(len(conversation.tokens), bool)
    for begin, end in edges.reshape(-1, 2):
        remaining[begin + loop_start(conversation.tokens[begin:end]) : end] = False
    return Conversation(conversation.tokens[remaining], conversation.answers[remaining], conversation.setting)


def most_frequent(items: Sequence[Conversation], size: int) -> np.ndarray:
    """Return the most frequent answer tokens, ascending."""
    counts = np.bincount(np.concatenate([item.tokens[item.answers] for item in items]))
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def early_end(item: Conversation) -> int:
    """Return the end of the part that users see first: up to token `EARLY` of the first answer."""
    begin = int(item.answers.argmax())
    return begin + int((~item.answers[begin : begin + EARLY]).argmax() or min(EARLY, len(item.answers) - begin))


class Batches:
    """Batches of about `tokens` tokens: most windows are a conversation, the others several that are joined.

    Joined conversations reach positions up to `WINDOW`; all but the first lose the system prompt. Windows of similar
    length share a batch. A batch depends only on the arguments and its number, so that training can be resumed.
    """

    def __init__(self, conversations: Sequence[Conversation], tokens: int, seed: int) -> None:
        self._conversations, self._tokens, self._seed = conversations, tokens, seed
        self._system = common_prefix([item.tokens.tolist() for item in conversations])
        self._epochs: list[list[list[list[int]]]] = []  # batches of windows of conversations

    def __call__(self, step: int) -> Batch:
        epoch, number = 0, step
        while number >= len(self._epoch(epoch)):
            number -= len(self._epoch(epoch))
            epoch += 1
        return padded([self._window(items) for items in self._epoch(epoch)[number]])

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens of all batches before `step`."""
        total, epoch = 0, 0
        while step > 0:
            plan = self._epoch(epoch)[:step]
            total += sum(sum(map(self._length, windows)) for windows in plan)
            step, epoch = step - len(plan), epoch + 1
        return total

    def _length(self, items: Sequence[int]) -> int:
        return sum(len(self._conversations[i].tokens) for i in items) - self._system * (len(items) - 1)

    def _epoch(self, number: int) -> list[list[list[int]]]:
        while len(self._epochs) <= number:
            self._epochs.append(self._plan(np.random.default_rng([self._seed, len(self._epochs)])))
        return self._epochs[number]

    def _plan(self, rng: np.random.Generator) -> list[list[list[int]]]:
        order = rng.permutation(len(self._conversations)).tolist()
        count = int(len(order) * JOINED)
        windows = [[i] for i in order[count:]]
        joined: list[list[int]] = [[]]
        for i in order[:count]:
            if self._length([*joined[-1], i]) > WINDOW:
                joined.append([])
            joined[-1].append(i)
        windows = sorted([*windows, *filter(None, joined)], key=self._length)
        batches: list[list[list[int]]] = [[]]
        for window in windows:
            if (len(batches[-1]) + 1) * self._length(window) > self._tokens:
                batches.append([])
            batches[-1].append(window)
        return [batches[i] for i in rng.permutation(len(batches))]

    def _window(self, items: Sequence[int]) -> Conversation:
        first, *others = (self._conversations[i] for i in items)
        return Conversation(
            np.concatenate([first.tokens, *(item.tokens[self._system :] for item in others)]),
            np.concatenate([first.answers, *(item.answers[self._system :] for item in others)]),
            first.setting,
        )


def padded(windows: Sequence[Conversation]) -> Batch:
    """Return windows as rows of equal length, at most `WINDOW`."""
    length = min(WINDOW, max(len(window.tokens) for window in windows))
    batch = Batch(np.zeros((len(windows), length), np.int64), np.zeros((len(windows), length), np.float32))
    for row, window in enumerate(windows):
        count = min(length, len(window.tokens))
        batch.tokens[row, :count] = window.tokens[:count]
        batch.weights[row, :count] = window.answers[:count]
        batch.weights[row, : early_end(window)] *= 2
    return batch
