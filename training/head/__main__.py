"""Train a draft head: `python -m training.head --data DIR --out DIR`. Interrupted runs are continued."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from training.fit import Schedule, fit
from training.head import conversations, eagle3
from training.head.eagle3 import TAPS, Eagle3
from training.head.target import Target

UNROLLED = 4  # steps of training-time test
HELD_OUT_BATCHES = 8


def train(head: Eagle3, target: Target, split: conversations.Split, options: argparse.Namespace) -> float:
    """Train `head` in place, save it at each evaluation, and return its loss on held-out conversations."""
    batches = conversations.Batches(split.train, options.batch_tokens, options.seed)
    held_out = conversations.Batches(split.held_out, options.batch_tokens, seed=0)
    before = eagle3.trained_tokens(options.start) if options.start else 0
    loss = partial(eagle3.loss, head, target, UNROLLED)

    def check(steps: int) -> float:
        eagle3.save(head, target, options.out, before + batches.tokens_before(steps))
        return fmean(loss(held_out(i)).item() for i in range(HELD_OUT_BATCHES))

    every = max(1, options.check_every // 10)
    schedule = Schedule(steps=options.steps, lr=options.lr, warmup=30, decay_part=0.6, save_every=every)
    return fit(head, loss, batches, schedule, options.out / "state.pt", check, "head")


def main() -> None:
    """Train the head; `training.head.baseline` measures it in the program."""
    parser = argparse.ArgumentParser(prog="python -m training.head", description=__doc__)
    parser.add_argument("--target", default=PAIRS[CHAT_PAIR].target, help="GGUF file or directory")
    parser.add_argument("--data", type=Path, required=True, help="directory of conversations (*.npz)")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and head")
    parser.add_argument("--start", type=Path, help="directory of a head to start from")
    parser.add_argument("--steps", type=int, default=1000, help="the rate decays over the last 60 %%")
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, help="most frequent tokens (default: 8,192, or those of --start)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check-every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = read_tokenizer(ModelSpec(options.target))
    prompts = [prompt.text for prompt in load_prompts(chat=True)]
    split = conversations.load(options.data, conversations.user_turns(tokenizer, prompts))
    print(f"{len(split.train)} conversations, {len(split.held_out)} held out; {split.shared} share evaluation prompts")
    torch.manual_seed(options.seed)
    target = Target(options.target, TAPS, options.device)
    frequent = torch.from_numpy(conversations.most_frequent(split.train, options.vocabulary or 8192))
    if options.start:
        head = eagle3.load(options.start, target)
        if options.vocabulary:
            head.vocabulary = frequent.to(options.device)
    else:
        head = Eagle3(target.config, len(TAPS), frequent).to(options.device)
        head.start_from(target)
    print(f"held-out loss: {train(head, target, split, options):.4f}")


if __name__ == "__main__":
    main()
