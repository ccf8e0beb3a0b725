"""Models with extreme or contradictory numbers, and a program that loads each of them and prints the outcome."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fakes.forked_process import ForkedProcess
from fakes.gguf_models import described, tiny_for_gguf, write_gguf
from fakes.tiny_models import CONTEXT, LLAMA, SIZES, byte_level_tokenizer
from specdemo.models.llama_checkpoint import LlamaConfig, LlamaForCausalLM

SECONDS = 20  # of CPU time for one case
INFINITE = float("inf")
NAN = float("nan")
VALUES = (0, -1, 1, 3, 1 << 31, NAN, INFINITE)
LARGEST = {  # permitted, with heads of 1,024 values; the weights of such a model do not exist
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 1000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 65_536),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads"), 64),
    **dict.fromkeys(("head_dim", "d_kv"), 1024),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff"), 1 << 20),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "relative_attention_num_buckets"), 1 << 24),
    "vocab_size": 4_000_000,
}
_MOST_WEIGHTS = 40_000_000

Settings = dict[str, Any]
_SCALED = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_SCALED, "rope_type": "yarn", "attention_factor": 1.1, "beta_fast": 32.0, "beta_slow": 1.0}
_COMMON: Settings = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "dtype": "float32"}
_COMMON |= {"initializer_range": 0.2, "attention_dropout": 0.0}
_DECODER: Settings = {**LLAMA, **_COMMON, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_WINDOW: Settings = {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}
_GEMMA2: Settings = {"query_pre_attn_scalar": 8, "sliding_window": 8, "final_logit_softcapping": 30.0}
_PHI: Settings = {**SIZES, **_COMMON, "intermediate_size": 64, "num_key_value_heads": 2, "layer_norm_eps": 1e-5}
_GPT2: Settings = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64}
_T5: Settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}


def _rotary(rope_type: str, **more: Any) -> Settings:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **more}}


# Settings as in config.json, with all numbers that the loaders read.
NATIVE: dict[str, Settings] = {
    "llama": {  # read without transformers
        **_DECODER,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        **_rotary("default"),
        "attention_bias": False,
        "mlp_bias": False,
    },
    "llama, linear": {**_DECODER, "model_type": "llama", "rope_parameters": {**_SCALED, "rope_type": "linear"}},
    "llama, llama3": {**_DECODER, "model_type": "llama", "rope_parameters": _LLAMA3},
    "llama, yarn": {**_DECODER, "model_type": "llama", "rope_parameters": _YARN},
    "llama, old names": {
        **_DECODER,
        "model_type": "llama",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "mistral": {**_DECODER, "model_type": "mistral", **_rotary("default"), "sliding_window": 8},
    "qwen2": {**_DECODER, "model_type": "qwen2", **_rotary("default"), **_WINDOW},
    "qwen3": {**_DECODER, "model_type": "qwen3", **_rotary("default"), **_WINDOW},
    "gemma2": {**_DECODER, "model_type": "gemma2", **_rotary("default"), **_GEMMA2, "attn_logit_softcapping": 50.0},
    "gpt2": {**_COMMON, **_GPT2, "model_type": "gpt2", "layer_norm_epsilon": 1e-5},
    "gpt-neox": {
        **SIZES,
        **_COMMON,
        "model_type": "gpt_neox",
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000,
        "layer_norm_eps": 1e-5,
    },
}
OTHERS: dict[str, Settings] = {
    "phi": {
        **_PHI,
        "model_type": "phi",
        "max_position_embeddings": CONTEXT,
        **_rotary("default", partial_rotary_factor=0.5),
    },
    "gptj": {**_COMMON, **_GPT2, "model_type": "gptj", "rotary_dim": 4, "layer_norm_epsilon": 1e-5},
    "t5": {**_COMMON, **_T5, "model_type": "t5", "is_encoder_decoder": True, "decoder_start_token_id": 0},
}
FAMILIES = NATIVE | OTHERS
_SCALINGS = ("llama, llama3", "llama, yarn", "llama, old names")  # others: "linear"
_ROTATION = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
GGUF = ("llama", "qwen3")
_IDS = ("bos", "eos", "unknown", "padding")
_GGUF_FLOATS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "logit_scale")
GGUF_NUMBERS = {
    **dict.fromkeys(("embedding_length", "block_count", "feed_forward_length", "context_length"), "{arch}."),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "attention.key_length"), "{arch}."),
    **dict.fromkeys(("attention.value_length", "rope.dimension_count"), "{arch}."),
    **dict.fromkeys((*_GGUF_FLOATS, "expert_count", "attention.sliding_window"), "{arch}."),
    **dict.fromkeys((f"{name}_token_id" for name in _IDS), "tokenizer.ggml."),
    "alignment": "general.",
    "count": "split.",
}


@dataclass(frozen=True)
class Case:
    """A model of a family with other numbers. `matching`: with weights of these sizes, where such a model exists."""

    family: str
    changes: tuple[tuple[str, Any], ...]
    matching: bool = False
    gguf: bool = False

    @property
    def name(self) -> str:
        changed = ", ".join(f"{key} {value:,}" for key, value in self.changes)
        return f"{self.family}{' (GGUF)' if self.gguf else ''}: {changed}{', with weights' if self.matching else ''}"


def number_keys(settings: Settings, prefix: str = "") -> Iterator[str]:
    """Yield the names of all numbers; of inner objects with a dot."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from number_keys(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}"


def all_cases() -> Iterator[Case]:
    for family, settings in FAMILIES.items():
        for key in number_keys(settings):
            if family in _SCALINGS and key in _DECODER and key not in _ROTATION:
                continue
            for value in VALUES:
                yield Case(family, ((key, value),))
                if value in (1, 3) and key in LARGEST:
                    yield Case(family, ((key, value),), matching=True)
        large = [(key, LARGEST[key]) for key in number_keys(settings) if key in LARGEST]
        yield from (Case(family, (change,)) for change in large)
        yield Case(family, tuple(large))
    for family in GGUF:
        for name, prefix in GGUF_NUMBERS.items():
            for value in VALUES if name in _GGUF_FLOATS else VALUES[:5]:
                yield Case(family, ((prefix + name, value),), gguf=True)


def run_cases(cases: Iterable[Case], folder: Path, native: bool) -> dict[str, dict[str, Any]]:
    """Load the models of `cases` in other processes; return `refused`, `logits`, `error` or `crashed` by name."""
    waiting, outcomes = list(cases), {}
    while waiting:
        process = ForkedProcess(_print_outcomes, waiting, folder, SPECDEMO_NATIVE=str(int(native)))
        output, errors = process.communicate()
        results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        outcomes |= {case.name: result for case, result in zip(waiting, results, strict=False)}
        if len(results) < len(waiting):
            outcomes[waiting[len(results)].name] = {"crashed": f"exit code {process.wait()}: {errors[-2000:]}"}
        waiting = waiting[len(results) + 1 :]
    return outcomes


@cache
def _tokenizer() -> Any:
    return byte_level_tokenizer()


def _changed(settings: Settings, changes: Iterable[tuple[str, Any]]) -> Settings:
    copied = json.loads(json.dumps(settings))
    for key, value in changes:
        *parents, name = key.split(".")
        inner = copied
        for parent in parents:
            inner = inner[parent]
        inner[name] = float(value) if isinstance(inner.get(name), float) else value
    return copied


def _save_weights(settings: Settings, folder: Path) -> None:
    """Save random weights. Raises any exception of `transformers` if no such model exists."""
    kind = AutoModelForSeq2SeqLM if settings.get("is_encoder_decoder") else AutoModelForCausalLM
    with torch.device("meta"):
        if "architectures" in settings:
            model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
        else:
            model = kind.from_config(AutoConfig.for_model(**json.loads(json.dumps(settings))))
    if sum(weight.numel() for weight in model.parameters()) > _MOST_WEIGHTS:
        raise ValueError("the model is too large")
    source = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(weight.shape, generator=source)
        * (0.1 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5)
        for name, weight in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@cache
def _usual(family: str, root: Path) -> Path:
    folder = root / f"usual {family}"
    if not folder.exists():
        folder.mkdir(parents=True)
        _tokenizer().save_pretrained(folder)
        _save_weights(FAMILIES[family], folder)
    return folder


def save_case(case: Case, folder: Path, root: Path) -> Path:
    """Write the files of a model into `folder`, with weights of the usual model in `root` unless others match."""
    folder.mkdir(parents=True, exist_ok=True)
    if case.gguf:
        return _save_gguf(case, folder / "model.gguf")
    settings = _changed(FAMILIES[case.family], case.changes)
    for path in _usual(case.family, root).iterdir():
        (folder / path.name).unlink(missing_ok=True)
        if path.suffix != ".safetensors" or not case.matching:
            os.link(path, folder / path.name)
    if case.matching:
        try:
            _save_weights(settings, folder)
        except Exception:  # no such model: keep the usual weights
            os.link(_usual(case.family, root) / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def _save_gguf(case: Case, path: Path) -> Path:
    changes = dict(case.changes)
    model = tiny_for_gguf(case.family, _tokenizer(), **(changes if case.matching else {}))
    scaling = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0}
    metadata = described(model.config) if case.matching else {**scaling, **changes}
    floats = {key: float(value) for key, value in metadata.items() if key.partition(".")[2] in _GGUF_FLOATS}
    write_gguf(path, model, _tokenizer(), metadata=metadata | floats)
    return path


def _outcome(path: Path) -> dict[str, Any]:
    from specdemo.core.errors import UserError
    from specdemo.models.kv_cache import CachedModel
    from specdemo.models.load import load
    from specdemo.models.memory_plan import check_memory, plan_spec
    from specdemo.models.spec import ModelSpec

    spec = ModelSpec(str(path), "float32", device="cpu").resolved()
    try:
        check_memory([plan_spec(spec, CONTEXT)])
        loaded = load(spec)
        if loaded.encoder:
            return {"logits": [], "engine": loaded.engine}
        ids = [i % loaded.vocab_size for i in (1, 2, 3)]
        return {"logits": CachedModel(loaded.model).read(ids).flatten().tolist(), "engine": loaded.engine}
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _print_outcomes(cases: Sequence[Case], root: Path) -> None:
    for i, case in enumerate(cases):
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, resource.RLIM_INFINITY))
        faulthandler.dump_traceback_later(10 * SECONDS, exit=True)  # ends a case that waits
        path = save_case(case, root / str(i % 2), root)  # headers are cached by path and time
        outcome = _outcome(path)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(outcome), flush=True)
