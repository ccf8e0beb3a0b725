"""Visitors share a worker: bounded stores, runs and queue; conversations in clean text."""

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.core.errors import UserError
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.chat_caches import Conversation
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.stores import Stores
from specdemo.ui import measurements, visitors
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import HostLimits
from specdemo.ui.run_store import RunStore
from specdemo.ui.service import Service
from specdemo.ui.visitors import REMEMBERED, Visitor, Visitors
from specdemo.worker import WorkerBusy

PATIENCE = 60.0


def test_stores_of_visitors_are_bounded() -> None:
    def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[dict[str, Any]]:
        stores.drafts["learnt"] = prompt
        yield {"seen": dict(stores.drafts)}

    service = Service(ModelPool(), engine)
    asked = [("spec", Recipe(method="nasd", ngram_keep=True))]
    streams = []
    for i in range(REMEMBERED + 5):
        streams.append(service.start(asked, f"text {i}", visitor=f"visitor {i}"))
        assert streams[-1].wait(PATIENCE)
    assert len(service.visitors._visitors) == REMEMBERED
    service.worker.close()


def with_stores(service: Service) -> list[str]:
    return [name for name, visitor in service.visitors._visitors.items() if visitor.stores]


def test_bytes_of_all_stores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[dict[str, Any]]:
        if prompt:
            stores.drafts["suffix"] = SuffixDrafter(store=stores.drafts.get("suffix")).store
            for i in range(1000):
                stores.drafts["suffix"].add(i)
        yield {}

    service = Service(ModelPool(), engine)
    asked = [("spec", Recipe(method="suffix", ngram_keep=True))]
    size: list[int] = []
    for visitor, prompt in zip("abcda", ("text", "", "text", "text", "text"), strict=True):
        assert service.start(asked, prompt, visitor=visitor).wait(PATIENCE)
        size = size or [service.visitors.find("a").stores["spec"].drafts["suffix"].size_bytes]
        monkeypatch.setattr(visitors, "MAX_STORED_BYTES", 2.5 * size[0])
    # The oldest with a store was dropped, not the visitor of the run.
    assert [*with_stores(service)] == ["b", "d", "a"]
    assert service.visitors.find("a").stores["spec"].drafts["suffix"].text[:1000] == [*range(1000)]
    monkeypatch.setattr(visitors, "MAX_STORED_BYTES", 0)
    assert service.start(asked, "", visitor="d").wait(PATIENCE)
    assert [*with_stores(service)] == ["b", "d"]
    service.worker.close()


def test_rejected_runs_do_not_evict_others() -> None:
    runs = RunStore(per_network=4)
    kept = runs.new("honest", ("spec",))
    kept.records.append({"l": "spec"})
    kept.finish()
    for i in range(20):
        runs.new(f"stranger {i}", ("spec",)).finish("refused")
    assert runs.get(kept.id) is kept and len(runs) == 4
    going = [runs.new(f"busy {i}", ("spec",)) for i in range(6)]
    assert runs.get(kept.id) is None and all(runs.get(run.id) is run for run in going)  # active runs are kept


@pytest.mark.parametrize("limits", [HostLimits(per_minute=1), HostLimits(queue=1)])
def test_refused_benches_leave_the_running_one(limits: HostLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, gate, address = threading.Event(), threading.Event(), "192.0.2.1"

    def measured(*_: Any) -> Iterator[dict[str, Any]]:
        inside.set()
        assert gate.wait(PATIENCE)
        yield {}

    monkeypatch.setattr(measurements, "measure", measured)
    service = Service(ModelPool(), lambda *_: (event for event in [{}]), limits)
    bench = ([Recipe()], [Prompt("code", "code", "x")])
    former = service.measure(measurements.bench_job(service, *bench), address, "visitor")
    assert inside.wait(PATIENCE)
    if limits.queue == 1:
        service.start([("spec", Recipe())], "x")  # fills the queue
    with pytest.raises((UserError, WorkerBusy), match="1 runs"):
        service.measure(measurements.bench_job(service, *bench), address, "visitor", replaced=former)
    assert not former.stopping
    gate.set()
    assert former.wait(PATIENCE) and former.items == [{}]
    service.worker.close()


def test_a_conversation_ends_while_a_run_adds_a_lane() -> None:
    class GrowingStores(Stores):
        def without_conversation(self) -> Stores:
            lanes["ar"] = Stores()
            return super().without_conversation()

    service = Service(ModelPool(), lambda *_: iter(()))
    visitor = service.visitors.enter("visitor")
    lanes = visitor.stores = {"spec": GrowingStores(Conversation(), {"ngrams": 1})}
    visitor.end_conversation()
    assert lanes == {"spec": Stores(drafts={"ngrams": 1}), "ar": Stores()}
    service.worker.close()


def test_runs_of_unknown_visitors_do_not_stop_each_other() -> None:
    runs, stopped = RunStore(), threading.Event()
    runs.new("", ("spec",)).stop = stopped.set
    runs.new("", ("spec",))
    assert not stopped.is_set()
    runs.new("known", ("spec",)).stop = stopped.set
    runs.new("known", ("spec",))
    assert stopped.is_set()


# --- conversation in clean text ---------------------------------------------------------------------------------------


def answered(history: Any = (), how: str = "length") -> Run:
    run = Run((SPEC,), history=history)
    drafted = step(1, pieces=["x", "y"], draft=("x", "z"), accepted=(0,), tested=2, verify_s=0.01)
    absorb(run, SPEC, header(options={"chat": True}), PREFILL, drafted, end(how))
    run.finish()
    return run


def test_turns_and_footers_of_a_conversation_end_together() -> None:
    ann = Visitor()
    ann.remember("Hello", answered(history=ann.begin_turn("Hello", "new")))
    ann.remember("Go on", answered(history=ann.begin_turn("Go on", "next")))
    assert ann.last_message == "Go on" and (len(ann.messages), len(ann.footers)) == (4, 2)
    assert ann.begin_turn("Go on", "repeat") == ann.messages[:2] and ann.begin_turn("Other", "repeat") == []
    ann.remember("New", answered(history=ann.begin_turn("New", "new")))
    assert ann.last_message == "New" and (len(ann.messages), len(ann.footers)) == (2, 1)
    ann.remember("Stopped", answered(history=ann.begin_turn("Stopped", "next"), how="cancelled"))
    assert ann.last_message == "Stopped" and (len(ann.messages), len(ann.footers)) == (4, 2)
    ann.remember("Failed", answered(history=ann.begin_turn("Failed", "next"), how="error"))
    assert ann.last_message == "Stopped"
    kept = ann.stores[SPEC] = Stores(Conversation(), {"ngrams": object()})
    ann.end_conversation()
    assert ann.last_message == "" and not ann.messages and not ann.footers
    assert ann.stores == {SPEC: Stores(drafts=kept.drafts)}
    assert kept.conversation is not None  # a run uses it
    ann.remember("Hello", answered())  # of a run that began before
    assert not ann.messages and ann.begin_turn("Hello", "next") == []


def test_a_visitor_who_leaves_is_forgotten_and_the_bench_ends() -> None:
    visitors, bench = Visitors(), Mock()
    ann = visitors.enter("ann")
    ann.measurements["bench"] = bench
    assert visitors.find("ann") is visitors.enter("ann") is ann
    visitors.end_session("ann")
    visitors.end_session("nobody")
    assert visitors.find("ann") is not ann and bench.stop.call_count == 1
    assert visitors.find("ann") is not visitors.find("ann")  # a look keeps nothing
    assert visitors.enter("") is not visitors.enter("")
