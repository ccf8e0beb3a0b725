"""Visitors share a worker and models: bounded stores, runs and queue; conversations; unloading of models."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.page import form_fields, form_markup
from fakes.traces import PREFILL, absorb, end, header, step

from specdemo.core.errors import UserError
from specdemo.core.events import End, Event
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.chat_caches import Stores
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.local_service import LocalServices, ServiceProcess
from specdemo.ui import service as service_module
from specdemo.ui import visitors
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, SPEC, lanes_of
from specdemo.ui.limits import PUBLIC, HostLimits, read_limits
from specdemo.ui.page import build
from specdemo.ui.run_store import RunStore
from specdemo.ui.service import PROBE, WARM_UP_TOKENS, Service, bench_job
from specdemo.ui.visitors import REMEMBERED, Visitor, Visitors
from specdemo.worker import WorkerBusy

PATIENCE = 60.0


def test_bytes_of_all_stores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[dict[str, Any]]:
        if prompt:
            stores.drafts["suffix"] = SuffixDrafter(store=stores.drafts.get("suffix")).store
            for i in range(1000):
                stores.drafts["suffix"].add(i)
        yield {}

    service = Service(ModelPool(), engine)

    def run(visitor: str, prompt: str) -> None:
        recipe = Recipe(method="suffix", ngram_keep=True)
        assert service.start([("spec", recipe)], prompt, visitor=visitor).wait(PATIENCE)

    def with_stores() -> str:
        return "".join(name for name in "abcd" if service.visitors.find(name).stores)

    run("a", "text")
    store = service.visitors.find("a").stores["spec"].drafts["suffix"]
    monkeypatch.setattr(visitors, "MAX_STORED_BYTES", 2.5 * store.size_bytes)
    for visitor, prompt in zip("bcda", ("", "text", "text", "text"), strict=True):
        run(visitor, prompt)
    assert with_stores() == "abd"  # the oldest with a store was dropped, not the visitor of the run
    assert service.visitors.find("a").stores["spec"].drafts["suffix"].text[:1000] == [*range(1000)]
    monkeypatch.setattr(visitors, "MAX_STORED_BYTES", 0)
    run("d", "")
    assert with_stores() == "bd"
    service.worker.close()


@pytest.mark.parametrize("limits", [HostLimits(per_minute=1), HostLimits(queue=1)])
def test_refused_benches_leave_the_running_one(limits: HostLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, gate, address = threading.Event(), threading.Event(), "192.0.2.1"

    def measured(*_: Any) -> Iterator[dict[str, Any]]:
        inside.set()
        assert gate.wait(PATIENCE)
        yield {}

    monkeypatch.setattr(service_module, "measure", measured)
    service = Service(ModelPool(), lambda *_: (event for event in [{}]), limits)
    bench = ([Recipe()], [Prompt("code", "code", "x")])
    former = service.measure(bench_job(service, *bench), address, "visitor")
    assert inside.wait(PATIENCE)
    if limits.queue == 1:
        service.start([("spec", Recipe())], "x")  # fills the queue
    with pytest.raises((UserError, WorkerBusy), match="1 runs"):
        service.measure(bench_job(service, *bench), address, "visitor", replaced=former)
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
    visitor = service.visitors.get_or_add("visitor")
    lanes = visitor.stores = {"spec": GrowingStores({"ngrams": 1}, datetime.now())}
    visitor.end_conversation()
    assert {lane: (stores.drafts, stores.began) for lane, stores in lanes.items()} == {
        "spec": ({"ngrams": 1}, None),
        "ar": ({}, None),
    }
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
    kept = ann.stores[SPEC] = Stores({"ngrams": object()}, datetime.now())
    ann.end_conversation()
    assert ann.last_message == "" and not ann.messages and not ann.footers
    assert ann.stores[SPEC].drafts == kept.drafts and ann.stores[SPEC].began is None
    assert kept.began is not None  # a run uses it
    ann.remember("Hello", answered())  # of a run that began before
    assert not ann.messages and ann.begin_turn("Hello", "next") == []


def test_a_visitor_who_leaves_is_forgotten_and_the_bench_ends() -> None:
    visitors, bench = Visitors(), Mock()
    ann = visitors.get_or_add("ann")
    ann.measurements["bench"] = bench
    assert visitors.find("ann") is visitors.get_or_add("ann") is ann
    visitors.end_session("ann")
    visitors.end_session("nobody")
    assert visitors.find("ann") is not ann and bench.stop.call_count == 1
    assert visitors.find("ann") is not visitors.find("ann")  # a look keeps nothing
    assert visitors.get_or_add("") is not visitors.get_or_add("")
    first = visitors.get_or_add("first")
    for number in range(REMEMBERED):
        visitors.get_or_add(f"visitor {number}")
    assert visitors.find("first") is not first


# --- models in the service of the page --------------------------------------------------------------------------------


class Watched(ModelPool):
    """Model pool that signals each tidy-up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tidied, self.gone = threading.Event(), 0

    def unload_idle(self) -> int:
        self.gone = super().unload_idle()
        self.tidied.set()
        return self.gone


def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
    pool.get(plan_run(recipe).target)
    yield End("stop")


def test_a_comparison_begins_with_a_warm_up_and_the_speculative_lane() -> None:
    decoded: list[tuple[str, str, int]] = []

    def recorded(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        decoded.append((prompt, recipe.method, recipe.max_tokens))
        yield End("stop")

    service = Service(ModelPool(), recorded)
    try:
        lanes = lanes_of(Recipe(max_tokens=50), compare=True)
        stream = service.start([*lanes.items()], "text", warm_up=True)
        assert stream.wait(60)
        ends = [lane for lane, event in stream.items if isinstance(event, End)]
    finally:
        service.worker.close()
    assert ends == [SPEC, BASELINE]
    assert decoded[:2] == [(PROBE, method, WARM_UP_TOKENS) for method in ("draft", "ar")]
    assert decoded[2:] == [("text", method, 50) for method in ("draft", "ar")]


@pytest.mark.slow
def test_visitors_can_neither_unload_shared_models_nor_choose_services() -> None:
    for limits, offered in (
        (read_limits({"SPECDEMO_PUBLIC": "1", "SPECDEMO_QUEUE": "4"}), False),
        (HostLimits(), True),
    ):
        page = build(limits=limits, examples=None)
        page.worker.close()
        assert ('id="unload"' in form_markup(page.blocks)) == offered
        fields = form_fields(page.blocks).keys()
        assert "quantization" in fields and ({"mode", "remote", "rtt_ms"} <= fields) == offered
    pool = ModelPool()
    service = Service(pool, engine, PUBLIC)
    try:
        pool.get(ModelSpec(PAIRS["bundled"].drafter, device="cpu"))
        with pytest.raises(UserError, match="all visitors share the models"):
            asyncio.run(service.unload())
        assert pool.weight_bytes
    finally:
        service.worker.close()


@pytest.mark.slow
def test_idle_models_are_unloaded_automatically() -> None:
    pool = Watched(idle_s=0.05)
    service = Service(pool, engine)
    try:
        recipe = Recipe(target=PAIRS["bundled"].drafter, method="ar", device="cpu")
        stream = service.start([("spec", recipe)], "def")
        assert stream.wait(60) and stream.error is None
        assert pool.tidied.wait(60) and pool.gone == 1
    finally:
        service.worker.close()


# --- local verification services ------------------------------------------------------------------------------------


class FakeProcesses:
    """Start processes that print an address and run until stopped."""

    def __init__(self) -> None:
        self.started: list[ServiceProcess] = []

    def __call__(self, spec: ModelSpec, count: int) -> ServiceProcess:
        address = f"http://{spec.name}:{len(self.started)}"
        script = f"import sys; print('listening on {address}', flush=True); sys.stdin.read()"
        self.started.append(ServiceProcess([sys.executable, "-S", "-c", script]))
        return self.started[-1]


ONE, TWO = ModelSpec("one"), ModelSpec("two")


def test_services_are_shared_by_target_and_stopped_when_idle() -> None:
    fake = FakeProcesses()
    services = LocalServices(start=fake)
    with services.running({ONE: 1}) as urls, services.running({ONE: 1}) as same, services.running({}) as none:
        assert urls == same == {ONE: "http://one:0"} and none == {} and len(fake.started) == 1
    with services.running({ONE: 1}):
        assert len(fake.started) == 1  # reused
        with services.running({TWO: 1}) as other:
            assert other == {TWO: "http://two:1"} and fake.started[0].alive
    fake.started[0].process.kill()
    fake.started[0].process.wait()
    with services.running({ONE: 1}):
        assert len(fake.started) == 3 and not fake.started[1].alive  # dead: replaced; idle: stopped
    services.close()
    assert not any(process.alive for process in fake.started)


def test_a_target_may_have_several_services() -> None:
    """A killed service is replaced at the next run; others than the wanted ones are stopped."""
    fake = FakeProcesses()
    services = LocalServices(start=fake)
    with services.running({ONE: 2}) as urls:
        assert urls == {ONE: "http://one:0 http://one:1"}
        services.kill("host:1")
        assert fake.started[1].process.wait(PATIENCE) == -signal.SIGKILL and fake.started[0].alive
        services.kill("host:1")  # a second click
        for name in ("host:7", ""):
            with pytest.raises(UserError, match="no local service has verified a step of this run"):
                services.kill(name)
    with services.running({ONE: 2}) as urls:
        assert urls == {ONE: "http://one:0 http://one:2"}
    with services.running({ONE: 1}):
        assert [process.alive for process in fake.started] == [True, False, False]
    services.close()


def test_failed_start_reports_the_error() -> None:
    script = "import sys; print('warning: x', file=sys.stderr); sys.exit('specdemo: there is no model of that name')"
    services = LocalServices(start=lambda spec, count: ServiceProcess([sys.executable, "-S", "-c", script]))
    with pytest.raises(UserError, match=r"did not start: there is no model of that name$"), services.running({ONE: 1}):
        pass
