"""Hosting: many visitors, worker processes, Hugging Face Spaces, containers, desktop window."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import io
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.trace_lines import events_of
from fakes.trace_records import step
from fakes.zero_gpu import Forking, untouched
from PIL import Image

import app
from specdemo.core.errors import UserError
from specdemo.core.events import Event, Header, Loading, StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui import desktop_window as window
from specdemo.ui import zero_gpu as zero
from specdemo.ui.limits import HostLimits
from specdemo.ui.page import build, launch_options
from specdemo.ui.run_store import RunStore
from specdemo.ui.service import LATELY_S, REMEMBERED, Health, Service
from specdemo.ui.streams import LONGEST_REASON, drain, reason
from specdemo.ui.theme import SESSION_CAPACITY
from specdemo.worker import Worker, WorkerBusy, WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0

asker: contextvars.ContextVar[str] = contextvars.ContextVar("asker", default="nobody")


def test_jobs_run_in_the_context_of_the_submitter() -> None:
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


def test_jobs_of_a_worker_group_are_independent() -> None:
    crew, gate, inside = WorkerGroup(2, waiting=2), threading.Event(), threading.Semaphore(0)

    def slow() -> Iterator[int]:
        inside.release()
        assert gate.wait(PATIENCE)
        yield 1

    first = crew.submit(slow)
    second = crew.submit(lambda: iter([2]))
    assert second.wait(PATIENCE) and second.items == [2] and not first.done  # while the first run is still blocked
    busy = [crew.submit(slow)]
    assert inside.acquire(timeout=PATIENCE) and inside.acquire(timeout=PATIENCE)  # both workers are busy
    busy += [crew.submit(slow), crew.submit(slow)]  # one more run per queue
    assert crew.active == 4 and max(map(crew.ahead, busy)) == 1
    with pytest.raises(WorkerBusy, match="1 runs are waiting already"):
        crew.submit(slow)
    gate.set()
    assert all(stream.wait(PATIENCE) and stream.items == [1] for stream in (first, *busy))
    crew.close()


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


# --- ZeroGPU: a process for every run ---

forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
RECIPE = Recipe(pair="bundled", temperature=0.0, max_tokens=24)
CODE = "def fibonacci(n):"


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return zero.loaded([RECIPE])


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [token for event in events if isinstance(event, StepEvent) for token in event.step.tokens]


@pytest.mark.parametrize("package", [False, True][: 1 + (find_spec("spaces") is not None)])
def test_decorator_has_no_effect_without_zerogpu(package: bool, pool: ModelPool) -> None:
    """Neither with the fake nor, if the package is installed, with the real decorator."""
    events = list(zero.on(zero.decorator() if package else untouched, pool)(RECIPE, CODE, ModelPool(), {}))
    assert events[0] == Loading("waiting for a GPU") and isinstance(events[1], Header)
    assert tokens_of(events) == tokens_of(generate(RECIPE, CODE, pool)) and events[-1].reason == "length"


def test_the_page_of_a_zerogpu_space_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "decorator", lambda: untouched)
    limits = HostLimits(pairs=("bundled",))
    page = build(limits=limits, **zero.hosted(limits, "cpu"))
    assert isinstance(page.worker, WorkerGroup)
    page.worker.close()


@forks
def test_a_run_in_its_own_process_gives_the_same_text(pool: ModelPool) -> None:
    def telling(*asked: Any) -> Iterator[Event]:
        yield Loading("process", os.getpid())
        yield from generate(*asked)

    gpu = Forking()
    events = list(zero.on(gpu, pool, telling)(RECIPE, CODE, ModelPool(), {}))
    assert tokens_of(events) == tokens_of(generate(RECIPE, CODE, pool)) != []
    assert events[1] == Loading("process", gpu.processes[0].pid) != Loading("process", os.getpid())
    assert gpu.processes[0].exitcode == 0
    assert gpu.durations == [zero.seconds_of(RECIPE, pool.take(RECIPE.target_spec).weight_bytes)]


@forks
def test_runs_share_no_state_with_the_page(pool: ModelPool) -> None:
    """The fake pickles all values and forks: unpicklable values stop the run, and changes in the child stay there."""

    def forgetful(recipe: Recipe, prompt: str, pool: ModelPool, stores: dict) -> Iterator[Event]:
        seen = dict(stores)
        stores["learnt"] = changed["there"] = prompt
        yield Header(seen, "", ())

    changed: dict[str, str] = {}
    run = zero.on(Forking(), pool, forgetful)
    for _ in range(2):
        stores: dict[str, str] = {"mine": "secret"}
        assert list(run(RECIPE, CODE, ModelPool(), stores))[1:] == [Header({}, "", ())]
        assert stores == {"mine": "secret"} and not changed
    with pytest.raises(UserError, match="pickle"):  # a driver that handed a stop flag over would fail like this
        list(run(RECIPE, threading.Event(), ModelPool(), {}))
    with pytest.raises(UserError, match="n-grams are not kept on this host"):
        list(run(Recipe(pair="bundled", method="nasd", ngram_keep=True), CODE, ModelPool(), {}))
    with pytest.raises(UserError, match="only preloaded models run on this host"):
        list(run(Recipe(pair="bundled", quantization="nf4"), CODE, ModelPool(), {}))


@forks
def test_stop_ends_the_process(pool: ModelPool, tmp_path: Path) -> None:
    def endless(*_: Any) -> Iterator[Event]:
        try:
            yield Header(vars(RECIPE), "", ())
            for i in count():
                time.sleep(0.01)
                yield from events_of([step(i, pieces=["a"], tokens=[i])])
        finally:
            (tmp_path / "closed").write_text(str(os.getpid()))

    gpu = Forking()
    service = Service(pool, zero.on(gpu, pool, endless), worker=WorkerGroup(2))
    stream = service.start([("spec", RECIPE)], CODE)
    items = follow(stream, until=lambda events: len(tokens_of(events)) > 20)
    stream.stop()
    assert stream.wait(PATIENCE) and stream.error is None
    process = gpu.processes[0]
    assert not process.is_alive() and process.exitcode == 0
    assert (tmp_path / "closed").read_text() == str(process.pid)  # the `finally` of the child process
    assert tokens_of(items) == list(range(len(tokens_of(items))))
    service.worker.close()


def follow(stream: Any, until: Callable[[list], bool]) -> list[Event]:
    """Output of a stream up to the first time the condition is true."""

    async def read() -> list[Event]:
        events: list[Event] = []
        async for batch in drain(stream):
            events += [event for _, event in batch]
            if until(events):
                break
        return events

    return asyncio.run(asyncio.wait_for(read(), PATIENCE))


@forks
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (UserError("the prompt is too long"), "the prompt is too long"),
        (RuntimeError("the device ran out of memory"), "RuntimeError: the device ran out of memory"),
        (None, "GPU task aborted"),
    ],
)
def test_errors_in_the_process_are_reported(pool: ModelPool, fault: Exception | None, said: str) -> None:
    def broken(*_: Any) -> Iterator[Event]:
        yield Header(vars(RECIPE), "", ())
        if fault is None:
            os._exit(1)  # as the lender does when the time is up
        raise fault

    events = zero.on(Forking(), pool, broken)(RECIPE, CODE, ModelPool(), {})
    with pytest.raises((UserError, RuntimeError)) as raised:
        list(events)
    assert said in reason(raised.value)


@forks
def test_context_of_the_visitor_is_passed_on(pool: ModelPool) -> None:
    """There the quota is looked up: by the request, which is in the context of the handler that started the run."""
    seen = []

    def lender(*, duration: Callable) -> Callable:
        def decorate(task: Callable) -> Callable:
            def call(*asked: Any) -> Iterator[Any]:
                seen.append(asker.get())
                yield from task(*asked)

            return call

        return decorate

    service = Service(pool, zero.on(lender, pool), worker=WorkerGroup(1))
    context = contextvars.copy_context()
    context.run(asker.set, "visitor 7")
    stream = context.run(service.start, [("spec", RECIPE)], CODE)
    assert stream.wait(PATIENCE) and stream.error is None
    assert seen == ["visitor 7"]
    service.worker.close()


def test_requested_gpu_time_grows_with_the_run() -> None:
    small, large = 4 * 10**7, 15 * 10**9
    lengths = [zero.seconds_of(Recipe(max_tokens=n), large) for n in (1, 128, 512, 10**6)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[1] < lengths[2] and lengths[3] == zero.LONGEST_S
    assert zero.seconds_of(Recipe(max_tokens=256), small) < zero.seconds_of(Recipe(max_tokens=256), large)
    assert (
        zero.seconds_of(Recipe(max_tokens=256), large) > 256 * large / 1.6e12
    )  # at least the time of reading the weights


def test_preflight_raises_without_a_permanent_device(pool: ModelPool) -> None:
    service = Service(pool, generate, worker=WorkerGroup(1))
    with pytest.raises(UserError, match="this host does not have"):
        asyncio.run(service.preflight(RECIPE))
    service.worker.close()


# --- health, the page as an app, a window ---


def test_gradio_keeps_a_bounded_number_of_sessions() -> None:
    with page() as demo:
        holder = demo.app.state_holder
        for i in range(SESSION_CAPACITY + 5):
            holder[f"session {i}"]
            holder.update(f"session {i}")
        assert len(holder.session_data) == SESSION_CAPACITY == holder.capacity
        assert "session 0" not in holder and f"session {SESSION_CAPACITY + 4}" in holder


@contextmanager
def page(engine: Any = generate, lately_s: float = LATELY_S, patience_s: float = PATIENCE) -> Iterator[Any]:
    demo = build(pair="bundled", engine=engine)
    demo.health._lately, demo.health._patience = lately_s, patience_s
    _, demo.url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **launch_options(demo))
    yield demo
    demo.worker.close()
    demo.close()


def test_health_requires_a_recent_token() -> None:
    runs = []

    def counted(recipe: Recipe, *asked: Any) -> Iterator[Event]:
        runs.append((recipe.method, recipe.max_tokens))
        yield from generate(recipe, *asked)

    with page(counted) as demo:
        first, second = httpx.get(f"{demo.url}health", timeout=PATIENCE), httpx.get(f"{demo.url}health")
        assert first.status_code == second.status_code == 200
        assert "a probe produced a token" in first.json()["why"] and "s ago" in second.json()["why"]
        assert runs == [("ar", 2)]  # the first check needed a probe, the second did not


def test_hanging_device_is_unhealthy() -> None:
    gate, tries = threading.Event(), []

    def hung(*_: Any) -> Iterator[Event]:
        tries.append(1)
        assert gate.wait(PATIENCE)
        yield from events_of([step(0, pieces=["a"])])

    with page(hung, patience_s=0.2) as demo:
        for _ in range(2):
            said = httpx.get(f"{demo.url}health")
            assert said.status_code == 503 and "no token within 0.2 s" in said.json()["why"]
        assert httpx.get(f"{demo.url}config").status_code == 200
        assert len(tries) == 1 and demo.worker.active == 1  # looking again makes no queue
        gate.set()
        demo.health._patience = PATIENCE
        assert httpx.get(f"{demo.url}health", timeout=PATIENCE).status_code == 200


def test_health_reports_the_cause() -> None:
    def broken(*_: Any) -> Iterator[Event]:
        raise UserError("the weights are damaged: fetch them again")
        yield

    with page(broken) as demo:
        said = httpx.get(f"{demo.url}health", timeout=PATIENCE)
    assert (said.status_code, said.json()["why"]) == (503, "the weights are damaged: fetch them again")


def test_recent_runs_count_as_healthy() -> None:
    service = Service(ModelPool(), lambda *_: iter(()))
    look = Health(service, RECIPE, lately_s=100, patience_s=PATIENCE)
    assert not look.fresh and look.age_s is None
    service.last_token = time.monotonic() - 99
    assert look.fresh
    service.last_token = time.monotonic() - 101
    assert not look.fresh
    alive, why = asyncio.run(look.look())
    assert not alive and "no token" in why  # the probe ended without a token
    service.worker.close()


def test_the_page_can_be_installed_as_an_app() -> None:
    with page() as demo:
        manifest = httpx.get(f"{demo.url}manifest.json").json()
        assert '<link rel="manifest" href="/manifest.json"' in httpx.get(demo.url).text
        assert manifest["name"] == "specdemo" and manifest["display"] == "standalone"
        sizes = {}
        for icon in manifest["icons"]:
            image = Image.open(io.BytesIO(httpx.get(f"{demo.url.rstrip('/')}{icon['src']}").content))
            sizes[icon["sizes"]] = image.size
            assert image.convert("RGB").getpixel((image.width // 3, image.height // 4)) == (0x7B, 0xD8, 0x8F)  # ours
        assert sizes == {"192x192": (192, 192), "512x512": (512, 512)}
        assert httpx.get(f"{demo.url}favicon.ico").content == (ASSETS / "icon.png").read_bytes()


def test_window_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Toolkit errors end only the child process; a `webview` module first on the path replaces the toolkit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    fake = tmp_path / "webview.py"
    for source, said in (
        ("raise ImportError", "pywebview is not installed (pip install 'pywebview[qt]' on Linux"),
        (
            "import os, sys\nprint('no display', file=sys.stderr, flush=True)\nos._exit(134)",
            "pywebview ended with code 134. no display",
        ),
        ("import os\nos._exit(7)", "pywebview ended with code 7"),
        (WEBVIEW.format(start="raise WebViewException('no QT')"), "pywebview found no window toolkit: no QT"),
    ):
        fake.write_text(source)
        assert (window.show("http://127.0.0.1:1/") or "").startswith(said)
    fake.write_text(WEBVIEW.format(start=f"open({str(tmp_path / 'shown')!r}, 'w').write(repr((made, settings, more)))"))
    assert window.show("http://127.0.0.1:1/") is None
    made, settings, more = ast.literal_eval((tmp_path / "shown").read_text())
    assert made == ["specdemo", "http://127.0.0.1:1/"]
    assert settings == {"ALLOW_DOWNLOADS": True} and more == {"private_mode": False}


WEBVIEW = """
class WebViewException(Exception): ...
settings, made = {{}}, []
def create_window(title, url, **more): made.extend((title, url))
def start(**more): {start}
"""


def test_address_of_a_space_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7860")
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    args = app.options().parse_args([])
    assert (args.host, args.port, args.zero_gpu) == ("0.0.0.0", 7860, True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SPECDEMO_MAX_TOKENS", "lots", "SPECDEMO_MAX_TOKENS must be a whole number"),
        ("SPECDEMO_PAIR", "bundled", "unknown variable 'SPECDEMO_PAIR'"),
    ],
)
def test_invalid_host_settings_end_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    assert app.main(["--no-browser"]) == 2
    assert capsys.readouterr().err.startswith(said)
