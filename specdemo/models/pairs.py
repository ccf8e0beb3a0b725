"""Drafter/target pairs ready to use, and whether two models may be paired."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import Refused

ASSETS = Path(__file__).resolve().parents[2] / "assets"


@dataclass(frozen=True)
class Pair:
    """A target and the drafter that goes with it: Hugging Face ids or local directories."""

    title: str
    target: str
    drafter: str
    gamma: int


PAIRS = {
    "bundled": Pair(
        "Bundled: Python code, 10 M and 2 M parameters",
        str(ASSETS / "pair" / "target"),
        str(ASSETS / "pair" / "drafter"),
        gamma=3,
    ),
}


SAMPLE = "def f(x):\n    return  'naïve 東京 🙂'  # 12345\n"


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that `check_pair` lets pass, of use where only one of the two is at hand."""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    said = repr((sorted(tokenizer.get_vocab().items()), ends, tokenizer.encode(SAMPLE, add_special_tokens=False)))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def check_pair(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> None:
    """Refuse a drafter whose ids do not mean what the target's mean.

    Identity of the tokenizers decides, not the width of the logits: one tokenizer is often padded to several widths.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours != theirs:
        ours, theirs = ({i: text for text, i in vocab.items()} for vocab in (ours, theirs))
        differ = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        first = differ[0]
        raise Refused(
            f"the tokenizers differ in {len(differ):,} of {len(ours.keys() | theirs.keys()):,} ids (id {first} is "
            f"{ours.get(first)!r} for the target and {theirs.get(first)!r} for the drafter): "
            "choose two models of one family"
        )
    for kind in ("bos_token_id", "eos_token_id"):
        if getattr(target, kind) != getattr(drafter, kind):
            raise Refused(
                f"the tokenizers differ in {kind} ({getattr(target, kind)} for the target, {getattr(drafter, kind)} "
                "for the drafter): choose two models of one family"
            )
    if target.encode(SAMPLE, add_special_tokens=False) != drafter.encode(SAMPLE, add_special_tokens=False):
        raise Refused("the tokenizers cut the same text differently: choose two models of one family")
