"""Compilation of the C code on first use, cached by source, compiler and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from specdemo.native.interface import declare, layout_differences

SOURCES = Path(__file__).parent
SWITCH = "SPECDEMO_NATIVE"  # environment variable; 0 disables the engine
_FLAGS = ("-std=gnu11", "-O2", "-march=native", "-shared", "-fPIC", "-pthread")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S, _CHECK_S = 120, 20
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).self_check())"
INSTALL = "install a C compiler (Debian: apt install build-essential; any system: pip install ziglang)"


_compiling = threading.Lock()


class NativeUnavailable(Exception):
    """The native engine cannot be used; the message contains cause and remedy."""


@cache
def native_library() -> ctypes.CDLL | NativeUnavailable:
    """Return the compiled library, or the reason why there is none."""
    with _compiling:
        try:
            return _load()
        except NativeUnavailable as reason:
            return reason


def required_library() -> ctypes.CDLL:
    """Return the compiled library. Raise NativeUnavailable if there is none."""
    library = native_library()
    if isinstance(library, NativeUnavailable):
        raise library
    return library


def _load() -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise NativeUnavailable(f"disabled by {SWITCH}=0")
    if os.name != "posix":
        raise NativeUnavailable("it needs POSIX threads: use Linux, macOS or WSL")
    compiler = _compiler()
    path = cache_folder() / f"native-{_key(compiler)}.so"
    try:
        if not _is_intact(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"{path.parent} is not usable ({error}): set XDG_CACHE_HOME to a writable directory"
        ) from error
    declare(library)
    if differences := layout_differences(library):
        raise NativeUnavailable(f"the structures of C and Python differ ({', '.join(differences[:3])})")
    return library


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdemo"


def _compiler() -> tuple[str, ...]:
    for name in filter(None, (os.environ.get("CC"), *_COMPILERS)):
        if found := shutil.which(name):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    raise NativeUnavailable(f"no C compiler was found: {INSTALL}")


def _key(compiler: tuple[str, ...]) -> str:
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    parts = (*sources, repr((_version(compiler), _FLAGS, _cpu(), platform.platform())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _version(compiler: tuple[str, ...]) -> str:
    path = Path(compiler[0]).resolve()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns} {compiler[1:]}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    )


def _is_intact(path: Path) -> bool:
    try:
        owned = path.stat().st_uid == os.getuid()
        return owned and path.with_suffix(".sha256").read_text() == _digest(path)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(compiler: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        sources = map(str, sorted(SOURCES.glob("*.c")))
        _run([*compiler, *_FLAGS, *sources, "-o", str(built), "-lm"], _COMPILE_S, "the C compiler failed")
        _run([sys.executable, "-c", _CHECK, str(built)], _CHECK_S, "the compiled engine computes wrong results")
        digest = built.with_suffix(".sha256")
        digest.write_text(_digest(built))
        os.replace(built, path)
        os.replace(digest, path.with_suffix(".sha256"))


def _run(command: list[str], timeout: float, failure: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{failure} (no result in {timeout:.0f} s): {INSTALL}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        detail = lines[0].strip() if lines else f"exit code {done.returncode}"
        raise NativeUnavailable(f"{failure} ({detail}): {INSTALL}")
