"""Termination by signals: exit code, trace, connections. The parent process ignores SIGINT, like background jobs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.forked_process import ForkedProcess, page, terminal, with_hub, without_sigint
from fakes.http_server import free_port
from fakes.hub_server import Faults, serving
from fakes.tiny_models import byte_level_tokenizer, save_model
from gradio_client import Client

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
PROMPT = "def fibonacci(n):"

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


def forked(program: Callable[..., None], *arguments: Any, **environment: str) -> closing[ForkedProcess]:
    return closing(ForkedProcess(without_sigint, program, *arguments, errors_in_output=True, **environment))


def printed(program: subprocess.Popen[str] | ForkedProcess, *prefixes: str) -> list[str]:
    """Wait for a line with each prefix, in any order."""
    lines = dict.fromkeys(prefixes, "")
    while not all(lines.values()):
        line = program.stdout.readline()
        assert line, lines
        lines |= {prefix: line for prefix in prefixes if line.startswith(prefix)}
    return list(lines.values())


def end_run(program: subprocess.Popen[str] | ForkedProcess, url: str, number: signal.Signals) -> None:
    """Send a signal during a run of the page: the run ends with a trace line, and the page with exit code 0."""
    tokens = 1000
    job = Client(url, verbose=False, ssl_verify=False).submit(
        PROMPT, pair="bundled", method="ar", max_tokens=tokens, api_name="/generate"
    )
    lines = iter(job)
    next(line for line in lines if "i" in json.loads(line))  # the first step
    program.send_signal(number)
    last = json.loads(list(lines)[-1])
    assert last["end"] == "cancelled" and 0 < last["metrics"]["tokens"] < tokens
    assert program.wait() == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", urlsplit(url).port)) != 0


def test_the_page_ends_runs_with_a_trace_line_and_exits_0() -> None:
    """Without a display, `--window` falls back to the browser."""
    with forked(page, "--window", "--pair", "bundled", "--no-browser", "--port", str(free_port())) as program:
        ready, warning = printed(program, "specdemo is ready", "No window")
        assert warning == "No window: no display is available. The page is available in the browser.\n"
        end_run(program, re.search(r"http://\S+", ready).group(), signal.SIGINT)


@pytest.mark.exhaustive
def test_the_program_of_the_image_is_healthy_and_ends_on_the_signal_of_docker_stop(tmp_path: Path) -> None:
    """Files, start command and health check are those of the Dockerfile; only the port differs."""
    rules = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    left_out = [Path(rule).name for rule in rules if rule and rule[0] not in "!#" and rule != "*"]
    left_out.remove("__pycache__")  # compiling takes seconds
    for rule in rules:
        if rule.startswith("!") and (source := ROOT / rule[1:]).is_dir():
            shutil.copytree(source, tmp_path / rule[1:], ignore=shutil.ignore_patterns(*left_out))
        elif rule.startswith("!"):
            shutil.copy(source, tmp_path)
    joined = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text("utf-8"))
    steps = dict(re.findall(r"^([A-Z]+) (.*)", joined, re.MULTILINE))
    port = str(free_port())
    commands = (json.loads(steps[name].partition("CMD ")[2] or steps[name]) for name in ("CMD", "HEALTHCHECK"))
    command, check = ([sys.executable, *(word.replace("7860", port) for word in words[1:])] for words in commands)
    environment = {**os.environ, "SPECDEMO_PUBLIC": "1", "PYTHONUNBUFFERED": "1", "HF_HOME": str(tmp_path / "hub")}
    environment.pop("PYTHONPATH", None)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as program:
        try:
            printed(program, "specdemo is ready")
            subprocess.run(check, cwd=tmp_path, check=True, timeout=60)
            assert "STOPSIGNAL" not in steps
            end_run(program, f"http://127.0.0.1:{port}/", signal.SIGTERM)
        finally:
            program.kill()


def test_the_terminal_writes_the_last_trace_line_on_sigterm(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with forked(terminal, *RUN, "--max-tokens", "2000", "--json", "--trace", str(trace)) as program:
        steps = (line for line in program.stdout if '"i":' in line)
        next(steps)
        program.send_signal(signal.SIGTERM)
        program.communicate()
        assert program.wait() == 130
    lines = [json.loads(line) for line in trace.read_text("utf-8").splitlines()]
    assert "specdemo" in lines[0] and lines[-1]["end"] == "cancelled" and lines[-1]["metrics"]["tokens"] > 0


SECOND = """
import os, signal
from specdemo.signals import handle_signals
with handle_signals(lambda number, frame: print("first", flush=True), signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached", flush=True)
"""


def test_the_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGTERM and done.stdout == "first\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_measurement_ends_without_a_traceback(number: signal.Signals) -> None:
    with forked(terminal, "bench", "--pair", "bundled", "--repeat", "9") as program:
        assert program.stdout.read(8)
        end_silently(program, number, 130)


IMPORTS = """
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["specdemo", *{command}]
from specdemo.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("run x", "specdemo.cli"),
        ("prove", "torch"),
        *(
            pytest.param("run x", name, marks=pytest.mark.exhaustive)
            for name in ("specdemo.signals", "torch", "numpy", "transformers")
        ),
    ],
)
def test_a_signal_during_imports_ends_the_process_at_once(command: str, name: str) -> None:
    program = IMPORTS.format(name=name, command=[*command.split(), "--pair", "bundled"])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 130 and "Traceback" not in done.stderr


# --- phases that wait for other processes ---------------------------------------------------------------------------

RUN = ("run", PROMPT, "--pair", "bundled")
PAGE = ("--pair", "bundled", "--no-browser")
COMPILER = "import socket; socket.create_connection(('127.0.0.1', {})).recv(1)"


def end_silently(program: subprocess.Popen[str] | ForkedProcess, number: signal.Signals, code: int) -> None:
    """Send a signal: the program ends with this exit code and without a traceback."""
    program.send_signal(number)
    output, _ = program.communicate()
    assert program.wait() == code and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("program", "command", "number", "code"), [(terminal, RUN, signal.SIGTERM, 130), (page, PAGE, signal.SIGINT, 0)]
)
def test_a_signal_ends_a_compilation_and_its_compilers(
    program: Callable[..., None], command: tuple[str, ...], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Each compiler holds a connection until it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        compiler = tmp_path / "cc"
        script = COMPILER.format(server.getsockname()[1])
        compiler.write_text(f'#!/bin/sh\n{sys.executable} -c "{script}" & wait\n')
        compiler.chmod(0o700)
        page_only = ("--port", str(free_port())) if program is page else ()
        with forked(program, *command, *page_only, CC=str(compiler), XDG_CACHE_HOME=str(tmp_path)) as process:
            connections = [server.accept()[0] for _ in range(2)]
            end_silently(process, number, code)
    for connection in connections:
        with connection:
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(1) == b""
    assert not [path for path in (tmp_path / "specdemo").iterdir() if path.suffix == ".so"]


def test_a_signal_ends_a_download(tmp_path: Path) -> None:
    save_model(tmp_path / "served/tiny/target", byte_level_tokenizer())
    with serving(tmp_path / "served") as hub:
        hub.faults = Faults(held_after=1000)
        command = ("bench", "--target", "tiny/target", "--method", "ar")
        with forked(with_hub, terminal, *command, HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path)) as program:
            assert hub.faults.held.wait(TIMEOUT_S)
            end_silently(program, signal.SIGINT, 130)
