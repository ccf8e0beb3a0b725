"""Host limits, enforced on the server over HTTP: errors for one client while others are served.

The client sets its address in the header of a proxy; the server trusts that header from localhost.
"""

import json
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import gradio_client
import pytest

from benchmarks.load import frames_of_run
from e2e.limited_page import Patient, launched
from specdemo.ui.limits import PUBLIC, HostLimits

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE = 60.0
CODE = "def fibonacci(n):"


@pytest.fixture(scope="module")
def engine() -> Patient:
    return Patient()


@pytest.fixture(scope="module")
def served(engine: Patient) -> Iterator[Any]:
    limits = replace(PUBLIC, max_tokens=64, max_gamma=6, max_nodes=16, max_prompt=1000, per_minute=None)
    with launched(engine=engine, limits=limits) as page:
        yield page


def client(served: Any, address: str, at_once: int = 8) -> gradio_client.Client:
    return gradio_client.Client(
        served.url,
        verbose=False,
        max_workers=at_once,
        headers={"X-Forwarded-For": address},
        ssl_verify=False,  # reading certificates takes 20 ms per request
        analytics_enabled=False,
    )


def last_frame(url: str, **settings: Any) -> dict[str, Any]:
    """Start a run and return its last frame."""
    return json.loads([*frames_of_run(url, "session-of-a-script", settings)][-1])


def test_fifty_parallel_requests_do_not_block_another_visitor(served: Any, engine: Patient) -> None:
    crowd = client(served, "198.51.100.7", at_once=50)
    jobs = [crowd.submit("endless", api_name="/generate") for _ in range(50)]
    finished = wait([job.future for job in jobs], timeout=PATIENCE, return_when="FIRST_EXCEPTION").done
    assert finished  # the limit is reached
    lines = client(served, "203.0.113.5").submit(CODE, max_tokens=12, api_name="/generate")
    metrics = [json.loads(line) for line in lines][-1]["metrics"]
    assert metrics["tokens"] == 12  # while the other runs are active
    assert served.worker.active == PUBLIC.at_once
    engine.over.set()
    assert not wait([job.future for job in jobs], timeout=PATIENCE).not_done
    errors = [str(job.exception()) for job in jobs if job.exception()]
    assert len(errors) == 50 - PUBLIC.at_once
    assert all("you already have 2 runs in progress" in error for error in errors)
    engine.over.clear()


def test_time_limit_ends_a_run_and_keeps_its_text() -> None:
    with launched(engine=Patient(), limits=HostLimits(max_seconds=1)) as strict:
        lines = [json.loads(line) for line in client(strict, "203.0.113.5").submit("endless", api_name="/generate")]
        frame = last_frame(strict.url, prompt="endless")
    assert lines[-1]["end"] == "cancelled" and lines[-1]["error"].startswith("the time limit of 1 seconds per run")
    assert lines[-1]["metrics"]["tokens"] == len(lines) - 2 > 10
    phase, why = frame["phase"]
    assert phase == "stopped" and "the time limit of 1 seconds per run" in why and frame["over"]
