"""Memory safety of the native engine: random and hostile passes with AddressSanitizer and UBSan (gcc on Linux)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fakes import properties

from specdemo.native import build as native_build

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.exhaustive, pytest.mark.fuzz]

ROUNDS = 40
FLAGS = ("-std=gnu11", "-Og", "-g1", "-fPIC", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runtime() -> str:
    """Path of the runtime of AddressSanitizer, which is loaded before Python."""
    try:
        command = [*native_build._compiler(), "-print-file-name=libasan.so"]
    except native_build.NativeUnavailable as reason:
        pytest.skip(str(reason))
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else pytest.skip("the compiler has no AddressSanitizer")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engine with sanitizers, with few kernels (without AVX-512); it stays in the cache of the user."""
    narrow = native_build.supported_vectors()[-2:][0]
    monkeypatch.setenv(native_build.VECTORS, os.environ.get(native_build.VECTORS) or narrow)
    monkeypatch.setattr(native_build, "_FLAGS", FLAGS)
    command = native_build._command()
    path = native_build.cache_folder() / f"native-{native_build._key(command)}.so"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            native_build._link(command, Path(folder) / path.name)
            os.replace(Path(folder) / path.name, path)
    return path


def test_random_and_hostile_passes_stay_inside_their_arrays(library: Path, runtime: str) -> None:
    seconds = properties.share_s()
    done = subprocess.run(
        [sys.executable, "-m", "fakes.native_fuzz", str(library), str(properties.first_seed()), str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=300 + seconds,
        env={
            **os.environ,
            **({properties.SECONDS: str(seconds)} if seconds else {}),
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": os.pathsep.join((str(ROOT.parent), str(ROOT))),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
