"""Digests of models: equal for copies, different for every change of distribution or rounding."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.models.hub import Hub
from specdemo.models.identity import ModelIdentity, file_digest, identify
from specdemo.models.load import LoadedModel, load
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import fingerprint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of stored digests; the engine is compiled before."""
    load(ModelSpec(str(save_model(tmp_path / "first", byte_level_tokenizer())), device="cpu"), warm=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specdemo"


def loaded(path: Path, **options: Any) -> LoadedModel:
    return load(ModelSpec(str(path), device="cpu", **options), warm=False)


def identity_of(target: LoadedModel) -> ModelIdentity:
    return identify(target, fingerprint(target.tokenizer), Hub())


def change_settings(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **settings}), "utf-8")


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def change_stop(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}), "utf-8")


CHANGES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "a copy": (lambda folder: None, True),
    "written by another version": (lambda folder: change_settings(folder, transformers_version="1.0"), True),
    "a bit of the weights": (change_weights, False),
    "a setting": (lambda folder: change_settings(folder, rms_norm_eps=1e-4), False),
    "a stop token": (change_stop, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_digest_changes_with_the_files(name: str, tmp_path: Path) -> None:
    change, same = CHANGES[name]
    copy = Path(shutil.copytree(tmp_path / "first", tmp_path / "second"))
    change(copy)
    first, second = identity_of(loaded(tmp_path / "first")), identity_of(loaded(copy))
    assert (first.model == second.model) == same and first.numerics == second.numerics


def test_keys_and_values_of_another_precision_change_the_digest(tmp_path: Path) -> None:
    target = loaded(tmp_path / "first")
    first = identity_of(target)
    target.model.kv_dtype = "another"
    assert identity_of(target).model != first.model


def test_digests_of_hub_files_are_their_names(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("0123456789abcdef" * 4)
    blob.parent.mkdir()
    blob.write_bytes(b"never read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert file_digest(link) == blob.name


@pytest.mark.parametrize("stored", ["", "[]", '{"a": 1}', '{"a": []}'])
def test_a_digest_is_stored_until_size_or_time_of_the_file_change(stored: str, tmp_path: Path, cache: Path) -> None:
    cache.mkdir(exist_ok=True)
    (cache / "digests.json").write_text(stored)
    file = tmp_path / "weights"
    file.write_bytes(b"first")
    first, status = file_digest(file), file.stat()
    file.write_bytes(b"later")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digest(file) == first  # it was not read again
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_digest(file) != first
