"""Drafter/target pairs ready to use, and whether two models may be paired."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import Refused
from specdemo.models.catalogue import MODELS
from specdemo.models.memory import free_bytes
from specdemo.models.reasons import size
from specdemo.models.spec import find_device

ASSETS = Path(__file__).resolve().parents[2] / "assets"


@dataclass(frozen=True)
class Pair:
    """A target and the drafter that goes with it: Hugging Face ids or local directories.

    `gamma` is what to begin with: measured for the bundled pair, chosen for the others from how much smaller the
    drafter is and how deep (a pass costs what its layers cost); a preflight on the machine at hand knows better.
    """

    title: str
    target: str
    drafter: str
    gamma: int

    @property
    def chat(self) -> bool:
        """Whether the target is tuned for conversations and brings a chat template."""
        return self.target in MODELS and MODELS[self.target].chat

    @property
    def gated(self) -> bool:
        """Whether a licence has to be accepted on the hub before either model comes."""
        return any(MODELS[name].gated for name in (self.target, self.drafter) if name in MODELS)

    @property
    def licences(self) -> tuple[str, ...]:
        """Of the models that come from the hub, each once."""
        return tuple(dict.fromkeys(MODELS[name].licence for name in (self.target, self.drafter) if name in MODELS))


def _pair(title: str, target: str, drafter: str, gamma: int) -> Pair:
    assert target in MODELS and drafter in MODELS
    return Pair(title, target, drafter, gamma)


PAIRS = {
    "bundled": Pair(
        "Bundled: Python code, 10 M and 2 M parameters",
        str(ASSETS / "pair" / "target"),
        str(ASSETS / "pair" / "drafter"),
        gamma=3,
    ),
    "smollm2-360m": _pair("SmolLM2 360M, 135M", "HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-135M", 2),
    "smollm2-1.7b": _pair("SmolLM2 1.7B, 135M", "HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-135M", 3),
    "qwen2.5-1.5b": _pair("Qwen2.5 1.5B, 0.5B", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 3),
    "qwen2.5-7b": _pair("Qwen2.5 7B, 0.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 4),
    "qwen2.5-coder-1.5b": _pair(
        "Qwen2.5 Coder 1.5B, 0.5B", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 3
    ),
    "qwen2.5-coder-7b": _pair(
        "Qwen2.5 Coder 7B, 0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 5
    ),
    "qwen3-8b": _pair("Qwen3 8B, 0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", 4),
    "llama-3.1-8b": _pair("Llama 3.1 8B, 3.2 1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", 4),
    "gemma-2-9b": _pair("Gemma 2 9B, 2B", "google/gemma-2-9b", "google/gemma-2-2b", 3),
    "flan-t5-large": _pair("Flan-T5 Large, Small (with encoders)", "google/flan-t5-large", "google/flan-t5-small", 4),
    "flan-t5-xl": _pair("Flan-T5 XL, Small (with encoders)", "google/flan-t5-xl", "google/flan-t5-small", 5),
    "pythia-2.8b": _pair("Pythia 2.8B, 160M", "EleutherAI/pythia-2.8b", "EleutherAI/pythia-160m", 4),
    "pythia-2.8b-70m": _pair("Pythia 2.8B, 70M", "EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m", 4),
    "gpt2-xl": _pair("GPT-2 XL, GPT-2", "openai-community/gpt2-xl", "openai-community/gpt2", 4),
}
REVISIONS = {name: model.revision for name, model in MODELS.items()}  # what a name means unless another is asked for


@dataclass(frozen=True)
class Offer:
    """A ready pair, and whether this machine holds it now."""

    name: str
    pair: Pair
    needs: int  # bytes of weights in the natural dtype, with keys and values of a usual text
    free: int

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.needs <= self.free

    @property
    def label(self) -> str:
        """The pair's title, with the reason where it cannot be had as it is."""
        if not self.fits:
            return f"{self.pair.title} (needs {size(self.needs)}, {size(self.free)} free)"
        return f"{self.pair.title} (licence to be accepted on the hub)" if self.pair.gated else self.pair.title


def offers(device: str = "auto") -> list[Offer]:
    """All ready pairs, those that fit this machine first. Asks no network and builds no model."""
    where = find_device(device)
    free = free_bytes(where)
    found = [
        Offer(name, pair, sum(_takes(one, where.type == "cpu") for one in (pair.target, pair.drafter)), free)
        for name, pair in PAIRS.items()
    ]
    return sorted(found, key=lambda offer: not offer.fits)  # stable: else in the order of the list


def _takes(name: str, on_host: bool, context: int = 2048) -> int:
    """Bytes, from the catalogue alone: float32 on the host, where tied embeddings are held twice; else bfloat16."""
    if name not in MODELS:
        return 0  # the bundled models: nothing beside what the program itself takes
    known, width = MODELS[name], 4 if on_host else 2
    shape = known.shape
    hidden, layers, heads = (
        next(shape[name] for name in names if name in shape)
        for names in (
            ("hidden_size", "n_embd", "d_model"),
            ("num_hidden_layers", "n_layer", "num_layers"),
            ("num_attention_heads", "n_head", "num_heads"),
        )
    )
    kept = shape.get("num_key_value_heads", heads) * (shape.get("head_dim") or shape.get("d_kv") or hidden // heads)
    if known.encoder:
        kept *= 2  # a decoder's own, and those of what the encoder read
    again = hidden * shape.get("vocab_size", 50257) if on_host and shape.get("tie_word_embeddings", True) else 0
    return width * (known.parameters + again + 2 * layers * kept * context)


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
            "choose two models of one family, or let the drafter's text be re-encoded (universal)"
        )
    for kind in ("bos_token_id", "eos_token_id"):
        if getattr(target, kind) != getattr(drafter, kind):
            raise Refused(
                f"the tokenizers differ in {kind} ({getattr(target, kind)} for the target, {getattr(drafter, kind)} "
                "for the drafter): choose two models of one family, or let the drafter's text be re-encoded (universal)"
            )
    if target.encode(SAMPLE, add_special_tokens=False) != drafter.encode(SAMPLE, add_special_tokens=False):
        raise Refused(
            "the tokenizers cut the same text differently: choose two models of one family, or let the drafter's text "
            "be re-encoded (universal)"
        )
