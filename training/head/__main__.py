"""Train a draft head: `python -m training.head --data DIR --out DIR`. Interrupted runs are continued."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from training.fit import Schedule, fit
from training.head import checkpoint, conversations, objective
from training.head.conversations import Conversation, Split, early_part
from training.head.eagle3 import TAPS, Eagle3
from training.head.target import Target


def describe(split: Split) -> str:
    """Return the figures of the training data."""
    total = sum(len(item.tokens) for item in split.train)
    answers = sum(int(item.answers.sum()) for item in split.train)
    return (
        f"{len(split.train)} conversations, {total:,} tokens, {answers:,} in answers; {split.shared} share tokens with "
        f"evaluation prompts; {split.cut_share:.1%} of answer tokens removed as loops; {len(split.held_out)} held out"
    )


class HeldOut:
    """Acceptance on the first tokens of first answers by group; `curve.jsonl` has a line per evaluated step.

    `tokens`: number of tokens of that many steps. `tokens_before`: those that the head had seen at the start.
    """

    def __init__(
        self,
        head: Eagle3,
        target: Target,
        groups: dict[str, list[Conversation]],
        folder: Path,
        tokens: Callable[[int], int],
        tokens_before: int = 0,
    ) -> None:
        self._head, self._target, self._folder = head, target, folder
        self._groups = {name: list(map(early_part, items)) for name, items in groups.items()}
        self._tokens, self._tokens_before = tokens, tokens_before
        self._start = time.monotonic()

    def __call__(self, step: int) -> float:
        """Return the mean over the groups of tokens per pass with 4 drafts."""
        results = {name: objective.acceptance(self._head, self._target, items) for name, items in self._groups.items()}
        tokens, seconds = self._tokens(step), round(time.monotonic() - self._start)
        if step != self._last_step():  # a finished run evaluates its last step again
            figures = {name: asdict(result) for name, result in results.items()}
            record = {"step": step, "tokens": tokens, "seconds": seconds, **figures}
            with self._curve.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        checkpoint.save(self._head, self._target, self._folder, self._tokens_before + tokens)
        return sum(result.tokens for result in results.values()) / len(results)

    @property
    def _curve(self) -> Path:
        return self._folder / "curve.jsonl"

    def _last_step(self) -> int | None:
        lines = self._curve.read_text("utf-8").splitlines() if self._curve.exists() else []
        return json.loads(lines[-1])["step"] if lines else None


def groups_of(items: Sequence[Conversation], most: int) -> dict[str, list[Conversation]]:
    """Return at most `most` conversations of each setting and first class, such as `greedy own`."""
    groups: dict[str, list[Conversation]] = {}
    for item in items:
        group = groups.setdefault(f"{item.setting} {item.classes[0]}", [])
        if len(group) < most:
            group.append(item)
    return groups


def main() -> None:
    """Train the head and evaluate it on held-out conversations."""
    parser = argparse.ArgumentParser(prog="python -m training.head", description=__doc__)
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory")
    parser.add_argument("--data", type=Path, required=True, help="directory of conversations (*.npz)")
    parser.add_argument("--evaluation", type=Path, help="directory of answers to evaluation prompts (*.npz)")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, curve and head")
    parser.add_argument("--start", type=Path, help="directory of a head to start from")
    parser.add_argument("--steps", type=int, default=1000, help="the rate decays over the last 60 %")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, help="most frequent tokens (default: 8,192, or those of --start)")
    parser.add_argument("--unrolled", type=int, default=4, help="steps of training-time test")
    parser.add_argument("--own-output", action="store_true", help="train the output matrix")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check-every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--check", type=int, default=8, help="conversations per evaluated group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = read_tokenizer(ModelSpec(options.target))
    prompts = [prompt.text for prompt in load_prompts(chat=True)]
    split = conversations.load(options.data, conversations.user_turns(tokenizer, prompts))
    print(describe(split), flush=True)
    torch.manual_seed(options.seed)
    target = Target(options.target, TAPS, options.device)
    frequent = torch.from_numpy(conversations.most_frequent(split.train, options.vocabulary or 8192))
    if options.start:
        head = checkpoint.load(options.start, target)
        if options.vocabulary:
            head.choose_vocabulary(frequent.to(options.device))
    else:
        head = Eagle3(target.config, len(TAPS), frequent, options.own_output).to(options.device)
        head.start_from(target)
    batches = conversations.Batches(split.train, options.batch_tokens, options.seed)
    before = checkpoint.trained_tokens(options.start) if options.start else 0
    measured = [*split.held_out, *(conversations.stored(options.evaluation) if options.evaluation else ())]
    groups = groups_of(measured, options.check)
    held_out = HeldOut(head, target, groups, options.out, batches.tokens_before, before)
    every = max(1, options.check_every // 10)
    schedule = Schedule(steps=options.steps, lr=options.lr, warmup=30, decay_part=0.6, save_every=every)
    loss = partial(objective.loss, head, target, options.unrolled)
    fit(head, loss, batches, schedule, options.out / "state.pt", held_out, "head")


if __name__ == "__main__":
    main()
