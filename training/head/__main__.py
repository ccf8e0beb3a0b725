"""Train a draft head: `python -m training.head --target FILE --data DIR --out DIR`. Interrupted runs are continued."""

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
from training.head.conversations import SETTINGS, Conversation, Split
from training.head.kind import DraftHead
from training.head.target import Target
from training.head.vocabulary import most_frequent


def describe(split: Split, items: Sequence[Conversation]) -> str:
    """Return the figures of the training data."""
    total, answers = sum(len(item.tokens) for item in items), sum(int(item.answers.sum()) for item in items)
    return (
        f"{len(items)} conversations, {total:,} tokens, {answers:,} in answers; {split.shared} share tokens with "
        f"evaluation prompts; {split.cut_share:.1%} of answer tokens removed as loops; {len(split.held_out)} held out "
        f"and {len(split.held_out_class)} of class {conversations.HELD_OUT_CLASS}"
    )


class HeldOut:
    """Evaluation on held-out conversations; `curve.jsonl` has a line per evaluated step.

    `tokens`: number of tokens of that many steps. `tokens_before`: those that the head had seen at the start.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        items: Sequence[Conversation],
        folder: Path,
        tokens: Callable[[int], int],
        tokens_before: int = 0,
    ) -> None:
        self._head, self._target, self._folder = head, target, folder
        self._items = {name: [item for item in items if item.setting == name] for name in SETTINGS}
        self._tokens, self._tokens_before = tokens, tokens_before
        self._start = time.monotonic()

    def __call__(self, step: int, most: int | None = 16) -> float:
        """Evaluate on `most` conversations of each setting; return tokens per pass of greedy answers with 5 drafts."""
        results = {}
        for name, (temperature, top_p) in SETTINGS.items():
            results[name] = objective.acceptance(self._head, self._target, self._items[name][:most], temperature, top_p)
        figures = {name: asdict(result) for name, result in results.items()}
        tokens, seconds = self._tokens(step), round(time.monotonic() - self._start)
        if step != self._last_step():  # a finished run evaluates its last step again
            record = {"step": step, "tokens": tokens, "seconds": seconds, **figures}
            with self._curve.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        checkpoint.save(self._head, self._target, self._folder, self._tokens_before + tokens)
        return results["greedy"].tokens[5]

    @property
    def _curve(self) -> Path:
        return self._folder / "curve.jsonl"

    def _last_step(self) -> int | None:
        lines = self._curve.read_text("utf-8").splitlines() if self._curve.exists() else []
        return json.loads(lines[-1])["step"] if lines else None


def main() -> None:
    """Train the head and evaluate it on held-out conversations."""
    parser = argparse.ArgumentParser(prog="python -m training.head", description=__doc__)
    parser.add_argument("--kind", choices=tuple(checkpoint.KINDS), default="eagle3")
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory")
    parser.add_argument("--data", type=Path, required=True, help="directory of conversations (*.npz)")
    parser.add_argument("--more", type=Path, help="directory of further conversations, none of them held out")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, curve and head")
    parser.add_argument("--start", type=Path, help="directory of a head to start from")
    parser.add_argument("--steps", type=int, default=1_000_000, help="the rate decays over the last fifth")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="tokens of training conversations of --data")
    parser.add_argument("--vocabulary", type=int, help="most frequent tokens (default: 8,192, or those of --start)")
    parser.add_argument("--unrolled", type=int, default=4, help="steps of training-time test, slots or heads to train")
    parser.add_argument("--own-output", action="store_true", help="train the output matrix")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--check-every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="the attention of eagle3 needs a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    tokenizer = read_tokenizer(ModelSpec(options.target))
    prompts = [prompt.text for prompt in load_prompts(chat=True)]
    split = conversations.load(options.data, conversations.user_turns(tokenizer, prompts), options.more)
    items = split.train if options.limit is None else conversations.first_tokens(split.train, options.limit)
    items = items + split.more
    print(describe(split, items), flush=True)
    torch.manual_seed(options.seed)
    kind = checkpoint.KINDS[options.kind]
    target = Target(options.target, kind.taps, options.device)
    if options.start:
        head = checkpoint.load(kind, options.start, target).float()
        if options.vocabulary:
            head.choose_vocabulary(most_frequent(items, options.vocabulary))
    else:
        head = kind(target.config, len(kind.taps), most_frequent(items, options.vocabulary or 8192), options.own_output)
        head.start_from(target)
    head.to(options.device)
    batches = conversations.Batches(items, options.batch_tokens, options.seed)
    before = checkpoint.trained_tokens(options.start) if options.start else 0
    held_out = HeldOut(head, target, split.held_out, options.out, batches.tokens_before, before)
    every = max(1, options.check_every // 10)
    schedule = Schedule(steps=options.steps, lr=options.lr, warmup=50, decay_part=0.2, save_every=every)
    loss = partial(objective.loss, head, target, options.unrolled)
    fit(head, loss, batches, schedule, options.out / "state.pt", held_out, "head")


if __name__ == "__main__":
    main()
