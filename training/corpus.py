"""The training text: Python's own standard library, as token ids.

Knows files and tokenizers; knows nothing of models. The text is on every machine that has Python, so anyone can
train the pair again; it is covered by the PSF licence.
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
LARGEST_FILE = 400_000
# Generated tables and data in disguise: they teach a code model nothing and would dominate its vocabulary.
GENERATED = (
    "encodings/",
    "lib2to3/tests/data/",
    "pydoc_data/",
    "test/encoded_modules/",
    "idlelib/Icons/",
    "__pycache__/",
)


@dataclass(frozen=True)
class Corpus:
    """Token ids of whole files, each ended by the end-of-text token; `held_out` shares no file with `train`."""

    train: np.ndarray  # [n] uint16
    held_out: np.ndarray  # [m] uint16
    held_out_files: list[str]
    tokenizer: PreTrainedTokenizerFast


def standard_library() -> list[Path]:
    """The standard library's source files worth learning from, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "config-")) or any(part in name for part in GENERATED):
            continue
        if 0 < path.stat().st_size <= LARGEST_FILE:
            files.append(path)
    return files


def is_held_out(path: Path, root: Path) -> bool:
    """Every 25th file, by a hash of its name: stable when files come and go between Python versions."""
    name = path.relative_to(root).as_posix()
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25 == 0


def held_out_texts() -> dict[str, str]:
    """The source of every held-out file by name: what figures and examples are measured on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in standard_library() if is_held_out(path, root))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8", "replace") for path in files}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` entries that never merges over a line break or into an indentation.

    So a prompt that ends in a line break, or in the indentation of its next line, is cut as it was in training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n| {2,}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
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
        tokenizer_object=tokenizer,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def load(folder: Path, seed: int) -> Corpus:
    """Read, split and tokenise the corpus; the tokenizer is trained once and kept in `folder`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = standard_library()
    random.Random(seed).shuffle(files)
    held = [path for path in files if is_held_out(path, root)]
    kept = [path for path in files if not is_held_out(path, root)]
    texts = [path.read_text("utf-8", "replace") for path in kept]
    home = folder / "target"
    if (home / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(home)
    else:
        tokenizer = train_tokenizer(texts)
        for role in ("target", "drafter"):
            tokenizer.save_pretrained(folder / role)
    end = tokenizer.eos_token_id

    def ids(texts: list[str]) -> np.ndarray:
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array(one.ids + [end], dtype=np.uint16) for one in encoded])

    return Corpus(
        train=ids(texts),
        held_out=ids([path.read_text("utf-8", "replace") for path in held]),
        held_out_files=[path.relative_to(root).as_posix() for path in held],
        tokenizer=tokenizer,
    )


def batch(tokens: np.ndarray, step: int, size: int, length: int, seed: int) -> np.ndarray:
    """Batch number `step`: `[size, length]` token ids.

    Each epoch cuts the text at a new offset and shuffles the pieces. A pure function of its arguments, so a run that
    was interrupted goes on with exactly the batches it would have seen.
    """
    pieces = (len(tokens) - length) // length
    epoch, first = divmod(step * size, pieces - pieces % size)
    rng = np.random.default_rng([seed, epoch])
    offset = int(rng.integers(length))
    order = rng.permutation(pieces)[first : first + size]
    return np.stack([tokens[offset + i * length : offset + (i + 1) * length] for i in order]).astype(np.int64)
