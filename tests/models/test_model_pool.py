"""Model pool: loading, eviction, release of memory, out-of-memory errors."""

import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.traces import trace_lines as generate

from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress
from specdemo.models import memory_plan, model_pool
from specdemo.models.hub import Hub
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe, plan_run
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

PATIENCE = 60.0  # seconds
LONG = 20_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", byte_level_tokenizer())


@pytest.fixture(scope="module")
def specs(folder: Path) -> list[ModelSpec]:
    """Three distinct specs of the same weights."""
    return [ModelSpec(str(folder), dtype, device="cpu") for dtype in ("float32", "bfloat16", "float16")]


@pytest.fixture(scope="module")
def spec(specs: list[ModelSpec]) -> ModelSpec:
    return specs[0].resolved()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as worker:
        yield worker


def test_equal_specs_share_a_model(folder: Path) -> None:
    pool = ModelPool()
    first = pool.get(ModelSpec(str(folder), device="auto"))
    assert pool.get(ModelSpec(str(folder), "float32", "none", str(first.model.device))) is first
    recipe = Recipe(target=str(folder), drafter=str(folder), device="cpu", max_tokens=4)
    list(generate(recipe, "def", pool))
    assert pool.get(plan_run(recipe).target) is pool.get(plan_run(recipe).drafter) is first
    assert pool.weight_bytes == first.weight_bytes


def test_stop_does_not_wait_for_an_unreachable_hub(worker: Worker) -> None:
    """The phase is shown at once, and a run that waits for the hub is stopped without its response."""
    answered, shown, listening = threading.Event(), threading.Event(), threading.Event()

    class Silent(Hub):
        def settings(self, *_: object) -> Path:
            answered.wait()
            raise UserError("the hub is unreachable")

    pool, specs = ModelPool(hub=Silent()), [ModelSpec("org/model", device="cpu")]
    stream = worker.submit(lambda: pool.ensure_loaded(specs) if listening.wait(PATIENCE) else iter(()))
    stream.listen(shown.set)
    listening.set()
    assert shown.wait(PATIENCE)
    assert stream.items[0].text == "reading the configuration of org/model"
    stream.stop()
    assert stream.wait(PATIENCE) and stream.error is None
    answered.set()


class CountingHub(Hub):
    """Count downloads; the first waits for `gate`."""

    asked: list[str] = []
    gate = threading.Event()

    def weights(self, name: str, *rest: Any) -> Path:
        self.asked.append(name)
        if len(self.asked) == 1:
            assert self.gate.wait(PATIENCE)
        return super().weights(name, *rest)


@pytest.fixture
def hub() -> CountingHub:
    CountingHub.asked, CountingHub.gate = [], threading.Event()
    return CountingHub()


def others(worker: Worker) -> bool:
    """True if other jobs run."""
    other = worker.submit(lambda: iter(range(100)))
    return other.wait(PATIENCE) and len(other.items) == 100


@pytest.mark.parametrize("stopped", [False, True])
def test_jobs_that_request_a_model_load_it_once(
    hub: CountingHub, spec: ModelSpec, worker: Worker, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """While the first job waits for the hub or is stopped, the second loads the model."""
    loads, real = [], model_pool.load
    monkeypatch.setattr(model_pool, "load", lambda *given, **options: loads.append(1) or real(*given, **options))
    pool = ModelPool(hub=hub)
    first = worker.submit(lambda: pool.ensure_loaded([spec]))
    while not hub.asked:
        assert others(worker)
    if stopped:
        first.stop()
    second = worker.submit(lambda: pool.ensure_loaded([spec]))
    assert second.wait(PATIENCE) and spec in pool and first.done == stopped
    hub.gate.set()
    assert first.wait(PATIENCE) and second.error is None and first.error is None and len(loads) == 1


def test_a_model_is_loaded_after_that_of_another_run(
    specs: list[ModelSpec], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run reads its model until the second waits."""
    pool, real, loading = ModelPool(), model_pool.load, threading.Event()
    streams: list[Any] = []

    def waiting() -> bool:
        return any(event.text.startswith("waiting to load") for stream in streams for event in list(stream.items))

    def load_after_others(spec: ModelSpec, hub: Hub, report: ReportProgress, **options: Any) -> LoadedModel:
        loading.set()
        while not waiting():
            report(Loading("reading"))
        return real(spec, hub, report, **options)

    monkeypatch.setattr(model_pool, "load", load_after_others)
    streams.append(worker.submit(lambda: pool.ensure_loaded(specs[:1])))
    assert loading.wait(PATIENCE)
    streams.append(worker.submit(lambda: pool.ensure_loaded(specs[1:2])))
    for stream in streams:
        assert stream.wait(PATIENCE) and stream.error is None
    assert waiting() and specs[0] in pool and specs[1] in pool


def test_hub_requests_do_not_use_the_device(
    hub: CountingHub, spec: ModelSpec, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other jobs run during a download, and while memory is planned."""
    threads, real = [], model_pool.plan_spec

    def planned(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*given, **options)

    monkeypatch.setattr(model_pool, "plan_spec", planned)
    stream = worker.submit(lambda: ModelPool(hub=hub).ensure_loaded([spec]))
    while not hub.asked:
        assert others(worker)
    assert others(worker) and not stream.done and {*threads} == {"background"}
    hub.gate.set()
    assert stream.wait(PATIENCE) and stream.error is None


def limit_memory(monkeypatch: pytest.MonkeyPatch, pool: ModelPool, count: int) -> None:
    monkeypatch.setattr(memory_plan, "free_on", lambda device: count - pool.weight_bytes)


def planned_bytes(spec: ModelSpec) -> int:
    return memory_plan.plan_spec(spec.resolved(), 0).total


def test_least_recently_used_model_is_evicted(specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = specs
    pool = ModelPool()
    for spec in (a, b, a):
        first = pool.get(spec)
    limit_memory(monkeypatch, pool, pool.weight_bytes + planned_bytes(c))
    assert pool.get(a) is first
    pool.get(c)
    assert a in pool and b in pool and c in pool
    pool.unload(c)
    limit_memory(monkeypatch, pool, first.weight_bytes + planned_bytes(c))
    pool.get(c)
    assert a in pool and c in pool and b not in pool


def test_models_of_a_request_do_not_evict_each_other(specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = specs
    pool = ModelPool()
    limit_memory(monkeypatch, pool, planned_bytes(a))
    with pytest.raises(UserError, match=r"need .* are free: choose a smaller pair"):
        list(pool.ensure_loaded([a, b]))
    assert a not in pool and b not in pool
    size = pool.get(a).weight_bytes
    limit_memory(monkeypatch, pool, size + planned_bytes(b) - 1)
    with pytest.raises(UserError, match="are free"):
        list(pool.ensure_loaded([a, b]))
    assert a in pool


def test_idle_models_are_unloaded(specs: list[ModelSpec]) -> None:
    now = [0.0]
    pool = ModelPool(idle_s=60, clock=lambda: now[0])
    pool.get(specs[0])
    now[0] = 50
    pool.get(specs[1])
    now[0] = 70
    assert pool.unload_idle() == 1 and specs[0] not in pool and specs[1] in pool
    assert pool.unload_idle() == 0


REPEATED_LOADING = """
import psutil
from specdemo import Recipe, generate, set_environment_defaults
set_environment_defaults()
from specdemo.models.model_pool import ModelPool
pool = ModelPool()
for _ in range(4):
    list(generate(Recipe(max_tokens=8, device="cpu"), "def f():\\n", pool))
    pool.clear()
    print(psutil.Process().memory_info().rss)
"""


@pytest.mark.exhaustive  # a process that loads models repeatedly
def test_memory_is_constant_over_loading_and_unloading() -> None:
    """In a new process, the bundled pair repeatedly; the first cycle warms up the libraries.

    With a heap per thread, 8 MB remained after each repetition; a growing dictionary takes 3 MB once.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REPEATED_LOADING]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    taken = [int(line) / 1e6 for line in output.splitlines()[-3:]]
    assert min(taken) > 100 and max(taken) - taken[0] < 11, taken


def test_no_tensor_remains_after_unloading(specs: list[ModelSpec]) -> None:
    """Counted, not measured: no further repetition adds tensors."""

    def tensor_bytes() -> int:
        gc.collect()
        # `type` instead of `isinstance`: lazy modules are imported when their class is read
        tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    pool, counts = ModelPool(), []
    for _ in range(3):
        for spec in specs:
            models = {"target": spec.name, "drafter": spec.name, "dtype": spec.dtype, "device": "cpu"}
            recipe = Recipe(method="draft", max_tokens=8, **models)
            list(generate(recipe, "def add(a, b):", pool))
        during = tensor_bytes()
        pool.clear()
        counts.append(tensor_bytes())
    assert len(set(counts)) == 1 and during > counts[0]


def test_a_run_continues_after_its_models_are_unloaded(specs: list[ModelSpec]) -> None:
    pool = ModelPool()
    recipe = Recipe(target=specs[0].name, method="ar", device="cpu", max_tokens=12, temperature=0)
    whole = [line["tokens"] for line in generate(recipe, "def", pool) if "i" in line]
    run = (line for line in generate(recipe, "def", pool) if "i" in line)
    begun = [next(run)["tokens"]]
    pool.clear()
    assert begun + [line["tokens"] for line in run] == whole


def test_out_of_memory_ends_only_the_run(tmp_path: Path) -> None:
    """Keys and values of the prompt take 16 kB per token, and 48 MB are available."""
    shape = {"max_position_embeddings": LONG, "num_key_value_heads": 4, "head_dim": 256}
    folder, pool = save_model(tmp_path / "model", byte_level_tokenizer(), **shape), ModelPool()
    recipe = Recipe(target=str(folder), method="ar", temperature=0, device="cpu", max_tokens=16)
    before = [line["tokens"] for line in generate(recipe, "def add(a, b):", pool) if "i" in line]
    long = "x" * (LONG - 1000)
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (48 << 20), hard))
    try:
        *_, end = generate(recipe, long, pool)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert end["end"] == "error" and "memory ran out (keys and values took" in end["error"], end
    assert "shorten the prompt" in end["error"]
    assert not pool.get(plan_run(recipe).target).model.engine._idle
    assert [line["tokens"] for line in generate(recipe, "def add(a, b):", pool) if "i" in line] == before
