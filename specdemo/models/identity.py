"""Digests of a model and of its numerics, for comparison between processes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from specdemo import __version__
from specdemo.models.engines.select import engine_of
from specdemo.models.hub import Hub
from specdemo.models.load import LoadedModel
from specdemo.models.spec import is_gguf
from specdemo.models.untrusted import weight_files


@dataclass(frozen=True)
class ModelIdentity:
    """Digests of a loaded model: equal `model`, equal distributions; with equal `numerics`, equal bits."""

    model: str
    numerics: str


def identify(target: LoadedModel, tokenizer: str, hub: Hub) -> ModelIdentity:
    """Hash a model and its engine; `tokenizer` is a fingerprint."""
    spec, model = target.spec.resolved(), target.model
    parts = {
        "files": [*file_digests(spec.name, spec.revision, hub).values()],
        "form": (spec.dtype, spec.quantization, spec.activations),
        "keys and values": str(getattr(model, "kv_dtype", model.dtype)),
        "text": (tokenizer, sorted(target.stop), target.context, target.vocab_size),
    }
    engine = engine_of(model)
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    numerics = (target.engine, __version__, engine.vectors, gpu, "" if engine.batch_invariant else torch.__version__)
    return ModelIdentity(_digest(parts), _digest(numerics))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def file_digests(name: str, revision: str | None, hub: Hub) -> dict[str, str]:
    """Return the SHA-256 of the configuration and weights of a downloaded model or head, by file name."""
    weights = replace(hub, offline=True).weights(name, revision)
    files = [weights] if is_gguf(name) else [weights / "config.json", *weight_files(weights)]
    return {path.name: file_digest(path) for path in files}


def file_digest(path: Path) -> str:
    """Return the SHA-256, which is the name of a file in the cache of the hub."""
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", path.name):
        return path.name
    status = path.stat()
    return _computed_digest(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _computed_digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
