"""Wheel: built offline from the checkout, complete, and usable from any directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

UNSHIPPED = ("globals.d.ts", "jsconfig.json")  # for the type checker

ROOT = Path(__file__).parents[2]
SOURCES = ("specdemo", "assets", "docs", "pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE")
EXAMPLE = """
import runpy, sys
import specdemo
from specdemo import Recipe, generate, load_pair
pair = load_pair("bundled", device="cpu")
*_, end = generate(Recipe(max_tokens=8), "def add(a, b):", pair)
print(specdemo.__file__)
sys.argv = ["specdemo", "run", "def f(x):", "--pair", "bundled", "--method", "nasd", "--max-tokens", "8", "--json"]
runpy.run_module("specdemo", run_name="__main__")
"""

COMMAND = """
import json, os, runpy, sys
before = dict(os.environ)
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code and "torch" not in sys.modules
print(json.dumps({name: value for name, value in os.environ.items() if before.get(name) != value}))
"""
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the installed wheel."""
    checkout, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:  # builds leave files, which must not reach the working tree
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "pictures")
        shutil.copytree(source, checkout / name, ignore=ignore) if source.is_dir() else shutil.copy(source, checkout)
    options = "--quiet --no-compile --no-deps --no-index --no-build-isolation --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(folder), str(checkout)]
    subprocess.run(command, check=True, timeout=300)
    return folder


def test_the_wheel_contains_every_module_and_asset(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return {path.as_posix() for path in paths if "__pycache__" not in path.parts and path.suffix != ".pyi"}

    package = {name for name in files(installed / "specdemo") if not name.startswith(("assets/", "docs/"))}
    assert package == {name for name in files(ROOT / "specdemo") if Path(name).name not in UNSHIPPED}
    assets = {name for name in files(ROOT / "assets") if not name.startswith("pictures/")}
    assert files(installed / "specdemo" / "assets") == assets
    assert files(installed / "specdemo" / "docs") == files(ROOT / "docs")
    assert not (installed / "assets").exists() and not (installed / "tests").exists()


@pytest.mark.exhaustive
def test_the_installed_library_and_program_run_in_any_directory(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", EXAMPLE]
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=300)
    path, *_, last = output.splitlines()
    assert path == str(installed / "specdemo" / "__init__.py")
    assert json.loads(last)["metrics"]["tokens"] == 8


def test_the_installed_command_sets_the_environment_and_runs_the_terminal(installed: Path, tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    output = subprocess.check_output(
        [sys.executable, "-c", COMMAND, str(installed / "bin" / "specdemo")],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(installed)},
        text=True,
        timeout=300,
    )
    usage, *_, last = output.splitlines()
    assert usage.startswith("usage: specdemo") and " serve " in output
    assert json.loads(last) == ENVIRONMENT
