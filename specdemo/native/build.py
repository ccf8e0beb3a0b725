"""Compilation of the C code on first use, cached by source, compiler and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from specdemo.native.interface import DIGEST, SOURCES, declare, header_digest

SWITCH = "SPECDEMO_NATIVE"  # environment variable; 0 disables the engine
VECTORS = "SPECDEMO_VECTORS"  # environment variable; a key of `_BUILDS`, by default the widest that the CPU supports
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-pthread")
# GCC separates multiplications and additions of dependent sums for some AMD CPUs; a row alone would be rounded
# differently from a row among others.
_EQUAL_ROUNDING = "--param=avoid-fma-max-bits=0"
# Builds for x86-64, widest first: required features of the CPU, and compiler flags. Other CPUs have the baseline only.
_BUILDS = {
    "avx512": ({"avx512f", "avx512bw"}, ("-march=native",)),
    "avx2": ({"avx2"}, ("-march=native", "-mno-avx512f")),
    "baseline": (set(), ("-march=x86-64",)),
}
_PROCESSES = 2  # number of parallel compiler processes
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S, _CHECK_S = 600, 60
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).self_check())"
INSTALL = "install a C compiler (Debian: apt install build-essential; any system: pip install ziglang)"


class NativeUnavailable(Exception):
    """The native engine cannot be used; the message contains cause and remedy."""


class CompilationStopped(Exception):
    """A signal ended the compilation."""


class CompilerProcesses:
    """Processes of a compilation. Each has a process group, since compilers start others.

    Handlers of signals may call `stop`: it takes no lock.
    """

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._stopped = False

    def run(self, command: list[str], timeout: float) -> tuple[int, str]:
        """Return exit code and errors. Raises `subprocess.TimeoutExpired` and `CompilationStopped`."""
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
        )
        self._running.append(process)
        try:
            if self._stopped:  # `stop` may have read the list before
                raise CompilationStopped
            _, errors = process.communicate(timeout=timeout)
            if self._stopped:
                raise CompilationStopped
        finally:
            self._running.remove(process)
            _kill(process)
            process.wait()
        return process.returncode, errors

    def stop(self) -> None:
        """End the processes, and those that start before `resume`."""
        self._stopped = True
        for process in list(self._running):
            _kill(process)

    def resume(self) -> None:
        self._stopped = False


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


compiler_processes = CompilerProcesses()
_compiling = threading.Lock()


@cache
def native_library() -> ctypes.CDLL | NativeUnavailable:
    """Return the compiled library, or the reason why there is none. Raises `CompilationStopped`."""
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
    if reason := unsupported_vectors():
        raise NativeUnavailable(reason)
    command = _command()
    path = cache_folder() / f"native-{_key(command)}.so"
    try:
        with _locked(path.parent):
            if not _is_intact(path):
                _compile(command, path)
            library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"{path.parent} is not usable ({error}): set XDG_CACHE_HOME to a writable directory"
        ) from error
    library.interface_digest.restype = ctypes.c_int64
    if library.interface_digest() != DIGEST:
        raise NativeUnavailable("its headers have changed since this program started: start it again")
    declare(library)
    return library


def supported_vectors() -> tuple[str, ...]:
    """Return the values of `SPECDEMO_VECTORS` that this CPU supports, widest first."""
    if not _is_x86():
        return ("baseline",)
    features = set(_cpu().lower().split())
    return tuple(name for name, (needed, _) in _BUILDS.items() if needed <= features)


def unsupported_vectors() -> str | None:
    """Return a sentence if the value of `SPECDEMO_VECTORS` is not supported."""
    value, names = os.environ.get(VECTORS), supported_vectors()
    if not value or value in names:
        return None
    reason = "is not supported by this CPU" if value in _BUILDS else "is unknown"
    return f"{VECTORS}={value} {reason}: choose {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}"


def _command() -> tuple[str, ...]:
    flags = (*_FLAGS, f"-DINTERFACE_DIGEST={header_digest()}")
    if not _is_x86():
        return (*_compiler(), *flags, "-march=native")
    vectors = _BUILDS[os.environ.get(VECTORS) or supported_vectors()[0]][1]
    return (*_compiler(), *flags, _EQUAL_ROUNDING, *vectors)


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def cache_folder() -> Path:
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path is invalid by its specification
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "specdemo"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that compile. Raises `NativeUnavailable` if other users can change the folder."""
    import fcntl  # POSIX

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _is_private(os.fstat(descriptor)):
            raise NativeUnavailable(
                f"other users can change {folder}: make it private (chmod 700), or set XDG_CACHE_HOME to a folder of "
                "your user"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiler() -> tuple[str, ...]:
    for name in filter(None, (os.environ.get("CC"), *_COMPILERS)):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "cc")
    raise NativeUnavailable(f"no C compiler was found: {INSTALL}")


def _key(command: tuple[str, ...]) -> str:
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    compiler = Path(command[0]).resolve()
    status = compiler.stat()
    others = (compiler, status.st_size, status.st_mtime_ns, command[1:], _cpu(), platform.platform())
    return hashlib.sha256(b"\0".join((*sources, repr(others).encode()))).hexdigest()[:16]


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        names = [f"machdep.cpu.{name}" for name in ("brand_string", "features", "leaf7_features")]
        listed = shutil.which("sysctl") and subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True)
        return listed.stdout if listed else platform.processor() or platform.machine()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    )


def _is_intact(path: Path) -> bool:
    digest = path.with_suffix(".sha256")
    try:
        statuses = [file.lstat() for file in (path, digest)]
        private = all(stat.S_ISREG(status.st_mode) and _is_private(status) for status in statuses)
        return private and digest.read_text() == _digest(path)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(command: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        _link(command, built)
        _run([sys.executable, "-c", _CHECK, str(built)], _CHECK_S, "the compiled engine computes wrong results")
        digest = built.with_suffix(".sha256")
        digest.write_text(_digest(built))
        os.replace(built, path)
        os.replace(digest, path.with_suffix(".sha256"))


def _link(command: tuple[str, ...], built: Path) -> None:
    sources = sorted(SOURCES.glob("*.c"), key=lambda source: -source.stat().st_size)  # the slowest first
    objects = [str(built.with_name(f"{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(_PROCESSES) as executor:
        commands = ([*command, "-c", str(source), "-o", to] for source, to in zip(sources, objects, strict=True))
        list(executor.map(lambda compiling: _run(compiling, _COMPILE_S, "the C compiler failed"), commands))
    _run([*command, "-shared", *objects, "-o", str(built), "-lm"], _COMPILE_S, "the C compiler failed")


def _run(command: list[str], timeout: float, failure: str) -> None:
    try:
        code, errors = compiler_processes.run(command, timeout)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{failure} (no result in {timeout:.0f} s): {INSTALL}") from error
    if code:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        detail = lines[0].strip() if lines else f"exit code {code}"
        raise NativeUnavailable(f"{failure} ({detail}): {INSTALL}")
