"""Models on this machine: the cache of the hub, and the default directories of other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from specdemo.models.spec import is_gguf
from specdemo.models.zoo import REVISIONS

_CONFIGURATIONS = {"config.json", "adapter_config.json"}
_CACHES = ("~/.cache", "~/Library/Caches", "~/AppData/Local")
_JAN_FOLDERS = ("~/.config", "~/.local/share", "~/Library/Application Support", "~/AppData/Roaming")


def model_directories() -> Iterator[tuple[str, Path]]:
    """Yield the name of a program and a default directory of its models, existing or not."""
    folders = {
        "Hugging Face": [constants.HF_HUB_CACHE],
        "LM Studio": ["~/.lmstudio/models", "~/.cache/lm-studio/models"],
        "llama.cpp": [os.environ.get("LLAMA_CACHE") or f"{folder}/llama.cpp" for folder in _CACHES],
        "Jan": [*(f"{folder}/Jan/data" for folder in _JAN_FOLDERS), "~/jan/models"],
    }
    for program, names in folders.items():
        yield from ((program, Path(name).expanduser()) for name in dict.fromkeys(names))


def find_models(folder: str | Path) -> list[str]:
    """Return the GGUF files and directories of models below a directory, by hub id in the cache of the hub."""
    models = []
    for parent, folders, files in os.walk(Path(folder).expanduser()):
        folders.sort()
        ggufs = [Path(parent, file) for file in sorted(files) if is_gguf(file)]
        has_weights = any(file.endswith(".safetensors") for file in files)
        if _CONFIGURATIONS & {*files} and (has_weights or not ggufs):
            models.append(Path(parent))
        models += ggufs
    return [_name(model) for model in models]


def _name(path: Path) -> str:
    """Return the hub id of a model in the cache, if it selects this revision, and the path of others."""
    cache = Path(constants.HF_HUB_CACHE)
    parts = path.relative_to(cache).parts if path.is_relative_to(cache) else ()
    if len(parts) < 3 or not parts[0].startswith("models--"):
        return str(path)
    repository, file = "/".join(parts[0].split("--")[1:]), "/".join(parts[3:])  # models--OWNER--NAME/snapshots/REVISION
    selected = try_to_load_from_cache(repository, file or "config.json", revision=REVISIONS.get(repository))
    return f"{repository}/{file}".rstrip("/") if isinstance(selected, str) else str(path)
