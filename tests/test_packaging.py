"""What is shipped agrees with itself: imports with requirements, and the places that name a version with each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def required(name: str) -> dict[str, Requirement]:
    """The requirements of a file that hold on this Python, by distribution name."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text("utf-8").splitlines())
    parsed = (Requirement(line) for line in lines if line and not line.startswith("-"))
    return {r.name.lower(): r for r in parsed if r.marker is None or r.marker.evaluate()}


def imported(*paths: Path) -> set[str]:
    """The distributions that these files import, by what is installed here."""
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    distributions = packages_distributions()
    ours = {"specdemo", "app"} | {path.stem for path in (ROOT / "tests").glob("*.py")} | {"tests"}
    return {distributions.get(m, [m])[0].lower() for m in modules - set(sys.stdlib_module_names) - ours}


def test_the_program_names_everything_it_imports():
    program = [*(ROOT / "specdemo").rglob("*.py"), *ROOT.glob("app.py")]
    optional = {"spaces", "webview"}  # asked for where they are used, in words, when they are missing
    assert imported(*program) - {"torch"} - optional <= set(required("requirements.txt"))


def test_the_tests_name_everything_they_import():
    brought = {
        "gradio_client": "gradio",
        "packaging": "pytest",
        "huggingface_hub": "transformers",
        "httpx": "gradio",
        "pillow": "gradio",
    }
    named = set(required("requirements.txt")) | set(required("requirements-dev.txt"))
    used = {brought.get(name, name) for name in imported(*(ROOT / "tests").rglob("*.py"))}
    assert used <= named


def test_what_is_installed_is_what_is_required():
    for name, requirement in {**required("requirements.txt"), **required("requirements-dev.txt")}.items():
        assert requirement.specifier.contains(version(name), prereleases=True), name


def test_versions_agree_between_files():
    front = (ROOT / "README.md").read_text("utf-8").split("---")[1]
    read = dict(line.split(": ", 1) for line in front.strip().splitlines() if re.match(r"\w+: ", line))
    python = SpecifierSet(re.search(r'requires-python = "(.+)"', (ROOT / "pyproject.toml").read_text()).group(1))
    image = re.search(r"^FROM python:([\d.]+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE).group(1)
    assert required("requirements.txt")["gradio"].specifier.contains(read["sdk_version"])
    assert python.contains(read["python_version"].strip('"'))
    assert python.contains(image)
    assert (ROOT / read["app_file"]).is_file()


def test_the_source_compiles_for_the_oldest_python():
    """Names that came after 3.10 are ruff's to find; syntax is caught here."""
    for path in [*(ROOT / "specdemo").rglob("*.py"), *(ROOT / "tests").glob("*.py"), *ROOT.glob("app.py")]:
        ast.parse(path.read_text("utf-8"), path.name, feature_version=(3, 10))


def test_the_readme_names_the_terminals_options_and_no_others():
    table = (ROOT / "README.md").read_text("utf-8").partition("## In the terminal")[2].partition("\n## ")[0]
    told = set(re.findall(r"--[a-z][a-z0-9-]+", table))
    shown = set(re.findall(r"--[a-z][a-z0-9-]+", run_help()))
    assert told == shown - {"--help"}


def run_help() -> str:
    command = [sys.executable, "-m", "specdemo", "run", "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_lists_the_commands_a_newcomer_needs():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {verb} " in shown for verb in ("setup", "run", "test", "lint", "bench"))
