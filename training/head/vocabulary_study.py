"""Draft vocabularies of a head: table `head-vocabulary` in docs/heads.md.

`python -m training.head.vocabulary_study --data DIR --write`. A vocabulary consists of the most frequent tokens of the
training answers and, with context, of the tokens of the text so far.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import publish, run_study, study_parser
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from training.head import checkpoint, conversations
from training.head.conversations import SETTINGS, Conversation
from training.head.eagle3 import Eagle3
from training.head.objective import distribution, states_of
from training.head.target import Target
from training.head.vocabulary import most_frequent

TABLES = {"head-vocabulary": "docs/heads.md"}
SIZES = (4096, 8192, 16384, None)  # None: all tokens
COLUMNS = {
    "most frequent tokens": "{size}",
    "tokens of the text": "{context}",
    **{f"{name}: covered": f"{{covered_{name}:.1%}}" for name in SETTINGS},
    **{f"{name}: alpha": f"{{alpha_{name}:.3f}}" for name in SETTINGS},
}


def earlier_tokens(tokens: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return a mask `[rows, size]` of the tokens up to each position."""
    first = torch.full((size,), len(tokens))
    first.scatter_reduce_(0, tokens, torch.arange(len(tokens)), "amin")
    return first <= positions[:, None]


@torch.no_grad()
def measured(
    head: Eagle3, target: Target, item: Conversation, choice: tuple[float, float], vocabularies: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each mask `[size]`, without and with earlier tokens, if the text's tokens are covered, and overlaps."""
    with torch.autocast("cpu", torch.bfloat16):
        (states,), rows = states_of(head, target, conversations.padded([item]), 1)
        p = distribution(F.linear(rows.final, target.output).float(), *choice)
        logits = F.linear(rows.of(states, 0), target.output).float()
    tokens = torch.from_numpy(item.tokens.astype(np.int64))
    context, following = earlier_tokens(tokens, rows.position, logits.shape[1]), tokens[rows.position + 1][:, None]
    for static in vocabularies:
        for allowed in (static.expand_as(context), static | context):
            q = distribution(logits.masked_fill(~allowed, -torch.inf), *choice)
            yield allowed.gather(1, following)[:, 0], torch.minimum(p, q).sum(-1)


def study(options: argparse.Namespace) -> None:
    """Publish coverage of held-out tokens, and acceptance of the first draft token."""
    name = PAIRS[CHAT_PAIR].target
    target = Target(name, Eagle3.taps)
    head = checkpoint.load(Eagle3, options.head, target).float()
    assert isinstance(head, Eagle3)
    tokenizer = read_tokenizer(ModelSpec(name))
    turns = conversations.user_turns(tokenizer, [prompt.text for prompt in load_prompts(chat=True)])
    split = conversations.load(options.data, turns)
    masks = []
    for size in SIZES:
        masks.append(torch.full((target.config.vocab_size,), size is None))
        if size is not None:
            masks[-1][most_frequent(split.train, size)] = True
    results: dict[str, list[list[tuple[Tensor, Tensor]]]] = {}
    for setting, choice in SETTINGS.items():
        items = [item for item in split.held_out if item.setting == setting][: options.conversations]
        results[setting] = [list(measured(head, target, item, choice, masks)) for item in items]
    rows: list[dict[str, Any]] = []
    for i in range(2 * len(SIZES)):
        row: dict[str, Any] = {"size": SIZES[i // 2] or "all", "context": "yes" if i % 2 else "no"}
        for setting, texts in results.items():
            covered, overlap = (torch.cat([text[i][part] for text in texts]) for part in (0, 1))
            row |= {f"covered_{setting}": covered.float().mean().item(), f"alpha_{setting}": overlap.mean().item()}
        rows.append(row)
    publish(options, "head-vocabulary", COLUMNS, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--data", type=Path, required=True, help="directory of conversations (*.npz)")
    parser.add_argument("--head", type=Path, default=Path(PAIRS[CHAT_PAIR].head or ""))
    parser.add_argument("--conversations", type=int, default=16, help="held-out conversations of each setting")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
