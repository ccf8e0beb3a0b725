"""Quantisation: what is possible here, and the options with which `transformers` does it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdemo.core.errors import UserError
from specdemo.models.engines.encoder_decoder import auto_class
from specdemo.models.spec import QUANTIZATIONS, ModelSpec, main_device

BLOCK = 64  # weights that share a scale in 4 bits; an input row must be a whole number of blocks


def unavailable(quantization: str, device: torch.device) -> str | None:
    """Why this quantisation cannot be had on this device; None if it can."""
    if QUANTIZATIONS[quantization].bits is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"{quantization} needs the package bitsandbytes: install it, or choose quantization none"
    if device.type == "mps":
        return f"{quantization} does not run on {device.type}: choose cpu or cuda, or quantization none"
    return None


def stored_quantised(config: PretrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised already; None if it is not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    return str(own.get("quant_method", "unknown") if isinstance(own, dict) else own.quant_method)


def skeleton(config: PretrainedConfig, apart: bool = False) -> PreTrainedModel:
    """The model without weights. `apart`: its head is no copy of its embeddings, whatever its class makes of that."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    if apart and (head := model.get_output_embeddings()) is not None:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


def quantised_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers that bitsandbytes takes, by name: all linear ones but the head and those that are `kept_wide`."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not kept_wide(model, name)
    }


def kept_wide(model: PreTrainedModel, name: str) -> bool:
    """Whether the architecture asks that this layer be neither quantised nor in float16, as T5 does of one."""
    return not {*name.split(".")}.isdisjoint(model._keep_in_fp32_modules or ())


def check_quantization(spec: ModelSpec, config: PretrainedConfig) -> None:
    """Refuse a quantisation that cannot work, before any weights are read."""
    asked = QUANTIZATIONS[spec.quantization]
    if asked.bits is None:
        return
    if method := stored_quantised(config):
        raise UserError(f"{spec.name} is quantised already ({method}): choose quantization none to load it as it is")
    if reason := unavailable(spec.quantization, main_device(spec)):
        raise UserError(reason)
    if asked.bits == 4:
        for name, module in quantised_layers(skeleton(config)).items():
            inputs = module.nx if isinstance(module, Conv1D) else module.in_features
            if inputs % BLOCK:
                raise UserError(
                    f"{spec.name} cannot be 4-bit: {name} has {inputs} inputs, not a multiple of {BLOCK}; "
                    "choose int8 or none"
                )


def load_options(spec: ModelSpec) -> dict[str, Any]:
    """Loading options for a resolved spec."""
    asked = QUANTIZATIONS[spec.quantization]
    if asked.bits is None:
        return {}
    if asked.bits == 8:
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=asked.kind,
            bnb_4bit_use_double_quant=asked.double,
            bnb_4bit_compute_dtype=getattr(torch, spec.dtype),
        )
    }
