"""Build of the native engine: compiled once per source, compiler and CPU; faults leave the torch engine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, save_model

from specdemo.core.errors import UserError
from specdemo.models.load import load
from specdemo.models.spec import ModelSpec, find_device
from specdemo.native import build as native_build
from specdemo.native import interface
from specdemo.native.build import NativeUnavailable, native_library

pytestmark = [pytest.mark.slow, pytest.mark.long]

USUAL_VECTORS = 4 if platform.machine() == "aarch64" else 2  # per block


def unoptimised(*added: str) -> tuple[str, ...]:
    """Flags of a quick compilation."""
    return (*("-O0" if flag.startswith("-O") else flag for flag in native_build._FLAGS), *added)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_library.cache_clear()
    yield tmp_path / "cache" / "specdemo"
    native_library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


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


def test_the_second_load_uses_the_cache(compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(compiled, cache)
    monkeypatch.setattr(native_build, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert isinstance(native_library(), ctypes.CDLL)


def test_a_damaged_cache_file_is_compiled_again(compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(compiled, cache)
    (path,) = cache.glob("*.so")
    path.write_bytes(b"\x7fELF foreign")
    built: list[Path] = []
    monkeypatch.setattr(native_build, "_compile", lambda _, to: built.append(shutil.copy(compiled / to.name, to)))
    assert isinstance(native_library(), ctypes.CDLL) and built == [path]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o707])
def test_a_folder_that_others_can_change_is_refused(
    mode: int, compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(compiled, cache)
    cache.chmod(mode)
    monkeypatch.setattr(native_build, "_compile", lambda *arguments: pytest.fail("compiled"))
    assert re.match(rf"other users can change {cache}: make it private", failure())


def test_a_folder_of_another_user_is_refused(compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(compiled, cache)
    monkeypatch.setattr(native_build.os, "getuid", lambda: os.stat(cache).st_uid + 1)
    assert failure().startswith("other users can change")


@pytest.mark.parametrize("linked", [".so", ".sha256"])
@pytest.mark.parametrize("kind", ["link", "writable"])
def test_links_and_files_of_others_are_compiled_again(
    linked: str, kind: str, compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of another user with a correct digest, behind a link or writable by others."""
    shutil.copytree(compiled, cache)
    (path,) = cache.glob(f"*{linked}")
    if kind == "link":
        path.rename(path.with_name("foreign"))
        path.symlink_to("foreign")
    else:
        path.chmod(0o666)
    built: list[str] = []

    def compile(_: object, to: Path) -> None:
        built.append(to.name)
        for suffix in (".so", ".sha256"):
            to.with_suffix(suffix).unlink()
            shutil.copy((compiled / to.name).with_suffix(suffix), to.with_suffix(suffix))

    monkeypatch.setattr(native_build, "_compile", compile)
    assert isinstance(native_library(), ctypes.CDLL) and len(built) == 1


def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", "", "."):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert native_build.cache_folder() == tmp_path / ".cache" / "specdemo"


def test_a_second_process_waits_for_the_first_compilation(
    compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks exclude descriptors, also those of a process."""
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


@pytest.mark.parametrize("step", ["_link", "_digest", "first replace", "second replace"])
def test_a_full_disk_leaves_no_library_or_a_correct_one(
    step: str, compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = compiled.glob("*.so")
    monkeypatch.setattr(native_build, "_link", lambda _, built: shutil.copy(library, built))
    monkeypatch.setattr(native_build, "_run", lambda *arguments: None)
    replaced: list[Path] = []

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def replace(source: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) == (1 if step == "first replace" else 2):
            full()
        rename(source, target)

    with monkeypatch.context() as patch:
        rename = os.replace
        patch.setattr(native_build.os, "replace", replace) if "replace" in step else patch.setattr(
            native_build, step, full
        )
        assert "No space left on device" in failure()
    assert not [path for path in cache.iterdir() if path.is_dir()]
    native_library.cache_clear()
    assert isinstance(native_library(), ctypes.CDLL)
    (path,) = cache.glob("*.so")
    assert path.read_bytes() == library.read_bytes()


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)  # not installed
    assert "no C compiler was found: install a C compiler" in failure()


def test_a_failing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "echo 'fatal error: out of order' >&2; exit 1"))
    assert failure().startswith("the C compiler failed (fatal error: out of order): ")


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_COMPILE_S", 0.2)
    monkeypatch.setenv("CC", compiler(tmp_path, "exec sleep 60"))
    assert "no result" in failure()


def test_a_library_of_other_headers_is_refused(compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(compiled, cache)
    monkeypatch.setattr(interface, "DIGEST", interface.DIGEST + 1)
    assert re.match("its headers have changed .*: start it again", failure())


def test_a_library_without_a_digest_is_refused() -> None:
    with pytest.raises(interface.ForeignLibrary):
        interface.declare(ctypes.CDLL(None))


@pytest.mark.parametrize(
    ("header", "old", "new"),
    [
        ("interface.h", "int32_t text_count, rows, rotations", "int32_t rows, text_count, rotations"),
        ("interface.h", "int run_pass(const pass *requested);", "int run_pass(const pass *requested, int threads);"),
        ("interface.h", "SILU, GELU_TANH", "GELU_TANH, SILU"),
        ("formats.h", "X(Q4_0, 4, 32, 1, F16", "X(Q4_0, 4, 32, 1, F32"),
    ],
    ids=["structure", "function", "constant", "format"],
)
def test_every_change_of_a_header_requires_another_library(
    header: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "native"
    shutil.copytree(native_build.SOURCES, sources)
    text = (sources / header).read_text()
    assert old in text
    (sources / header).write_text(text.replace(old, new))
    before = native_build._command()
    monkeypatch.setattr(native_build, "SOURCES", sources)
    assert interface.header_digest(sources) != interface.DIGEST
    assert native_build._command() != before


def test_an_engine_that_fails_its_check_is_not_stored(
    compiled: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = compiled.glob("*.so")
    monkeypatch.setattr(native_build, "_link", lambda _, built: shutil.copy(library, built))
    monkeypatch.setattr(native_build, "_CHECK", "raise SystemExit(1)")
    assert failure().startswith("the compiled engine computes wrong results")
    assert not list(cache.iterdir())


@pytest.mark.exhaustive  # compiles the engine
def test_wrong_results_are_detected(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(native_build.SOURCES, tmp_path / "native")
    source = (tmp_path / "native" / "float_products.c").read_text()
    broken = source.replace("(both << 16)", "(both << 15)")
    assert broken != source
    (tmp_path / "native" / "float_products.c").write_text(broken)
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "native")
    monkeypatch.setenv(native_build.VECTORS, "baseline")
    monkeypatch.setattr(native_build, "_FLAGS", unoptimised())
    assert failure().startswith("the compiled engine computes wrong results")
    assert not list(cache.iterdir())


@pytest.mark.exhaustive  # the engine of this machine is compiled and checked in every test run
@pytest.mark.parametrize(
    ("vectors", "lanes", "block", "flag"),
    [
        *(("baseline", 4, n, "") for n in (8, 16, 32)),
        *(("avx2", 8, n, "") for n in (16, 32)),
        ("avx2", 8, 16, "-mno-avxvnni"),
        ("avx512", 16, 32, ""),
        ("avx512", 16, 32, "-mno-avx512vnni"),
    ],
)
def test_every_vector_width_and_block_size_passes_the_check(
    vectors: str, lanes: int, block: int, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is compared with scalar sums when it is compiled; `flag`: for CPUs without products of bytes."""
    if vectors not in native_build.supported_vectors():
        pytest.skip(f"the CPU has no {vectors}")
    usual = not flag and block // lanes == USUAL_VECTORS
    if usual:
        monkeypatch.undo()  # the cache of the user: other tests use this library, too
    monkeypatch.setenv(native_build.VECTORS, vectors)
    needed, flags = native_build._BUILDS[vectors]
    monkeypatch.setitem(native_build._BUILDS, vectors, (needed, (*flags, *filter(None, [flag]))))
    if not usual:
        size = f"-DVECTORS={block // lanes}"
        monkeypatch.setattr(native_build, "_FLAGS", (*native_build._FLAGS, size) if flag else unoptimised(size))
    library = native_library()
    assert isinstance(library, ctypes.CDLL)
    assert library.interface_digest() == interface.DIGEST
    assert not flag or "vnni" not in library.vector_extensions().decode()
    assert (library.vector_outputs(), library.block_outputs()) == (lanes, block)
    baseline = "sse" if platform.machine() == "x86_64" else "neon"
    assert library.vector_extensions().decode().split()[0] == (baseline if vectors == "baseline" else vectors)


@pytest.mark.parametrize(
    ("value", "features", "sentence"),
    [
        ("avx1024", "avx avx2 avx512f avx512bw", "avx1024 is unknown: choose avx512, avx2 or baseline"),
        ("avx512", "avx avx2 avx512f", "avx512 is not supported by this CPU: choose avx2 or baseline"),
        ("avx2", "sse2 avx", "avx2 is not supported by this CPU: choose baseline"),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86-64")
def test_other_vectors_are_refused(value: str, features: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_cpu", lambda: f"flags : {features}")
    monkeypatch.setenv(native_build.VECTORS, value)
    assert failure() == f"SPECDEMO_VECTORS={sentence}"
    with pytest.raises(UserError, match=re.escape(failure())):
        find_device("cpu")


def test_vectors_are_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for vectors in native_build.supported_vectors():
        monkeypatch.setenv(native_build.VECTORS, vectors)
        keys.add(native_build._key(native_build._command()))
    assert len(keys) == len(native_build.supported_vectors())


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
