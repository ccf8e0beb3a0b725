"""Visitors share a worker: bounded stores, runs, queue and error messages; health."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.limits import HostLimits
from specdemo.ui.run_store import RunStore
from specdemo.ui.service import REMEMBERED, Health, Service
from specdemo.ui.streams import LONGEST_REASON, reason
from specdemo.worker import WorkerBusy

PATIENCE = 60.0


def test_stores_of_visitors_are_bounded() -> None:
    def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[dict[str, Any]]:
        stores["learnt"] = prompt
        yield {"seen": dict(stores)}

    service = Service(ModelPool(), engine)
    asked = [("spec", Recipe(method="nasd", ngram_keep=True))]
    streams = []
    for i in range(REMEMBERED + 5):
        streams.append(service.start(asked, f"text {i}", visitor=f"visitor {i}"))
        assert streams[-1].wait(PATIENCE)
    assert len(service._stores) == REMEMBERED
    service.worker.close()


def test_rejected_runs_do_not_evict_others() -> None:
    runs = RunStore(per_visitor=4)
    kept = runs.new("honest", ("spec",))
    kept.records.append({"l": "spec"})
    kept.finish()
    for i in range(20):
        runs.new(f"stranger {i}", ("spec",)).finish("refused")
    assert runs.get(kept.id) is kept and len(runs) == 4
    going = [runs.new(f"busy {i}", ("spec",)) for i in range(6)]
    assert runs.get(kept.id) is None and all(runs.get(run.id) is run for run in going)  # active runs are kept


def test_error_messages_are_truncated() -> None:
    said = reason(UserError(f"unknown pair {'x' * 10**6!r}"))
    assert said.startswith("unknown pair 'xxx") and said.endswith(" …") and len(said) == LONGEST_REASON + 2
    assert reason(UserError("short")) == "short"


def test_queue_length_follows_the_limit() -> None:
    gate, service = threading.Event(), Service(ModelPool(), lambda *_: closed(), HostLimits(queue=1))

    def closed() -> Iterator[dict[str, Any]]:
        inside.release()
        assert gate.wait(PATIENCE)
        yield {}

    inside = threading.Semaphore(0)
    streams = [service.start([("spec", Recipe())], "x")]
    assert inside.acquire(timeout=PATIENCE)  # the device is busy in the middle of a step: later runs queue
    streams.append(service.start([("spec", Recipe())], "x"))
    with pytest.raises(WorkerBusy, match="1 runs are waiting already"):
        service.start([("spec", Recipe())], "x")
    gate.set()
    assert all(stream.wait(PATIENCE) for stream in streams)
    service.worker.close()


def test_health_counts_passes_by_texts() -> None:
    service = Service(ModelPool(), lambda *_: iter(()))
    service.last_token = time.monotonic()
    service.worker.texts_per_pass.update({8: 3, 1: 2})
    (route,) = Health(service, Recipe(pair="bundled")).routes()
    answer = asyncio.run(route.endpoint(None))
    assert answer.status_code == 200 and json.loads(answer.body)["texts_per_pass"] == {"1": 2, "8": 3}
    service.worker.close()


def test_recent_runs_count_as_healthy() -> None:
    service = Service(ModelPool(), lambda *_: iter(()))
    look = Health(service, Recipe(pair="bundled"), lately_s=100, patience_s=PATIENCE)
    assert not look.fresh and look.age_s is None
    service.last_token = time.monotonic() - 99
    assert look.fresh
    service.last_token = time.monotonic() - 101
    assert not look.fresh
    alive, why = asyncio.run(look.look())
    assert not alive and "no token" in why  # the probe ended without a token
    service.worker.close()
