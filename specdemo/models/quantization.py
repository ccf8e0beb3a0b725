"""Quantization with bitsandbytes: availability, affected layers, loading options."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from specdemo.core.errors import UserError
from specdemo.models.engines.generic import auto_class
from specdemo.models.llama_checkpoint import LlamaConfig, LlamaForCausalLM
from specdemo.models.spec import QUANTIZATIONS, ModelSpec, main_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BLOCK_SIZE = 64  # weights per scale in 4-bit formats


def unavailable(quantization: str, device: torch.device) -> str | None:
    if QUANTIZATIONS[quantization].bits is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"{quantization} needs bitsandbytes: run pip install bitsandbytes, or choose quantization none"
    if device.type == "mps":
        return f"{quantization} does not run on {device.type}: choose cpu or cuda, or quantization none"
    return None


def stored_bits(config: PretrainedConfig) -> int | None:
    """Return the bits of the quantised weights of a checkpoint, None for others."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    values = stored if isinstance(stored, dict) else stored.to_dict()
    return 4 if values.get("load_in_4bit") or values.get("bits") == 4 else 8


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device."""
    with torch.device("meta"):
        model = (
            LlamaForCausalLM(config)
            if isinstance(config, LlamaConfig)
            else auto_class(config).from_config(config, trust_remote_code=False)
        )
    # The class of T5 declares a tied head; checkpoints of T5 1.1 have two tensors and do not scale outputs.
    if not getattr(config, "scale_decoder_outputs", True) and (head := model.get_output_embeddings()) is not None:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


def quantised_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not kept_wide(model, name)
    }


def kept_wide(model: PreTrainedModel, name: str) -> bool:
    """True if the architecture excludes this layer from quantization and float16 (T5 excludes `wo`)."""
    return not {*name.split(".")}.isdisjoint(model._keep_in_fp32_modules or ())


def check_quantization(spec: ModelSpec, config: PretrainedConfig) -> None:
    """Raise `UserError` for an impossible quantization, before weights are read."""
    quantization = QUANTIZATIONS[spec.quantization]
    if quantization.bits is None:
        return
    if stored_bits(config):
        raise UserError(f"{spec.name} is quantised already: choose quantization none, without drafter same")
    if reason := unavailable(spec.quantization, main_device(spec)):
        raise UserError(reason)
    if quantization.bits == 4:
        for name, module in quantised_layers(skeleton(config)).items():
            inputs = module.nx if isinstance(module, Conv1D) else module.in_features
            if inputs % BLOCK_SIZE:
                raise UserError(
                    f"{spec.name} cannot be 4-bit: {name} has {inputs} inputs, not a multiple of {BLOCK_SIZE}; "
                    "choose int8 or none"
                )


def load_options(spec: ModelSpec) -> dict[str, Any]:
    quantization = QUANTIZATIONS[spec.quantization]
    if quantization.bits is None:
        return {}
    if quantization.bits == 8:
        # Outlier columns are selected over all rows, including drafts.
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,  # scales are quantised too (2305.14314)
            bnb_4bit_compute_dtype=getattr(torch, spec.dtype),
        )
    }
