"""Where a model's files are: a directory here, or a hub repository, fetched with news of how far it has come.

The downloads are `huggingface_hub`'s own: it resumes a file that was cut while it came, keeps files that are complete,
and asks nothing of the network about a pinned revision that is here. Only safetensors weights are ever asked for, and
never a file with code in it. What goes wrong is told in one sentence (`reasons.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import DryRunError
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from specdemo.core.errors import UserError
from specdemo.models.load_errors import format_bytes, load_errors
from specdemo.worker import ReportProgress, TaskProgress, ignore_progress

INDEX = "model.safetensors.index.json"
SETTINGS = (  # what can be judged, and refused, before any weights come
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    INDEX,
)
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # of the stored tensors, by name: safetensors' dtype, and shape


@dataclass(frozen=True)
class Hub:
    """A hub and where its files are kept; None is what the environment says (HF_ENDPOINT, HF_HUB_CACHE, HF_TOKEN)."""

    endpoint: str | None = None
    cache: Path | None = None
    token: str | None = None

    def settings(self, name: str, revision: str | None = None, tell: ReportProgress = ignore_progress) -> Path:
        """A directory with the model's configuration and tokenizer, fetched if need be; `UserError` if it cannot be."""
        if (folder := here(name)) is not None:
            return folder
        with load_errors(name):
            return self._fetch(name, revision, SETTINGS, tell)

    def weights(self, name: str, revision: str | None = None, tell: ReportProgress = ignore_progress) -> Path:
        """The directory with everything, the weights as well; `UserError` if they cannot be had."""
        folder = here(name)
        if folder is None:
            with load_errors(name):
                folder = self._fetch(name, revision, WEIGHTS, tell)
        if not _has(folder, WEIGHTS):
            raise UserError(
                f"{name} has no safetensors weights (model.safetensors, or shards of it), and other kinds may hold "
                "code: choose a model that has them"
            )
        return folder

    def shapes(self, name: str, revision: str | None = None) -> Shapes:
        """Dtype and shape of every stored tensor, from the headers of the files alone, here or on the hub."""
        folder = here(name)
        with load_errors(name):
            if folder is None:
                folder = self._fetch(name, revision, SETTINGS, ignore_progress)
                if not _has(folder, WEIGHTS):
                    api = HfApi(endpoint=self.endpoint, token=self.token)
                    found = api.get_safetensors_metadata(name, revision=folder.name).files_metadata.values()
                    return {k: (t.dtype, tuple(t.shape)) for one in found for k, t in one.tensors.items()}
        return local_shapes(name, folder)

    def _fetch(self, name: str, revision: str | None, patterns: tuple[str, ...], tell: ReportProgress) -> Path:
        options: dict[str, Any] = {
            "revision": revision,
            "allow_patterns": list(patterns),
            "endpoint": self.endpoint,
            "cache_dir": self.cache,
            "token": self.token,
        }
        missing = 0
        try:
            files = snapshot_download(name, **options, dry_run=True, tqdm_class=_bars(ignore_progress, name, 0))
            missing = sum(file.file_size or 0 for file in files if file.will_download)
        except DryRunError:
            pass  # the hub cannot be asked: what is here may do, and if not, the next call says what is wrong
        if missing:
            _check_room(name, missing, Path(self.cache or constants.HF_HUB_CACHE))
            tell(TaskProgress(f"downloading {name}, {format_bytes(missing)}", 0, missing))
        folder = Path(snapshot_download(name, **options, tqdm_class=_bars(tell, name, missing), max_workers=4))
        if missing:
            self._verify(name, folder, patterns, tell)
        return folder

    def _verify(self, name: str, folder: Path, patterns: tuple[str, ...], tell: ReportProgress) -> None:
        """Compare what came with the hub's checksums; whatever is damaged goes, so that asking again fetches it."""
        tell(TaskProgress(f"checking {name}"))
        found = HfApi(endpoint=self.endpoint, token=self.token).verify_repo_checksums(
            name, revision=folder.name, cache_dir=self.cache
        )
        damaged = [mismatch["path"] for mismatch in found.mismatches]
        for path in damaged:
            file = folder / path
            file.resolve().unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        if damaged:
            raise UserError(
                f"{', '.join(damaged)} of {name} came damaged and was removed: run it again to fetch it anew"
            )


def here(name: str) -> Path | None:
    """The directory of this name, if there is one; `UserError` if there is one that holds no model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if not (folder / "config.json").exists():
        raise UserError(
            f"{name} is a directory but not a model (it has no config.json): give one saved by save_pretrained"
        )
    return folder


def local_shapes(name: str, folder: Path) -> Shapes:
    """Dtype and shape of every tensor in the safetensors files of a directory; no weight is read."""
    shapes = {}
    for pattern in WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            try:
                with safe_open(path, "pt") as file:
                    for key in file.keys():
                        part = file.get_slice(key)
                        shapes[key] = (part.get_dtype(), tuple(part.get_shape()))
            except SafetensorError as error:
                raise UserError(f"the weights of {name} are damaged ({error}): fetch them again") from error
    return shapes


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _check_room(name: str, missing: int, cache: Path) -> None:
    place = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < missing:
        raise UserError(
            f"{name} takes {format_bytes(missing)} on disk and {format_bytes(free)} are free under {os.fspath(cache)}: make room, or "
            "set HF_HOME to a larger disk"
        )


def _bars(tell: ReportProgress, name: str, total: int) -> type[tqdm]:
    """A class of progress bars that show nothing and tell how many bytes have come, of `total`.

    `huggingface_hub` makes one for the bytes of all files together and one that counts files.
    """
    files = {"done": 0, "total": 0}

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self._bytes = options.get("unit") == "B"
            if not self._bytes:
                files["total"] = options.get("total") or 0

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if not self._bytes:
                files["done"] = self.n
            elif total:
                done = min(int(self.n), total)
                many = f", file {min(files['done'] + 1, files['total'])} of {files['total']}"
                tell(
                    TaskProgress(
                        f"downloading {name}, {format_bytes(done)} of {format_bytes(total)}{many if files['total'] > 1 else ''}",
                        done,
                        total,
                    )
                )

    return Bar
