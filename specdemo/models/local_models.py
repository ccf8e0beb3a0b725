"""Models on this machine: the cache of the hub, and the default directories of other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from specdemo.models.spec import is_gguf

_CONFIGURATIONS = {"config.json", "adapter_config.json"}
_LLAMA_CACHES = ("~/.cache/llama.cpp", "~/Library/Caches/llama.cpp", "~/AppData/Local/llama.cpp")
_JAN_FOLDERS = ("~/.config", "~/.local/share", "~/Library/Application Support", "~/AppData/Roaming")


def model_directories() -> Iterator[tuple[str, Path]]:
    """Yield the name of a program and a default directory of its models, existing or not."""
    own_cache = os.environ.get("LLAMA_CACHE")
    folders = {
        "Hugging Face": [constants.HF_HUB_CACHE],
        "LM Studio": ["~/.lmstudio/models", "~/.cache/lm-studio/models"],
        "llama.cpp": [own_cache] if own_cache else _LLAMA_CACHES,
        "Jan": [*(f"{folder}/Jan/data" for folder in _JAN_FOLDERS), "~/jan/models"],
    }
    for program, names in folders.items():
        yield from ((program, Path(name).expanduser()) for name in names)


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
    """Return the hub id of a model in the cache, and the path of others."""
    if not path.is_relative_to(constants.HF_HUB_CACHE):
        return str(path)
    repository, _, _, *file = path.relative_to(constants.HF_HUB_CACHE).parts  # REPOSITORY/snapshots/REVISION/FILE
    return "/".join([*repository.split("--")[1:], *file])
