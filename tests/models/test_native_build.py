"""Build of the native engine: compiled once per source, compiler and CPU; faults leave the torch engine."""

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.errors import UserError
from specdemo.models.load import load
from specdemo.models.spec import ModelSpec, find_device
from specdemo.native import build as native_build
from specdemo.native import interface
from specdemo.native.build import NativeUnavailable, native_library

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_library.cache_clear()
    yield tmp_path / "cache" / "specdemo"
    native_library.cache_clear()


def failure() -> str:
    result = native_library()
    assert isinstance(result, NativeUnavailable)
    return str(result)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the engine of this test run."""
    native_library.cache_clear()
    library = native_library()
    native_library.cache_clear()
    assert isinstance(library, ctypes.CDLL)
    folder = tmp_path_factory.mktemp("compiled")
    for suffix in (".so", ".sha256"):
        shutil.copy(Path(library._name).with_suffix(suffix), folder)
    return folder


@pytest.fixture
def stored(compiled: Path, cache: Path) -> Path:
    """Library in the cache folder."""
    shutil.copytree(compiled, cache)
    (path,) = cache.glob("*.so")
    return path


def test_the_second_load_uses_the_cache(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert isinstance(native_library(), ctypes.CDLL)


@pytest.mark.parametrize("mode", [0o775, 0o707])
def test_a_folder_that_others_can_change_is_refused(mode: int, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_compile", lambda *arguments: pytest.fail("compiled"))
    stored.parent.chmod(mode)
    assert re.match(rf"other users can change {stored.parent}: make it private", failure())
    stored.parent.chmod(0o700)
    native_library.cache_clear()
    monkeypatch.setattr(native_build.os, "getuid", lambda: os.stat(stored).st_uid + 1)
    assert failure().startswith("other users can change")


def damage(path: Path) -> None:
    path.write_bytes(b"\x7fELF foreign")


def link(path: Path) -> None:
    path.rename(path.with_name("foreign"))
    path.symlink_to("foreign")


@pytest.mark.parametrize(
    ("suffix", "change"),
    [(".so", damage), (".so", link), (".sha256", link), (".so", lambda path: path.chmod(0o666))],
    ids=["damaged", "link", "digest as a link", "writable"],
)
def test_damaged_files_and_those_of_others_are_compiled_again(
    suffix: str, change: Callable[[Path], None], stored: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(stored.with_suffix(suffix))
    built: list[Path] = []

    def compile(_: object, to: Path) -> None:
        built.append(to)
        for source in compiled.iterdir():
            to.with_suffix(source.suffix).unlink()
            shutil.copy(source, to.with_suffix(source.suffix))

    monkeypatch.setattr(native_build, "_compile", compile)
    assert isinstance(native_library(), ctypes.CDLL) and built == [stored]


def test_a_second_process_waits_for_the_first_compilation(
    compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks exclude descriptors, also within a process."""
    cache.mkdir(mode=0o700, parents=True)
    requested, lock, results = threading.Event(), fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        requested.set()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(native_build, "_compile", lambda *arguments: results.append("compiled"))
    first = os.open(cache, os.O_RDONLY)
    lock(first, fcntl.LOCK_EX)
    second = threading.Thread(target=lambda: results.append(native_library()))
    second.start()
    assert requested.wait(60)
    for file in compiled.iterdir():
        shutil.copy(file, cache)
    os.close(first)
    second.join(60)
    assert len(results) == 1 and isinstance(results[0], ctypes.CDLL)


@pytest.fixture
def linked(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Library that compilations return."""
    (library,) = compiled.glob("*.so")
    monkeypatch.setattr(native_build, "_link", lambda _, built: shutil.copy(library, built))
    return library


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_full_disk_leaves_no_library_or_a_correct_one(
    replaced: int, linked: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the library, and before its digest, if one file was replaced."""
    rename, done = os.replace, []

    def replace(source: Path, target: Path) -> None:
        if len(done) == replaced:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(native_build.os, "replace", replace)
        assert "No space left on device" in failure()
    assert not [path for path in cache.iterdir() if path.is_dir()]
    native_library.cache_clear()
    assert isinstance(native_library(), ctypes.CDLL)
    (path,) = cache.glob("*.so")
    assert path.read_bytes() == linked.read_bytes()


def test_an_engine_that_fails_its_check_is_not_stored(
    linked: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_CHECK", "raise SystemExit(1)")
    assert failure().startswith("the compiled engine computes wrong results")
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("", "no C compiler was found: install a C compiler"),
        ("echo 'fatal error: out of order' >&2; exit 1", "the C compiler failed (fatal error: out of order): "),
        ("exec sleep 60", "the C compiler failed (no result in 0 s): install a C compiler"),
    ],
    ids=["missing", "failing", "hanging"],
)
def test_faults_of_compilers_are_reported(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CC", str(path) if script else "absent")
    monkeypatch.setattr(native_build, "_COMPILERS", ())
    monkeypatch.setitem(sys.modules, "ziglang", None)  # not installed
    monkeypatch.setattr(native_build, "_COMPILE_S", 0.2 if "sleep" in script else 60)
    assert failure().startswith(sentence)


def test_a_library_of_other_headers_is_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "DIGEST", interface.DIGEST + 1)
    assert re.match("its headers have changed .*: start it again", failure())


@pytest.mark.exhaustive  # compiles the engine
@pytest.mark.parametrize(("vectors", "size", "feature"), [("avx2", 16, "avx_vnni"), ("avx512", 32, "avx512_vnni")])
def test_cpus_without_products_of_bytes_pass_the_check(
    vectors: str, size: int, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is compared with scalar sums when it is compiled."""
    if vectors not in native_build.supported_vectors():
        pytest.skip(f"the CPU has no {vectors}")
    if feature not in native_build._cpu().split():
        pytest.skip(f"the CPU has no {feature}: the usual engine has none either")
    monkeypatch.setenv(native_build.VECTORS, vectors)
    needed, flags = native_build._BUILDS[vectors]
    monkeypatch.setitem(native_build._BUILDS, vectors, (needed, (*flags, f"-mno-{feature.replace('_', '')}")))
    monkeypatch.setattr(native_build, "_FLAGS", (*native_build._FLAGS, "-O0"))
    library = native_library()
    assert isinstance(library, ctypes.CDLL)
    assert library.interface_digest() == interface.DIGEST and library.block_outputs() == size
    assert "vnni" not in library.vector_extensions().decode()


@pytest.mark.parametrize(
    ("value", "features", "sentence"),
    [
        ("avx1024", "avx avx2 avx512f avx512bw", "avx1024 is unknown: choose avx512, avx2 or baseline"),
        ("avx512", "avx avx2 avx512f", "avx512 is not supported by this CPU: choose avx2 or baseline"),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86-64")
def test_other_vectors_are_refused(value: str, features: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_cpu", lambda: f"flags : {features}")
    monkeypatch.setenv(native_build.VECTORS, value)
    assert failure() == f"SPECDEMO_VECTORS={sentence}"
    with pytest.raises(UserError, match=re.escape(failure())):
        find_device("cpu")


def test_an_unusable_cache_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert "set XDG_CACHE_HOME to a writable directory" in failure()


def test_the_torch_engine_replaces_a_disabled_native_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the cache of the user
    save_model(tmp_path / "model", byte_level_tokenizer())
    spec = ModelSpec(str(tmp_path / "model"), device="cpu")
    assert load(spec).engine == "native"
    monkeypatch.setenv(native_build.SWITCH, "0")
    native_library.cache_clear()
    assert load(spec).engine == "lean: no native engine, disabled by SPECDEMO_NATIVE=0"
