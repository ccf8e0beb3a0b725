"""Model files from a local directory or the Hugging Face hub, and models that are on this machine.

A cached pinned revision needs no network. Only safetensors weights are requested, never code. Error messages contain no
text of servers or libraries.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import get_session, httpx  # type: ignore[attr-defined]  # exported to callers
from huggingface_hub.utils.tqdm import tqdm
from safetensors import safe_open

from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.core.formats import format_bytes
from specdemo.models.memory import memory_limit
from specdemo.models.spec import is_gguf
from specdemo.models.untrusted import (
    SETTINGS_FILES,
    check_config,
    check_files,
    check_sizes,
    check_special_tokens,
    check_weights,
    model_errors,
    read_settings,
    weight_files,
)
from specdemo.models.zoo import REVISIONS

WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")
_CACHES = ("~/.cache", "~/Library/Caches", "~/AppData/Local")
_JAN_FOLDERS = ("~/.config", "~/.local/share", "~/Library/Application Support", "~/AppData/Roaming")


@dataclass(frozen=True)
class Hub:
    """Hub and cache directory; the defaults come from `HF_ENDPOINT`, `HF_HUB_CACHE` and `HF_TOKEN`.

    `offline`: use the cache only. `trusted`: models that may use the token and the cache filled with it; None: all.
    """

    endpoint: str | None = None
    cache: Path | None = None
    token: str | None = None
    offline: bool = False
    trusted: frozenset[str] | None = None

    def _access(self, name: str) -> tuple[str | bool | None, Path | None]:
        if self.trusted is None or name in self.trusted:
            return self.token, self.cache
        return False, Path(self.cache or constants.HF_HUB_CACHE) / "visitors"

    def settings(self, name: str, revision: str | None = None, report: ReportProgress = ignore_progress) -> Path:
        """Return a directory with configuration and tokenizer; GGUF files have none."""
        folder = local_folder(name) or self._fetch(name, revision, SETTINGS_FILES, report)
        check_files(name, folder)
        check_config(name, read_settings(name, folder / "config.json"))
        if (path := folder / "generation_config.json").exists():
            check_special_tokens(f"generation_config.json of {name}", read_settings(name, path))
        return folder

    def weights(
        self,
        name: str,
        revision: str | None = None,
        report: ReportProgress = ignore_progress,
        remedy: str = "choose another model",
    ) -> Path:
        if is_gguf(name):
            return self._gguf(name, revision, report)
        folder = local_folder(name) or self._fetch(name, revision, WEIGHT_FILES, report)
        if not weight_files(folder):
            raise UserError(
                f"{name} has no safetensors weights (model.safetensors or shards of it), and other formats may contain "
                f"code: {remedy}"
            )
        check_files(name, folder)
        check_weights(name, folder)
        return folder

    def _gguf(self, name: str, revision: str | None, report: ReportProgress) -> Path:
        path = Path(name).expanduser()
        if path.is_file():
            return path.resolve()
        *repository, file = name.split("/", 2)
        if path.exists() or len(repository) < 2 or not all(repository) or ".." in file.split("/"):
            raise UserError(f"{name} is not a file: give a GGUF file, or owner/name/file.gguf of the hub")
        folder = self._fetch("/".join(repository), revision, (glob.escape(file),), report)
        if not (folder / file).is_file():
            raise UserError(f"there is no file {file} in {'/'.join(repository)}: check the spelling")
        return (folder / file).resolve()

    def _fetch(self, name: str, revision: str | None, patterns: tuple[str, ...], report: ReportProgress) -> Path:
        token, cache = self._access(name)
        options: dict[str, Any] = {
            "revision": revision,
            "allow_patterns": list(patterns),
            "endpoint": self.endpoint,
            "cache_dir": cache,
            "token": token,
        }
        missing = 0
        try:
            cached = try_to_load_from_cache(name, "config.json", cache, revision)
            if self.offline or (not isinstance(cached, str) and not self._reachable()):
                return Path(snapshot_download(name, **options, local_files_only=True))
            silent = _progress_bars(ignore_progress, name, 0)
            with suppress(errors.DryRunError):  # the hub does not answer: the next call uses the cache or raises
                files = snapshot_download(name, **options, dry_run=True, tqdm_class=silent)
                missing = sum(file.file_size or 0 for file in files if file.will_download)
                if patterns is SETTINGS_FILES:
                    check_sizes(name, {file.filename: file.file_size or 0 for file in files})
            if missing:
                _check_space(name, missing, Path(cache or constants.HF_HUB_CACHE), in_memory=is_gguf(patterns[0]))
                report(Loading(f"downloading {name}, {format_bytes(missing)}", 0, missing))
            bars = _progress_bars(report, name, missing)
            folder = Path(snapshot_download(name, **options, tqdm_class=bars, max_workers=4))
            if missing:
                self._verify(name, folder, report)
            return folder
        except (OSError, httpx.HTTPError, errors.HFValidationError) as error:
            raise UserError(_explain(name, error)) from None

    def _reachable(self) -> bool:
        """Try a connection once; `huggingface_hub` would repeat it for 47 s."""
        try:
            get_session().head(self.endpoint or constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (httpx.ConnectError, httpx.TimeoutException, errors.OfflineModeIsEnabled):
            return False
        return True

    def _verify(self, name: str, folder: Path, report: ReportProgress) -> None:
        report(Loading(f"checking {name}"))
        token, cache = self._access(name)
        result = HfApi(endpoint=self.endpoint, token=token).verify_repo_checksums(
            name, revision=folder.name, cache_dir=cache
        )
        damaged = [mismatch["path"] for mismatch in result.mismatches]
        for path in damaged:
            file = folder / path
            file.resolve().unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        if damaged:
            raise UserError(
                f"{', '.join(damaged)} of {name} arrived damaged and was deleted: run it again to download it"
            )


def local_folder(name: str) -> Path | None:
    """Return the directory if it exists. Raise `UserError` without a model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if not (folder / "config.json").exists():
        check_files(name, folder)  # names an adapter
        raise UserError(f"{name} is a directory without config.json: give a directory written by save_pretrained")
    return folder


def local_shapes(name: str, folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the number format and shape of each tensor of a directory."""
    shapes = {}
    for path in weight_files(folder):
        with model_errors(name), safe_open(path, "pt") as file:
            for key in file.keys():
                tensor = file.get_slice(key)
                shapes[key] = (tensor.get_dtype(), tuple(tensor.get_shape()))
    return shapes


def _check_space(name: str, missing: int, cache: Path, in_memory: bool) -> None:
    """Raise `UserError` if a download exceeds the disk, or the memory for its unconverted weights."""
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < missing:
        raise UserError(
            f"{name} needs {format_bytes(missing)} on disk and {format_bytes(free)} are free under {os.fspath(cache)}: "
            "free some space, or set HF_HOME to a larger disk"
        )
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    total = sum(memory_limit(device)[1] for device in devices)
    if in_memory and missing > total:
        raise UserError(
            f"{name} has {format_bytes(missing)}, and this machine has {format_bytes(total)} of memory: choose a "
            "smaller model"
        )


def _progress_bars(report: ReportProgress, name: str, total: int) -> type[tqdm]:
    """Return a silent progress bar class; `huggingface_hub` creates instances for bytes and files."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            tqdm.__init__(self, *args, **{**options, "disable": True})
            self._bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._bytes and total:
                done = min(int(self.n), total)
                text = f"downloading {name}, {format_bytes(done)} of {format_bytes(total)}"
                report(Loading(text, done, total))

    return Bar


def _explain(name: str, error: Exception) -> str:
    is_unreachable = isinstance(error, errors.LocalEntryNotFoundError)
    cause = error.__cause__ if is_unreachable else error
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.HFValidationError):
        return f"{name} is neither a local directory nor a Hugging Face id: check the spelling"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{name} has no such revision on the hub: choose another revision"
    if isinstance(cause, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"there is no model {name} on the hub, or this machine has no access: check the spelling, accept its "
            f"licence on huggingface.co/{name}, and sign in with `hf auth login`"
        )
    if is_unreachable and not status:
        return (
            f"{name} is not on this machine and the hub cannot be reached: check the spelling, the network and "
            "HF_HUB_OFFLINE, or give a local directory"
        )
    reason = f"error {status}" if status else os.strerror(getattr(error, "errno", None) or errno.ECONNABORTED)
    return f"the download of {name} failed ({reason}): run it again to resume it; HF_HOME selects another disk"


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
        if {"config.json", "adapter_config.json"} & {*files} and (has_weights or not ggufs):
            models.append(Path(parent))
        models += ggufs
    return [_hub_id(model) for model in models]


def _hub_id(path: Path) -> str:
    """Return the hub id of a model in the cache, if it selects this revision, and the path of others."""
    cache = Path(constants.HF_HUB_CACHE)
    parts = path.relative_to(cache).parts if path.is_relative_to(cache) else ()
    if len(parts) < 3 or not parts[0].startswith("models--"):
        return str(path)
    repository, file = "/".join(parts[0].split("--")[1:]), "/".join(parts[3:])  # models--OWNER--NAME/snapshots/REVISION
    selected = try_to_load_from_cache(repository, file or "config.json", revision=REVISIONS.get(repository))
    return f"{repository}/{file}".rstrip("/") if isinstance(selected, str) else str(path)
