"""Names, directories and quantisation to models; errors that name the cause.

Safetensors only, and never code that comes with a model.
"""

from __future__ import annotations

import gc
import importlib.util
from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from specdemo.core.errors import Refused
from specdemo.core.step import Draft
from specdemo.models.cached import CachedModel
from specdemo.models.lean import Lean, why_not
from specdemo.models.memory import weight_bytes
from specdemo.models.packed import pack
from specdemo.models.parity import Parity, check

DTYPES = {
    "auto": "float32 on a CPU, bfloat16 on an accelerator",
    "float32": "4 bytes a weight: speculative and plain greedy text agree best",
    "bfloat16": "2 bytes a weight",
    "float16": "2 bytes a weight; slow on most CPUs",
}
QUANTIZATIONS = {
    "none": "weights as they are, in the chosen dtype",
    "int8": "bitsandbytes LLM.int8(): 1 byte a weight",
    "nf4": "bitsandbytes 4-bit NormalFloat with double quantisation: half a byte a weight",
}
BLOCK = 64  # weights that share a scale in 4 bits; an input row must be a whole number of blocks


@dataclass(frozen=True)
class Spec:
    """What to load: a Hugging Face id or local directory, and how."""

    name: str
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, its tokenizer, and what its weights take."""

    spec: Spec
    model: PreTrainedModel | Lean
    tokenizer: PreTrainedTokenizerBase
    weight_bytes: int
    engine: str  # "lean", or "transformers" and why

    @cached_property
    def parity(self) -> Parity:
        """Whether several rows cost and give what one does; asked once, on first use."""
        return check(self.model)

    @property
    def bit_equal(self) -> bool:
        """Whether several rows give what one does."""
        return self.parity.equal

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.config.get_text_config().vocab_size

    @property
    def environment(self) -> dict[str, Any]:
        """What a trace's header says of how the model runs."""
        return {
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "engine": self.engine,
            "parity": asdict(self.parity),
            "target_bytes": self.weight_bytes,
        }

    @property
    def stop(self) -> frozenset[int]:
        """Every id that ends a text: the model's own list and the tokenizer's end of sequence."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        listed = ids if isinstance(ids, list) else [ids]
        return frozenset(i for i in (*listed, self.tokenizer.eos_token_id) if i is not None)


def find_device(name: str) -> torch.device:
    """The device of this name, "auto" being the best there is."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refused(f"unknown device {name!r}: known are auto, cpu, cuda, cuda:N and mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refused(f"there is no device {name} here: choose cpu, or auto for the best there is")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise Refused("there is no device mps here: choose cpu, or auto for the best there is")
    if device.type not in ("cpu", "cuda", "mps"):
        raise Refused(f"unknown device {name!r}: known are auto, cpu, cuda, cuda:N and mps")
    return device


def load(spec: Spec) -> Loaded:
    """Load a model into the fastest engine that can run it, and run it once: no later figure holds a first call.

    Raises `Refused` with the cause where that cannot be.
    """
    model, tokenizer = reference(spec)
    if reason := why_not(model):
        pack(model)
        loaded = Loaded(spec, model, tokenizer, weight_bytes(model), f"transformers: {reason}")
    else:
        lean = Lean(model)
        loaded = Loaded(spec, lean, tokenizer, lean.weight_bytes, "lean")
    CachedModel(loaded.model).score([0], Draft.chain((0,)))
    return loaded


def reference(spec: Spec) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model as `transformers` itself runs it, and its tokenizer: what engines are built from and compared with."""
    device = find_device(spec.device)
    dtype = spec.dtype if spec.dtype != "auto" else _natural_dtype(spec.quantization, device)
    config = _config(spec.name)
    options = _quantization(spec, config, device, dtype)
    logging.disable_progress_bar()  # it would write over the streamed text
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            spec.name,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            device_map={"": device},
            **options,
        )
    except SafetensorError as error:
        raise Refused(f"the weights of {spec.name} are damaged ({error}): fetch them again") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"{spec.name} cannot be loaded: {_first_line(error)}") from error
    return model.eval().requires_grad_(False), tokenizer


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer alone: all that is needed of one that runs elsewhere."""
    _config(name)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise Refused(f"the tokenizer of {name} cannot be loaded: {_first_line(error)}") from error


def _natural_dtype(quantization: str, device: torch.device) -> str:
    if quantization == "int8":
        return "float16"  # LLM.int8() computes its outliers in it whatever it is given
    return "float32" if device.type == "cpu" else "bfloat16"


def _config(name: str) -> PretrainedConfig:
    """The model's configuration, which is small: most of what can be wrong shows here, before any weights."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise Refused(
            f"{name} is a directory but not a model (it has no config.json): give one saved by save_pretrained"
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except HFValidationError:
        raise Refused(f"{name} is neither a directory here nor a Hugging Face id: check the spelling") from None
    except OSError as error:
        raise Refused(
            f"{name} is not a directory here and the hub could not be asked for it: check the spelling and the network "
            f"({_first_line(error)})"
        ) from error
    except ValueError as error:
        raise Refused(
            f"{name} is a kind of model that this transformers does not know: {_first_line(error)}"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise Refused(f"{name} is not a causal language model ({config.model_type}): choose one that continues text")
    return config


def _quantization(spec: Spec, config: PretrainedConfig, device: torch.device, dtype: str) -> dict[str, object]:
    """Loading options for the quantisation, refused here if it cannot work."""
    if spec.quantization == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refused(f"{spec.quantization} needs the package bitsandbytes: install it, or choose quantization none")
    if device.type == "mps":
        raise Refused(f"{spec.quantization} does not run on {device.type}: choose cpu or cuda, or quantization none")
    if spec.quantization == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = skeleton.get_output_embeddings()
    for name, module in skeleton.named_modules():
        if isinstance(module, nn.Linear) and module is not head and module.in_features % BLOCK:
            raise Refused(
                f"{spec.name} cannot be 4-bit: {name} has {module.in_features} inputs, not a multiple of {BLOCK}; "
                "choose int8 or none"
            )
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
    }


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Shelf:
    """Loaded models, the latest few kept. Used by one thread only, the one that owns the device."""

    def __init__(self, room: int = 2) -> None:
        self._room = room
        self._models: OrderedDict[Spec, Loaded] = OrderedDict()

    def __contains__(self, spec: Spec) -> bool:
        return spec in self._models

    def take(self, spec: Spec) -> Loaded:
        """The model, loaded if it is not there; the one longest unused makes room first."""
        if spec not in self._models:
            while len(self._models) >= self._room:
                self._models.popitem(last=False)
                gc.collect()  # a model and its idle engine hold one another
            self._models[spec] = load(spec)
        self._models.move_to_end(spec)
        return self._models[spec]

    def clear(self) -> None:
        """Unload everything."""
        self._models.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
