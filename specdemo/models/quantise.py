"""Quantisation: what is possible here, and the options with which `transformers` does it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdemo.core.errors import Refused
from specdemo.models.encdec import auto_class
from specdemo.models.spec import QUANTIZATIONS, Spec, main_device

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


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model without weights."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False)


def quantised_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers that bitsandbytes takes, by name: all linear ones but the head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def check(spec: Spec, config: PretrainedConfig) -> None:
    """Refuse a quantisation that cannot work, before any weights are read."""
    asked = QUANTIZATIONS[spec.quantization]
    if asked.bits is None:
        return
    if method := stored_quantised(config):
        raise Refused(f"{spec.name} is quantised already ({method}): choose quantization none to load it as it is")
    if reason := unavailable(spec.quantization, main_device(spec)):
        raise Refused(reason)
    if asked.bits == 4:
        for name, module in quantised_layers(skeleton(config)).items():
            inputs = module.nx if isinstance(module, Conv1D) else module.in_features
            if inputs % BLOCK:
                raise Refused(
                    f"{spec.name} cannot be 4-bit: {name} has {inputs} inputs, not a multiple of {BLOCK}; "
                    "choose int8 or none"
                )


def options(spec: Spec) -> dict[str, Any]:
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
