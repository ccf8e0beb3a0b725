"""Termination by signals: exit code, trace, connections. The parent process ignores SIGINT, like background jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_page_ends_runs_with_a_trace_line_and_exits_0(number: signal.Signals) -> None:
    """On SIGTERM also with `--window`, which falls back to the browser."""
    window = ["--window"] if number == signal.SIGTERM else []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with start("app.py", *window, "--pair", "bundled", "--no-browser", "--port", str(port)) as program:
        try:
            printed = dict.fromkeys(["specdemo is ready", *(["No window"] if window else [])], "")
            while not all(printed.values()):
                line = program.stdout.readline()
                assert line, printed
                printed |= {prefix: line for prefix in printed if line.startswith(prefix)}
            if window:
                warning = printed["No window"]
                assert warning == "No window: no display is available. The page is available in the browser.\n"
            ready = printed["specdemo is ready"]
            client = Client(re.search(r"http://\S+", ready).group(), verbose=False)
            job = client.submit(PROMPT, method="ar", max_tokens=2000, api_name="/generate")
            lines = iter(job)
            next(lines)
            program.send_signal(number)
            last = json.loads(list(lines)[-1])
            assert last["end"] == "cancelled" and last["metrics"]["tokens"] > 0
            assert program.wait(TIMEOUT_S) == 0
        finally:
            program.kill()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


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
