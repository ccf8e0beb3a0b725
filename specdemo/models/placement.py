"""Where the weights of a model go: one device, or as many as it takes, placed by `accelerate`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import infer_auto_device_map
from transformers import PretrainedConfig

from specdemo.core.errors import UserError
from specdemo.models.memory import free_bytes
from specdemo.models.quantization import skeleton
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, find_device

KEPT_FREE = 0.1  # share of each device that is left for keys, values and activations

Places = dict[str, str | int]  # device by module


def place(spec: ModelSpec, config: PretrainedConfig) -> dict[str, Any]:
    """The loading option that says where weights go. Raises `UserError` where the whole machine has no room."""
    if spec.device != SPREAD:
        return {"device_map": {"": find_device(spec.device)}}
    return {"device_map": spread(spec, config, room_by_device())}


def room_by_device() -> dict[str | int, int]:
    """Bytes that weights may take on each device, the host last."""
    devices: dict[str | int, int] = {
        i: int(free_bytes(torch.device("cuda", i)) * (1 - KEPT_FREE)) for i in range(torch.cuda.device_count())
    }
    return {**devices, "cpu": int(free_bytes(torch.device("cpu")) * (1 - KEPT_FREE))}


def spread(spec: ModelSpec, config: PretrainedConfig, room: dict[str | int, int]) -> Places:
    """Layers in order onto the devices in order, none cut in two; `spec` is resolved."""
    model = skeleton(config).to(getattr(torch, spec.dtype))
    model.tie_weights()
    bits = QUANTIZATIONS[spec.quantization].bits
    kept = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    width = {f"{name}.weight": torch.int8 for name in kept} if bits else None  # accelerate knows no half bytes
    places = infer_auto_device_map(
        model, max_memory=room, no_split_module_classes=list(model._no_split_modules or ()), special_dtypes=width
    )
    if "disk" in places.values():
        raise UserError(
            f"{spec.name} does not fit all devices together: choose a smaller model, or quantise it to 4 bits"
        )
    return places
