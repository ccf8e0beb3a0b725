"""Faults of a process and its machine: a sentence or the expected text, readable traces, and a correct next run."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.service_process import ROOT, service_process

from specdemo.core import trace

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PROGRAM = (sys.executable, "-m", "specdemo")
RUN = (*PROGRAM, "run", "def fibonacci(n):\n", "--pair", "bundled", "--temperature", "0", "--max-tokens", "48")
TIMEOUT_S = 300.0
MEGABYTE = 1 << 20


def run(*options: str, limits: dict[int, int] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        for number, size in (limits or {}).items():
            resource.setrlimit(number, (size, size))

    return subprocess.run(
        [*RUN, *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=limit,
    )


def tokens_of(output: str) -> list[int]:
    return [token for line in map(json.loads, output.splitlines()) for token in line.get("tokens", ())]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    return tokens_of(done.stdout)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return the sentence of a run that failed."""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("specdemo: ") and "Traceback" not in done.stderr, done.stderr
    print(last)
    return last


def test_a_killed_run_leaves_a_readable_trace(tmp_path: Path, expected: list[int]) -> None:
    path = tmp_path / "run.jsonl"
    with subprocess.Popen(
        [*RUN, "--json", "--trace", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as killed:
        lines = [killed.stdout.readline() for _ in range(5)]
        killed.kill()
    (part,) = tmp_path.iterdir()  # the trace is complete under its own name only
    (read,) = trace.read(part.read_text("utf-8"))
    shown = tokens_of("".join(lines))
    stored = [token for event in read.steps for token in event.step.tokens]
    assert part.suffix == ".part" and stored[: len(shown)] == shown and stored == expected[: len(stored)]
    assert tokens_of(run("--json").stdout) == expected


def test_a_killed_compilation_is_repeated(tmp_path: Path, expected: list[int]) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "specdemo"
    with subprocess.Popen(RUN, cwd=ROOT, env=environment, stdout=-3, stderr=-3, start_new_session=True) as killed:
        while killed.poll() is None and not list(folder.glob("tmp*/*.o")):
            with suppress(subprocess.TimeoutExpired):
                killed.wait(0.1)
        os.killpg(killed.pid, signal.SIGKILL)
    assert not list(folder.glob("native-*.so"))
    done = run("--json", XDG_CACHE_HOME=str(tmp_path))
    assert tokens_of(done.stdout) == expected
    engine = json.loads(done.stdout.splitlines()[0])["environment"]["engine"]
    assert list(folder.glob("native-*.so")), engine


def test_a_process_without_memory_ends_with_a_sentence_or_the_text(expected: list[int]) -> None:
    for megabytes in (800, 1600, 3200):
        done = run("--json", limits={resource.RLIMIT_AS: megabytes * MEGABYTE})
        if done.returncode == 0:
            assert tokens_of(done.stdout) == expected
        else:
            refused(done)
    assert tokens_of(run("--json").stdout) == expected


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 64 kB."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_for_the_trace_ends_with_a_sentence(full_disk: Path, expected: list[int]) -> None:
    path = full_disk / "run.jsonl"
    path.write_text("an earlier trace")
    done = run("--trace", str(path), "--json", "--max-tokens", "400")
    assert "free some space" in refused(done)
    assert path.read_text() == "an earlier trace" and list(full_disk.iterdir()) == [path]
    assert tokens_of(done.stdout)[: len(expected)] == expected


def test_a_full_disk_for_the_engine_and_temporary_files(full_disk: Path, expected: list[int]) -> None:
    """The run continues without the engine that cannot be stored."""
    done = run("--json", XDG_CACHE_HOME=str(full_disk), TMPDIR=str(full_disk))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    engine = json.loads(done.stdout.splitlines()[0])["environment"]["engine"]
    print(engine)
    assert "No space left" in engine
    assert len(tokens_of(done.stdout)) == len(expected)


# --- clock jumps ---------------------------------------------------------------------------------------------------


# --- slow readers --------------------------------------------------------------------------------------------------


def test_a_slow_reader_does_not_delay_other_texts(expected: list[int]) -> None:
    with service_process() as service, socket.create_connection(service.address) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"tokens": [2, 0, 2, 0], "sampling_cfg": {"temp": 1.0}, "max_tokens": 400}).encode()
        head = ["POST /v1/texts HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        slow.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        done = run("--json", "--remote", f"http://127.0.0.1:{service.port}")
        assert tokens_of(done.stdout) == expected
        received = slow.recv(12)
        assert received.startswith(b"HTTP/1.1 200")
