"""ZeroGPU: models load without a GPU; each run in a forked process, with text, errors and context as in the page."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes.page import last_frame
from fakes.traces import events_of, step, tokens_of
from fakes.zero_gpu import Forking, untouched
from gradio.context import LocalContext
from starlette.applications import Starlette
from starlette.testclient import TestClient

from specdemo.core.errors import UserError
from specdemo.core.events import Event, Header, Loading
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe, plan_run
from specdemo.ui import zero_gpu as zero
from specdemo.ui.limits import HostLimits
from specdemo.ui.page import build
from specdemo.ui.runs import Runs
from specdemo.ui.service import FRAME_S, Service, error_sentence
from specdemo.worker import Worker, read_batches

pytestmark = pytest.mark.slow

PATIENCE = 60.0

forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")

RECIPE = Recipe(pair="bundled", temperature=0.0, max_tokens=24)
CODE = "def fibonacci(n):"


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return zero.preload([RECIPE])


@pytest.mark.parametrize("package", [False, True][: 1 + (find_spec("spaces") is not None)])
def test_decorator_has_no_effect_without_zerogpu(package: bool, pool: ModelPool) -> None:
    """Neither with the fake nor, if the package is installed, with the real decorator."""
    events = list(
        zero.run_on_gpu(zero.decorator() if package else untouched, pool)(RECIPE, CODE, ModelPool(), Stores())
    )
    assert events[0] == Loading("waiting for a GPU") and isinstance(events[1], Header)
    assert tokens_of(events) == tokens_of(generate(RECIPE, CODE, pool)) and events[-1].reason == "length"


def test_the_page_of_a_zerogpu_space_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "decorator", lambda: untouched)
    limits = HostLimits(pairs=("bundled",))
    page = build(limits=limits, **zero.zero_gpu_page(limits, "cpu"))
    assert page.health is None
    page.worker.close()


@forks
def test_a_run_in_its_own_process_gives_the_same_text(pool: ModelPool) -> None:
    def telling(*asked: Any) -> Iterator[Event]:
        yield Loading("process", os.getpid())
        yield from generate(*asked)

    gpu = Forking()
    events = list(zero.run_on_gpu(gpu, pool, telling)(RECIPE, CODE, ModelPool(), Stores()))
    assert tokens_of(events) == tokens_of(generate(RECIPE, CODE, pool)) != []
    assert events[1] == Loading("process", gpu.processes[0].pid) != Loading("process", os.getpid())
    assert gpu.processes[0].exitcode == 0
    assert gpu.durations == [zero.START_S]  # the passes of a small model take less than half a second


@forks
def test_runs_share_no_state_with_the_page(pool: ModelPool) -> None:
    """The fake pickles all values and forks: unpicklable values stop the run, and changes in the child stay there."""

    def forgetful(recipe: Recipe, prompt: str, pool: ModelPool, stores: Stores) -> Iterator[Event]:
        seen = dict(stores.drafts)
        stores.drafts["learnt"] = changed["there"] = prompt
        yield Header(seen, "", ())

    changed: dict[str, str] = {}
    run = zero.run_on_gpu(Forking(), pool, forgetful)
    for _ in range(2):
        stores = Stores(drafts={"mine": "secret"})
        assert list(run(RECIPE, CODE, ModelPool(), stores))[1:] == [Header({}, "", ())]
        assert stores.drafts == {"mine": "secret"} and not changed
    keeping = Recipe(pair="bundled", method="nasd", ngram_keep=True)
    quantised = Recipe(pair="bundled", quantization="nf4")
    for recipe, prompt, words in (
        (RECIPE, threading.Event(), "pickle"),  # a driver that handed a stop flag over would fail like this
        (keeping, CODE, "n-grams are not kept on this host"),
        (quantised, CODE, "only preloaded models run on this host"),
    ):
        with pytest.raises(UserError, match=words):
            list(run(recipe, prompt, ModelPool(), Stores()))


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

    async def first_tokens() -> list[int]:
        events: list[Event] = []
        async for batch in read_batches(stream, FRAME_S):
            events += [event for _, event in batch]
            if len(tokens_of(events)) > 20:
                break
        return tokens_of(events)

    gpu = Forking()
    service = Service(pool, zero.run_on_gpu(gpu, pool, endless), worker=Worker(), permanent=False)
    stream = service.start([("spec", RECIPE)], CODE)
    tokens = asyncio.run(asyncio.wait_for(first_tokens(), PATIENCE))
    stream.stop()
    assert stream.wait(PATIENCE) and stream.error is None
    process = gpu.processes[0]
    assert not process.is_alive() and process.exitcode == 0
    assert (tmp_path / "closed").read_text() == str(process.pid)  # the `finally` of the child process
    assert tokens == list(range(len(tokens)))
    service.worker.close()


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

    events = zero.run_on_gpu(Forking(), pool, broken)(RECIPE, CODE, ModelPool(), Stores())
    with pytest.raises((UserError, RuntimeError)) as raised:
        list(events)
    assert said in error_sentence(raised.value)


def test_the_quota_is_looked_up_by_the_request_that_started_the_run(pool: ModelPool) -> None:
    """As `spaces` does, in the context of Gradio."""
    tokens = []

    def lender(*, duration: Callable) -> Callable:
        def decorate(task: Callable) -> Callable:
            def call(*asked: Any) -> Iterator[Any]:
                tokens.append(LocalContext.request.get().headers["x-ip-token"])
                yield from task(*asked)

            return call

        return decorate

    service = Service(pool, zero.run_on_gpu(lender, pool), worker=Worker(), permanent=False)
    runs = Runs(
        service, "cpu", {"prompt": CODE, "compare": False, "pair": "bundled", "method": "draft", "max_tokens": 8}
    )
    with TestClient(Starlette(routes=runs.routes)) as client:
        for number in (7, 8):
            request = {"id": f"run-of-visitor-{number}", "settings": {}}
            frame = last_frame(client, request, headers={"x-ip-token": f"visitor {number}"})
            assert frame["phase"][0] == "done"
    assert tokens == ["visitor 7", "visitor 8"]
    service.worker.close()


def test_runs_wait_for_their_gpus_at_the_same_time(pool: ModelPool) -> None:
    """Four runs: as many as a worker keeps open."""
    together = threading.Barrier(4)

    def wait_for_others(*_: Any) -> Iterator[Event]:
        together.wait(PATIENCE)
        yield Header(vars(RECIPE), "", ())

    engine = zero.run_on_gpu(untouched, pool, wait_for_others)
    service = Service(pool, engine, worker=Worker(at_once=1), permanent=False)
    streams = [service.start([("spec", RECIPE)], CODE) for _ in range(4)]
    assert all(stream.wait(PATIENCE) and stream.error is None for stream in streams)
    service.worker.close()


# --- loading: `spaces` emulates CUDA in the main thread of a process without a GPU ------------------------------------

ROOT = Path(__file__).parents[2]

# The real emulation with a stubbed configuration, in a process of its own: it replaces functions of torch.
EMULATED = """
import sys
import specdemo
specdemo.set_environment_defaults()
import torch
torch.version.cuda, torch._C._cuda_init = "13.0", lambda: None  # missing in a build without CUDA
import spaces.zero.config as config
config.get_config = lambda: {"model": "GPU", "memory": 48 << 30, "sm_major": 9, "sm_minor": 0, "sm_count": 100}
from spaces.zero.torch import patching
from specdemo.recipe import plan_run
from specdemo.recipe import Recipe
from specdemo.ui import zero_gpu as zero
patching.patch()
recipes = [Recipe(target=sys.argv[1], drafter=sys.argv[1], quantization=form) for form in ("none", "fp16")]
pool = zero.preload(recipes)
for recipe in recipes:
    loaded = pool.get(plan_run(recipe).target)
    model = loaded.model
    equal = loaded.invariance.equal
    print(loaded.engine, model.device, model.dtype, model.embedding.device, equal, loaded.weight_bytes)
"""


def test_models_load_in_the_calling_thread_without_a_pass(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when they are loaded nor by a run, which would spend leased time on measurements."""
    scores: list[Any] = []
    monkeypatch.setattr(CachedModel, "score", lambda *arguments: scores.append(arguments))
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    for dtype in ("float32", "bfloat16"):
        recipe = Recipe(target=target, drafter=target, device="cpu", dtype=dtype)
        loaded = zero.preload([recipe]).get(plan_run(recipe).target)
        assert not loaded.invariance.equal and loaded.invariance.pad == 1
    assert not scores and not started


@pytest.mark.skipif(find_spec("spaces") is None, reason="requires the package spaces")
def test_models_load_under_the_emulation_of_spaces(target: str) -> None:
    command = [sys.executable, "-c", EMULATED, target]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    loaded = load(ModelSpec(target, dtype="bfloat16", device="cpu"))
    for line, dtype in zip(result.stdout.splitlines(), ("bfloat16", "float16"), strict=True):
        assert line == f"lean cuda:0 torch.{dtype} cuda:0 False {loaded.weight_bytes}"
