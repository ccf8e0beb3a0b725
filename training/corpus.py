"""Training text: Python's standard library, as token ids.

It is part of every Python installation, under the PSF licence, which makes the training reproducible without downloads.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 4096
MAX_FILE_BYTES = 400_000
# Generated tables and data, which would dominate the vocabulary.
GENERATED = ("encodings/", "lib2to3/tests/data/", "pydoc_data/", "encoded_modules/", "idlelib/Icons/", "__pycache__/")


@dataclass(frozen=True)
class Corpus:
    """Token ids of complete files, each followed by the end-of-text token; `held_out` and `train` share no file."""

    train: np.ndarray  # [n] uint16
    held_out: np.ndarray  # [m] uint16
    tokenizer: PreTrainedTokenizerFast


def standard_library() -> list[Path]:
    """Return the source files of the standard library, without generated files, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "config-")) or any(part in name for part in GENERATED):
            continue
        if 0 < path.stat().st_size <= MAX_FILE_BYTES:
            files.append(path)
    return files


def is_held_out(path: Path, root: Path) -> bool:
    """Select every 25th file by a hash of its name, which is stable across Python versions."""
    name = path.relative_to(root).as_posix()
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25 == 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCABULARY` entries that never merges across line breaks or indentation.

    A prompt that ends with a line break or an indentation is then tokenized as in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n| {2,}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=2048
    )


def load(folder: Path, seed: int) -> Corpus:
    """Read, split and tokenize the corpus; the tokenizer is trained once and saved in `folder`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = standard_library()
    random.Random(seed).shuffle(files)
    texts: dict[bool, list[str]] = {True: [], False: []}
    for path in files:
        texts[is_held_out(path, root)].append(path.read_text("utf-8", "replace"))
    if (folder / "target" / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    else:
        tokenizer = train_tokenizer(texts[False])
        for role in ("target", "drafter"):
            tokenizer.save_pretrained(folder / role)
    end = tokenizer.eos_token_id

    def ids(texts: list[str]) -> np.ndarray:
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids + [end], dtype=np.uint16) for encoding in encoded])

    return Corpus(ids(texts[False]), ids(texts[True]), tokenizer)


def batch(tokens: np.ndarray, step: int, size: int, length: int, seed: int) -> np.ndarray:
    """Return batch number `step`, `[size, length]` token ids.

    Each epoch cuts the text at a new offset and shuffles the pieces. The result depends only on the arguments, so that
    an interrupted run can be resumed exactly.
    """
    pieces = (len(tokens) - length) // length
    epoch, first = divmod(step * size, pieces - pieces % size)
    rng = np.random.default_rng([seed, epoch])
    offset = int(rng.integers(length))
    order = rng.permutation(pieces)[first : first + size]
    return np.stack([tokens[offset + i * length : offset + (i + 1) * length] for i in order]).astype(np.int64)
