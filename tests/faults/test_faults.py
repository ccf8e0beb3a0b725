"""Faults of network, service, process and disk: the text of an undisturbed run, or a sentence."""

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.relay import Faults, relay
from fakes.services import ServiceProcess

from specdemo.core import trace
from specdemo.core.events import End, StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
PROMPT = "def fibonacci(n):\n"
CLOUD = CloudConfig("http://127.0.0.1:1", deadline_ms=400, lost_after_s=30)
RECIPE = Recipe(pair="bundled", method="draft", gamma=3, temperature=0.0, max_tokens=48, cloud=CLOUD)
RUN = (sys.executable, "-m", "specdemo", "run", PROMPT, "--pair", "bundled", "--temperature", "0", "--max-tokens", "48")


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with closing(ServiceProcess()) as running:
        yield running


@pytest.fixture(scope="module")
def expected(pool: ModelPool) -> list[int]:
    return text(replace(RECIPE, method="ar", cloud=None), pool)[0]


def text(recipe: Recipe, pool: ModelPool, at_step: dict[int, object] | None = None) -> tuple[list[int], str | None]:
    """Return the tokens and the error of a run; `at_step`: functions to call after a step."""
    tokens: list[int] = []
    for event in generate(recipe, PROMPT, pool):
        if isinstance(event, StepEvent):
            tokens += event.step.tokens
            if at_step and (call := at_step.pop(event.step.i, None)):
                call()
        if isinstance(event, End):
            return tokens, event.error
    raise AssertionError("the run has no end")


def remote(url: str, **changes: object) -> Recipe:
    return replace(RECIPE, cloud=replace(CLOUD, remote=url, **changes))


# --- network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["drop", "truncate", "delay", "duplicate"])
def test_faults_of_the_connection(
    name: str, seed: int, service: ServiceProcess, pool: ModelPool, expected: list[int]
) -> None:
    faults = Faults(name, seed)
    with relay(service.url, faults) as relayed:
        relayed.counting = True
        assert text(remote(relayed.url), pool) == (expected, None) and faults.count > 0
    assert text(remote(service.url), pool) == (expected, None)


def test_withheld_data_end_the_run_and_the_next_run_is_correct(
    service: ServiceProcess, pool: ModelPool, expected: list[int]
) -> None:
    """Half-open connections: no data arrive, and no end is announced."""
    with relay(service.url, Faults("withhold", 1, share=1.0, spared=8)) as relayed:
        relayed.counting = True
        tokens, error = text(remote(relayed.url, lost_after_s=2.0), pool)
    assert error and error.isprintable() and len(error) < 400
    assert 0 < len(tokens) < len(expected) and tokens == expected[: len(tokens)]
    assert text(remote(service.url), pool) == (expected, None)


@pytest.mark.parametrize("times", [1, 3])
def test_a_service_that_is_killed_and_started_again(times: int, pool: ModelPool, expected: list[int]) -> None:
    with closing(ServiceProcess()) as killed:
        restarts = dict.fromkeys(range(2, 2 + times), killed.restart)
        assert text(remote(killed.url), pool, restarts) == (expected, None)


@pytest.mark.parametrize("seed", [1, 2])
def test_corrupted_data_do_not_change_the_text_over_tls(
    seed: int, pool: ModelPool, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=127.0.0.1"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", public, "-keyout", key]
    subprocess.run([*command, *files], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", public)
    assert ssl.create_default_context(cafile=public)
    faults = Faults("corrupt", seed, spared=16)  # handshake and description
    with (
        closing(ServiceProcess("--certificate", public, "--key", key)) as service,
        relay(service.url, faults) as relayed,
    ):
        relayed.counting = True
        tokens, error = text(remote(relayed.url.replace("http", "https")), pool)
        assert faults.count > 0 and tokens == expected[: len(tokens)]
        assert error or tokens == expected
        assert text(remote(service.url), pool) == (expected, None)


def test_a_slow_reader_does_not_delay_other_texts(
    service: ServiceProcess, pool: ModelPool, expected: list[int]
) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"tokens": [2, 0, 2, 0], "sampling_cfg": {"temp": 1.0}, "max_tokens": 400}).encode()
        head = ["POST /v1/texts HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        slow.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        assert text(remote(service.url), pool) == (expected, None)
        assert slow.recv(12).startswith(b"HTTP/1.1 200")


# --- process and disk --------------------------------------------------------------------------------------------


def run(*options: str, memory: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program, with at most `memory` bytes of address space."""

    def limit() -> None:
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    variables = {**os.environ, **environment}
    command = [*RUN, "--json", *options]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, preexec_fn=limit
    )


def tokens_of(output: str) -> list[int]:
    return [token for line in map(json.loads, output.splitlines()) for token in line.get("tokens", ())]


def test_a_killed_run_leaves_a_readable_trace(tmp_path: Path, expected: list[int]) -> None:
    command = [*RUN, "--json", "--trace", str(tmp_path / "run.jsonl")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        lines = [killed.stdout.readline() for _ in range(5)]
        killed.kill()
    (part,) = tmp_path.iterdir()  # the trace is complete under its own name only
    (read,) = trace.read(part.read_text("utf-8"))
    shown = tokens_of("".join(lines))
    stored = [token for event in read.steps for token in event.step.tokens]
    assert part.suffix == ".part" and stored[: len(shown)] == shown and stored == expected[: len(stored)]
    assert tokens_of(run().stdout) == expected


def test_a_killed_compilation_is_repeated(tmp_path: Path, expected: list[int]) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    folder = tmp_path / "specdemo"
    with subprocess.Popen(RUN, cwd=ROOT, env=environment, stdout=-3, stderr=-3, start_new_session=True) as killed:
        while killed.poll() is None and not list(folder.glob("tmp*/*.o")):
            with suppress(subprocess.TimeoutExpired):
                killed.wait(0.1)
        os.killpg(killed.pid, signal.SIGKILL)
    assert not list(folder.glob("native-*.so"))
    assert tokens_of(run(XDG_CACHE_HOME=str(tmp_path)).stdout) == expected
    assert list(folder.glob("native-*.so"))


def test_a_process_without_memory_ends_with_a_sentence_or_the_text(expected: list[int]) -> None:
    for megabytes in (800, 1600, 3200):
        done = run(memory=megabytes << 20)
        if done.returncode == 0:
            assert tokens_of(done.stdout) == expected
        else:
            assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
            assert done.stderr.strip().splitlines()[-1].startswith("specdemo: ")
    assert tokens_of(run().stdout) == expected


def test_a_full_disk_for_the_engine_and_temporary_files(tmp_path: Path, expected: list[int]) -> None:
    """The run continues without the engine that cannot be stored."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    done = run(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "No space left" in json.loads(done.stdout.splitlines()[0])["environment"]["engine"]
    assert len(tokens_of(done.stdout)) == len(expected)
