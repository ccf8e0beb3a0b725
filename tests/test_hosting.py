"""The program where others run it: many visitors, processes that come and go, a Space, a container, a window."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from specdemo.core.errors import Refused
from specdemo.limits import Limits
from specdemo.models.load import Shelf
from specdemo.recipe import Recipe
from specdemo.ui.frames import Runs
from specdemo.ui.service import LONGEST_REASON, REMEMBERED, Service, reason
from specdemo.worker import Crew, Worker, WorkerBusy

PATIENCE = 30.0

asker: contextvars.ContextVar[str] = contextvars.ContextVar("asker", default="nobody")


def test_a_job_runs_in_the_context_of_whoever_submitted_it() -> None:
    def job() -> Iterator[str]:
        try:
            for _ in range(3):
                yield asker.get()
        finally:
            ended.append(asker.get())

    worker, ended = Worker(), []
    streams = {}
    for name in ("first", "second"):
        context = contextvars.copy_context()
        context.run(asker.set, name)
        streams[name] = context.run(worker.submit, job)
    assert all(stream.wait(PATIENCE) for stream in streams.values())
    worker.close()
    assert {name: set(stream.items) for name, stream in streams.items()} == {"first": {"first"}, "second": {"second"}}
    assert sorted(ended) == ["first", "second"] and asker.get() == "nobody"


def test_a_crews_jobs_do_not_wait_for_one_another() -> None:
    crew, gate, inside = Crew(2, waiting=2), threading.Event(), threading.Semaphore(0)

    def slow() -> Iterator[int]:
        inside.release()
        assert gate.wait(PATIENCE)
        yield 1

    first = crew.submit(slow)
    second = crew.submit(lambda: iter([2]))
    assert second.wait(PATIENCE) and second.items == [2] and not first.done  # while the other still waits
    busy = [crew.submit(slow)]
    assert inside.acquire(timeout=PATIENCE) and inside.acquire(timeout=PATIENCE)  # both are taken
    busy += [crew.submit(slow), crew.submit(slow)]  # one in each line
    assert crew.active == 4 and max(map(crew.ahead, busy)) == 1
    try:
        crew.submit(slow)
    except WorkerBusy as error:
        assert "1 runs are waiting already" in str(error)
    else:
        raise AssertionError("a line without an end")
    gate.set()
    assert all(stream.wait(PATIENCE) and stream.items == [1] for stream in (first, *busy))
    crew.close()


def test_a_client_with_a_new_name_every_time_fills_no_memory() -> None:
    def engine(recipe: Recipe, prompt: str, shelf: Shelf, stores: Any) -> Iterator[dict[str, Any]]:
        stores["learnt"] = prompt
        yield {"seen": dict(stores)}

    service = Service(Shelf(), engine)
    asked = [("spec", Recipe(method="nasd", ngram_keep=True))]
    streams = []
    for i in range(REMEMBERED + 5):
        streams.append(service.start(asked, f"text {i}", visitor=f"visitor {i}"))
        assert streams[-1].wait(PATIENCE)
    assert len(service._stores) == REMEMBERED
    service.worker.close()


def test_refused_presses_push_nobodys_text_out() -> None:
    runs = Runs(capacity=4)
    kept = runs.new("honest", ("spec",))
    kept.records.append({"l": "spec"})
    kept.finish()
    for i in range(20):
        runs.new(f"stranger {i}", ("spec",)).finish("refused")
    assert runs.get(kept.id) is kept and len(runs) == 4
    going = [runs.new(f"busy {i}", ("spec",)) for i in range(6)]
    assert runs.get(kept.id) is None and runs.get(going[-1].id) is going[-1]  # but the oldest goes when all are at it


def test_a_refusal_quotes_no_more_than_can_be_read() -> None:
    said = reason(Refused(f"unknown pair {'x' * 10**6!r}"))
    assert said.startswith("unknown pair 'xxx") and said.endswith(" …") and len(said) == LONGEST_REASON + 2
    assert reason(Refused("short")) == "short"


def test_the_queue_is_as_long_as_the_host_says() -> None:
    gate, service = threading.Event(), Service(Shelf(), lambda *_: closed(), Limits(queue=1))

    def closed() -> Iterator[dict[str, Any]]:
        inside.release()
        assert gate.wait(PATIENCE)
        yield {}

    inside = threading.Semaphore(0)
    streams = [service.start([("spec", Recipe())], "x")]
    assert inside.acquire(timeout=PATIENCE)  # the device is taken in mid-step: whatever comes now waits
    streams.append(service.start([("spec", Recipe())], "x"))
    try:
        service.start([("spec", Recipe())], "x")
    except WorkerBusy as error:
        assert "1 runs are waiting already" in str(error)
    else:
        raise AssertionError("a queue without an end")
    gate.set()
    assert all(stream.wait(PATIENCE) for stream in streams)
    service.worker.close()
