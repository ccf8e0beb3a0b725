"""Faults of network and service: the text equals that of an undisturbed run, or the run ends with a sentence."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.faulty_relay import FAULTS, relayed
from fakes.service_process import ServiceProcess, service_process

from specdemo.core.events import End, StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

pytestmark = [pytest.mark.slow, pytest.mark.faults]

PROMPT = "def fibonacci(n):\n"
CLOUD = CloudConfig("http://127.0.0.1:1", deadline_ms=400, lost_after_s=30)
RECIPE = Recipe(pair="bundled", method="draft", gamma=3, temperature=0.0, max_tokens=48, cloud=CLOUD)


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return ModelPool()


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with service_process() as running:
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


def remote(port: int, scheme: str = "http", **changes: object) -> Recipe:
    return replace(RECIPE, cloud=replace(CLOUD, remote=f"{scheme}://127.0.0.1:{port}", **changes))


def check(tokens: list[int], error: str | None, expected: list[int]) -> None:
    """Text is a beginning of the expected text, complete unless there is a sentence."""
    assert tokens == expected[: len(tokens)]
    assert error is None or (error.isprintable() and len(error) < 400), error
    assert error is not None or tokens == expected


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("corrupt", "withhold")])
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_of_the_connection(
    name: str, seed: int, service: ServiceProcess, pool: ModelPool, expected: list[int]
) -> None:
    with relayed(service.address, FAULTS[name], seed=seed) as relay:
        tokens, error = text(remote(relay.port), pool)
        print(name, relay.count, "faults:", error or "complete")
        assert relay.count > 0
    assert (tokens, error) == (expected, None)
    assert text(remote(service.port), pool) == (expected, None)


def test_withheld_data_end_the_run_and_the_next_run_is_correct(
    service: ServiceProcess, pool: ModelPool, expected: list[int]
) -> None:
    """Half-open connections: nothing arrives, and no end is announced."""
    with relayed(service.address, FAULTS["withhold"], share=1.0, spared=8) as relay:
        tokens, error = text(remote(relay.port, lost_after_s=2.0), pool)
    check(tokens, error, expected)
    assert error is not None and 0 < len(tokens) < len(expected)
    print("withhold:", error)
    assert text(remote(service.port), pool) == (expected, None)


@pytest.mark.parametrize("times", [1, 3])
def test_a_service_that_is_killed_and_started_again(times: int, pool: ModelPool, expected: list[int]) -> None:
    with service_process() as killed:

        def restart() -> None:
            killed.kill()
            killed.start()

        assert text(remote(killed.port), pool, dict.fromkeys(range(2, 2 + times), restart)) == (expected, None)


def certificate(folder: Path) -> tuple[str, str]:
    names = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=127.0.0.1"]
    files = ["-out", names[0], "-keyout", names[1]]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True)
    return names


@pytest.mark.parametrize("seed", [1, 2])
def test_corrupted_data_do_not_change_the_text_over_tls(
    seed: int, pool: ModelPool, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, key = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", public)
    assert ssl.create_default_context(cafile=public)
    with (
        service_process("--certificate", public, "--key", key) as service,
        relayed(service.address, FAULTS["corrupt"], seed=seed) as relay,
    ):
        tokens, error = text(remote(relay.port, "https"), pool)
        print("corrupt:", relay.count, error or "complete")
        assert relay.count > 0
        check(tokens, error, expected)
        assert text(remote(service.port, "https"), pool) == (expected, None)
