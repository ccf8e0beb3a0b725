"""Supported interpreters: every file compiles, and all modules without third-party imports can be imported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
REQUIRED = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
assert REQUIRED
OLDEST, NEWEST = f"3.{REQUIRED[1]}", f"3.{int(REQUIRED[2]) - 1}"
RUNNING = ".".join(platform.python_version_tuple()[:2])
IMPORT_ALL = """
import sys
from importlib import import_module
from pathlib import Path

root = Path(sys.argv[1])
sys.path.insert(0, str(root))
paths = [*root.glob("*.py")]
for folder in ("specdemo", "benchmarks", "training", "tests"):
    paths += root.joinpath(folder).rglob("*.py")
for path in paths:
    compile(path.read_bytes(), path, "exec")
for path in sorted(root.joinpath("specdemo").rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if path.name == "__main__.py":
        continue
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in {"specdemo", *sys.stdlib_module_names}:
            raise
    else:
        print(name)
"""


def candidates(version: str) -> Iterator[str]:
    if version == RUNNING:
        yield sys.executable
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def interpreter(version: str) -> str | None:
    """Path of a working interpreter; a shim of pyenv fails while its version is not selected."""
    for path in candidates(version):
        reported = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if reported.startswith(f"Python {version}."):
            return path
    return None


@pytest.mark.parametrize("version", sorted({OLDEST, RUNNING, NEWEST}))
def test_the_source_compiles_and_imports_without_packages(version: str) -> None:
    path = interpreter(version)
    if path is None:
        pytest.skip(f"Python {version} is not installed")
    command = [path, "-I", "-S", "-W", "error", "-c", IMPORT_ALL, str(ROOT)]  # without site-packages
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"specdemo", "specdemo.core.step", "specdemo.core.decode", "specdemo.worker"} <= set(done.stdout.split())


def test_makefile_and_readme_name_the_supported_versions() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    oldest, newest = (version.replace(".", ", ") for version in (OLDEST, NEWEST))
    assert makefile.count(f"({oldest}) <= sys.version_info[:2] <= ({newest})") == 2
    names = re.search(r"for python in python3 (.+); do", makefile)
    assert names and names[1].split()[0] == f"python{NEWEST}" and names[1].split()[-1] == f"python{OLDEST}"
    for text in (makefile, (ROOT / "README.md").read_text("utf-8")):
        assert f"Python {OLDEST} to {NEWEST}" in text
