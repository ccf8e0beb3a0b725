"""Selection and order of the tests.

Files and tests choose their marks; a file marks all of its tests with `pytestmark`:

- `slow`: starts a browser or a process, loads the bundled pair or runs for long; not part of `make test-fast`.
- `browser`, `long`: these files run first, so that both workers end together. Other slow files follow.
- `exhaustive`: too slow for `make test`, which runs a representative of every theorem; part of `make test-exhaustive`.

Also, measurements of models and costs are shortened, and the processes share one compiled engine.
"""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sitecustomize
from fakes import properties

from specdemo.native.build import SWITCH, native_library

ROOT = Path(__file__).parents[1]
MEASUREMENT_S = 0.04  # of batch invariance after each load, instead of 0.5 s
SLOW_FILE = re.compile(r"^pytestmark = (\[[^]]*|.*)\bmark\.slow\b", re.MULTILINE)
FIRST = ("browser", "long", "slow")
FAST = "not slow and not exhaustive and not faults"
ONLY = {"exhaustive": "mark.exhaustive", "fuzz": "properties", "faults": "mark.faults"}  # texts of their files
STARTUP = Path(sitecustomize.__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels run on CPU tensors
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise bitsandbytes imports a compiler for 1 s
gc.set_threshold(50_000)  # collections took 5 % of the CPU time


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the engine while the workers import modules."""
    if session.config.getoption("numprocesses", None):
        program = "from specdemo.native.build import native_library; native_library()"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        session.config.add_cleanup(process.wait)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without selected tests: collecting them takes seconds."""
    selected = config.option.markexpr
    if collection_path.suffix == ".py" and (selected in ONLY or selected == FAST):
        source = collection_path.read_text("utf-8")
        ignored = ONLY[selected] not in source if selected in ONLY else SLOW_FILE.search(source)
        return True if ignored else None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the selected tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=start_order)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Divide the remaining time of a fuzz run among its tests."""
    items, processes = item.session.items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    properties.start_property(len(items) - items.index(item), processes)


def start_order(item: pytest.Item) -> list[bool]:
    file = item.getparent(pytest.Module) or item
    return [file.get_closest_marker(name) is None for name in FIRST]


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    import torch  # not in the process that distributes the tests

    from specdemo.models import batch_invariance

    torch.set_num_threads(1)  # the models are tiny, and the tests share the cores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_invariance, "SECONDS", MEASUREMENT_S)
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Exclude older objects from the garbage collections after unloading models, which would take 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pool() -> Any:
    """Models that the tests of a file share."""
    from specdemo.models.model_pool import ModelPool

    return ModelPool()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random model."""
    from fakes.tiny_models import byte_level_tokenizer, save_model

    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer()))


@pytest.fixture(scope="session", autouse=True)
def compiled_engine() -> None:
    """Wait until the engine is compiled."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        native_library()


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the native engine."""
    monkeypatch.setenv(SWITCH, "0")
    native_library.cache_clear()
    yield
    native_library.cache_clear()
