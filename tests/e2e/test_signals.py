"""Termination by signals: exit code, trace, connections. The parent process ignores SIGINT, like background jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fakes.dockerfile import dockerfile
from gradio_client import Client

from specdemo.signals import handle_signals

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
PROMPT = "def fibonacci(n):"
IGNORE_SIGINT = ("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


def start(*arguments: str, launcher: Sequence[str] = IGNORE_SIGINT) -> subprocess.Popen[str]:
    """Start a program without a display."""
    return subprocess.Popen(
        [*launcher, sys.executable, "-u", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(program: subprocess.Popen[str], *prefixes: str) -> list[str]:
    """Wait for a line with each prefix, in any order."""
    lines = dict.fromkeys(prefixes, "")
    while not all(lines.values()):
        line = program.stdout.readline()
        assert line, lines
        lines |= {prefix: line for prefix in prefixes if line.startswith(prefix)}
    return list(lines.values())


def end_run(program: subprocess.Popen[str], url: str, number: signal.Signals) -> None:
    """Send a signal during a run of the page: the run ends with a trace line, and the page with exit code 0."""
    tokens = 500
    job = Client(url, verbose=False).submit(
        PROMPT, pair="bundled", method="ar", max_tokens=tokens, api_name="/generate"
    )
    lines = iter(job)
    next(lines)
    program.send_signal(number)
    last = json.loads(list(lines)[-1])
    assert last["end"] == "cancelled" and 0 < last["metrics"]["tokens"] < tokens
    assert program.wait(TIMEOUT_S) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", urlsplit(url).port)) != 0


def test_the_page_ends_runs_with_a_trace_line_and_exits_0() -> None:
    """Without a display, `--window` falls back to the browser."""
    with start("app.py", "--window", "--pair", "bundled", "--no-browser", "--port", free_port()) as program:
        try:
            ready, warning = printed(program, "specdemo is ready", "No window")
            assert warning == "No window: no display is available. The page is available in the browser.\n"
            end_run(program, re.search(r"http://\S+", ready).group(), signal.SIGINT)
        finally:
            program.kill()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_the_program_of_the_image_is_healthy_and_ends_on_the_signal_of_docker_stop(tmp_path: Path) -> None:
    """Files, start command and health check are those of the Dockerfile; only the port differs."""
    rules = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    left_out = [Path(rule).name for rule in rules if rule and rule[0] not in "!#" and rule != "*"]
    for rule in rules:
        if rule.startswith("!") and (source := ROOT / rule[1:]).is_dir():
            shutil.copytree(source, tmp_path / rule[1:], ignore=shutil.ignore_patterns(*left_out))
        elif rule.startswith("!"):
            shutil.copy(source, tmp_path)
    steps, port = dict(dockerfile()), free_port()
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
    command = ("-m", "specdemo", "run", PROMPT, "--pair", "bundled", "--max-tokens", "2000", "--json")
    with start(*command, "--trace", str(trace)) as program:
        try:
            steps = (line for line in program.stdout if '"i":' in line)
            next(steps)
            program.terminate()
            program.communicate()
            assert program.wait(TIMEOUT_S) == 130
        finally:
            program.kill()
    lines = [json.loads(line) for line in trace.read_text("utf-8").splitlines()]
    assert "specdemo" in lines[0] and lines[-1]["end"] == "cancelled" and lines[-1]["metrics"]["tokens"] > 0


def test_handlers_are_restored_after_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    with handle_signals(lambda number, frame: received.append(number), signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_measurement_ends_without_a_traceback(number: signal.Signals) -> None:
    with start("-m", "specdemo", "bench", "--pair", "bundled", "--repeat", "9") as program:
        try:
            next(line for line in iter(lambda: program.stdout.read(8), "") if line)
            program.send_signal(number)
            output, _ = program.communicate(timeout=TIMEOUT_S)
            assert program.returncode == 130 and "Traceback" not in output
        finally:
            program.kill()
