"""Digests of a model and of its numerics, for comparison between processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdemo import __version__
from specdemo.models.engines.select import engine_of
from specdemo.models.hub import Hub
from specdemo.models.load import LoadedModel
from specdemo.models.spec import is_gguf
from specdemo.models.untrusted import read_settings, weight_files
from specdemo.native.build import cache_folder

_MOST_DIGESTS = 256
_UNUSED_SETTINGS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


@dataclass(frozen=True)
class ModelIdentity:
    """Digests of a loaded model: equal `model`, equal distributions; with equal `numerics`, equal bits."""

    model: str
    numerics: str


def identify(target: LoadedModel, tokenizer: str, hub: Hub) -> ModelIdentity:
    """Hash a model and its engine; `tokenizer` is a fingerprint."""
    spec, model = target.spec.resolved(), target.model
    parts = {
        "files": list(_file_digests(spec.name, spec.revision, replace(hub, offline=True))),
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


def _file_digests(name: str, revision: str | None, hub: Hub) -> Iterator[str]:
    weights = hub.weights(name, revision)
    if is_gguf(name):
        yield file_digest(weights)
        return
    settings = read_settings(name, hub.settings(name, revision) / "config.json")
    yield _digest({key: value for key, value in settings.items() if key not in _UNUSED_SETTINGS})
    yield from map(file_digest, weight_files(weights))


def file_digest(path: Path) -> str:
    """Return the SHA-256: the name in the cache of the hub, or stored by path, size and time."""
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", path.name):
        return path.name
    status, store = path.stat(), cache_folder() / "digests.json"
    key = [status.st_size, status.st_mtime_ns]
    stored = _read(store)
    if (entry := stored.get(str(path))) and entry[:-1] == key:
        return str(entry[-1])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _write(store, {**stored, str(path): [*key, digest]})
    return digest


def _read(store: Path) -> dict[str, list[Any]]:
    try:
        stored = json.loads(store.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    valid = isinstance(stored, dict) and all(isinstance(entry, list) and entry for entry in stored.values())
    return stored if valid else {}


def _write(store: Path, digests: dict[str, list[Any]]) -> None:
    with suppress(OSError):
        store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store.parent) as folder:
            with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as file:
                json.dump(dict([*digests.items()][-_MOST_DIGESTS:]), file)
            os.replace(file.name, store)
