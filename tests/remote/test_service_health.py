"""Health of a service: idle, busy, and with jobs that do not advance; the steps it reports."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fakes.enumeration import PROMPT, SMALL, VOCAB
from fakes.remote import DirectClient, contexts, verify_config
from fakes.tiny_models import run

from specdemo.core.policies import Fixed
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.drafters.model import ModelDrafter
from specdemo.remote.client import RemoteVerifier
from specdemo.remote.health import STALLED_S, ServiceHealth, Unhealthy
from specdemo.remote.protocol import VerifyRequest
from specdemo.worker import Worker

pytestmark = pytest.mark.slow


class Clock:
    """Time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(clock: Clock) -> Iterator[Worker]:
    opened = Worker(clock=clock)
    yield opened
    opened.close()


def test_an_idle_service_decodes_a_token(worker: Worker) -> None:
    cloud = contexts()
    ServiceHealth(worker, cloud).check()
    assert sum(worker.texts_per_pass.values()) == 0 and len(cloud) == 0 and worker.active == 0

    def broken() -> Any:
        raise RuntimeError("out of memory")

    cloud.make_cache = broken
    with pytest.raises(Unhealthy, match="an idle service cannot decode a token: out of memory"):
        ServiceHealth(worker, cloud).check()


def test_a_busy_service_is_healthy_while_jobs_advance(worker: Worker, clock: Clock) -> None:
    """Checks do not wait for the job."""
    health, turns, advanced = ServiceHealth(worker, contexts()), threading.Semaphore(0), threading.Semaphore(0)

    def job() -> Iterator[None]:
        for _ in range(3):
            turns.acquire()
            yield

    clock.now = 1000.0  # idle until now
    stream = worker.submit(job, advanced.release)
    for _ in range(2):
        clock.now += STALLED_S - 1
        health.check()
        turns.release()
        advanced.acquire()
    clock.now += STALLED_S
    with pytest.raises(Unhealthy, match="no step was completed for 25 s: the device does not respond"):
        health.check()
    turns.release()
    stream.wait()
    assert worker.stalled_s == 0


def test_a_probe_that_hangs_is_unhealthy() -> None:
    """The clock advances with each look at it."""
    cloud, release = contexts(), threading.Event()
    make = cloud.make_cache

    def hang() -> Any:
        release.wait()
        return make()

    cloud.make_cache = hang
    with closing(Worker(clock=itertools.count(0.0, STALLED_S).__next__)) as worker:
        with pytest.raises(Unhealthy, match="no step was completed"):
            ServiceHealth(worker, cloud, patience_s=0.1).check()
        release.set()


def test_each_step_is_reported_once() -> None:
    """Requests for rows and repetitions of a request are no steps."""
    seen: list[VerifyRequest] = []
    client = DirectClient(contexts(observe=lambda request, response: seen.append(request)))
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(3, "draft"), VOCAB)
    verifier = RemoteVerifier(client, verify_config(SamplingParams(), seed=3))  # type: ignore[arg-type]
    steps = run(PROMPT, verifier, drafter, Fixed(3), 12)
    client.cloud.verify(client.sent[-1])
    assert len(client.sent) > len(steps)
    assert [request.step for request in seen] == list(range(len(steps)))
    assert [bool(request.base) for request in seen] == [False, *[True] * (len(steps) - 1)]
