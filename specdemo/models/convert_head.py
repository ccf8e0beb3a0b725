"""Conversion of pickled heads to safetensors, in a process with limits."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

from specdemo.core.errors import UserError, write_error
from specdemo.models.limited_process import LimitedProcess, serve

_CPU_SECONDS, _SECONDS = 300, 600
_MAX_BYTES = 32 << 30


def convert_head(source: Path, folder: Path) -> int:
    """Write the tensors of `source` to `folder`, with the config.json next to it; return their number.

    Raises `UserError` for files with other content than tensors.
    """
    if not source.is_file():
        raise UserError(f"there is no file {source}: give a file like pytorch_model.bin or medusa_lm_head.pt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        request = [os.fspath(source.resolve()), os.fspath(folder.resolve() / "model.safetensors")]
        with closing(LimitedProcess(__name__)) as process:
            count: int = process.request(request, _SECONDS, f"the conversion of {source}", "choose another file")
        config = source.with_name("config.json")
        if config.is_file() and not (folder / config.name).exists():
            shutil.copyfile(config, folder / config.name)
    except OSError as error:
        raise write_error(f"the head to {folder}", error) from None
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json: copy that of the head")
    return count


def _convert(request: list[str]) -> int:
    import torch
    from safetensors.torch import save_file

    source, to = request
    stored = torch.load(source, "cpu", weights_only=True)
    if not isinstance(stored, dict) or not stored:
        raise ValueError("it contains no tensors by name")
    others = [key for key, value in stored.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    if others:
        raise ValueError(f"{others[0]!r} is not a tensor")
    part = f"{to}.{os.getpid()}.part"
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, part, {"format": "pt"})
    os.replace(part, to)
    return len(stored)


if __name__ == "__main__":
    import torch  # noqa: F401  # before the forks

    serve(_convert, _CPU_SECONDS, _MAX_BYTES)
