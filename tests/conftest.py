"""Selection of the tests of `make test-fast`: all tests without the marker `slow`.

Slow are the files in `SLOW` (browser, other processes, long runs), tests that mention the bundled pair, since they load
its weights, and tests marked with `@pytest.mark.slow`.

Also, measurements of models and costs are shortened, and `--dist loadfile` runs long files first and all browser tests
in one process, which starts one page server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

MEASUREMENT_S = 0.04  # of batch invariance after each load, instead of 0.5 s
REPEATS = 4  # of each draft length in a preflight, instead of 20
TESTS = Path(__file__).parent
BROWSER = (
    "e2e/test_cockpit.py",
    "e2e/test_edge_page.py",
    "e2e/test_figures.py",
    "e2e/test_page.py",
    "e2e/test_tabs.py",
    "e2e/test_tabs_theory.py",
)
LONGEST = (  # after the browser group, so that both workers end together
    "e2e/test_first_minute.py",
    "core/test_exactness.py",
    "e2e/test_signals.py",
    "e2e/test_hosting.py",
    "models/test_quantised_copy.py",
    "models/test_native_build.py",
    "models/test_architectures.py",
    "e2e/test_limits.py",
)
SLOW = (
    "bench/test_bench.py",
    "bench/test_equality.py",
    "benchmarks",
    "cli/test_output.py",
    "cli/test_terminal.py",
    "contracts/test_names.py",
    "contracts/test_traces.py",
    "core/test_simulate.py",
    "core/test_verifier.py",
    "drafters/test_lookahead.py",
    "drafters/test_self_speculation.py",
    "drafters/test_tree.py",
    "drafters/test_universal.py",
    "e2e",
    "models/test_accelerators.py",
    "models/test_architectures.py",
    "models/test_bundled_pair.py",
    "models/test_cache_check.py",
    "models/test_cuda_graphs.py",
    "models/test_chat_templates.py",
    "models/test_encoder_decoder.py",
    "models/test_gguf.py",
    "models/test_hostile_gguf.py",
    "models/test_hostile_models.py",
    "models/test_hub.py",
    "models/test_kv_cache.py",
    "models/test_llama_engine.py",
    "models/test_load.py",
    "models/test_loaded_pair.py",
    "models/test_model_pool.py",
    "models/test_native_build.py",
    "models/test_zoo.py",
    "remote/test_cloud_service.py",
    "remote/test_gates.py",
    "remote/test_remote_verification.py",
    "remote/test_service_limits.py",
    "test_extensions.py",
    "test_library.py",
    "test_option_effects.py",
    "test_preflight.py",
    "training",
    "ui/test_gateway.py",
    "ui/test_streams.py",
    "ui/test_theory_tab.py",
    "ui/test_trace_import.py",
)


def is_slow(path: Path) -> bool:
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return any(name == slow or name.startswith(f"{slow}/") for slow in SLOW)


def mentions_bundled_pair(code: CodeType) -> bool:
    if "BUNDLED" in code.co_names or "bundled" in code.co_consts:
        return True
    return any(mentions_bundled_pair(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow files in fast runs: collecting them takes seconds."""
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "function", None)
        if is_slow(item.path) or (function is not None and mentions_bundled_pair(function.__code__)):
            item.add_marker(pytest.mark.slow)
    items.sort(key=start_order)


def start_order(item: pytest.Item) -> tuple[bool, int, bool]:
    """Browser tests first, then the longest files, then other slow files."""
    file = file_of(item)
    rank = LONGEST.index(file) if file in LONGEST else len(LONGEST)
    return file not in BROWSER, rank, not is_slow(item.path)


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class BrowserTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "browser" if file.removeprefix("tests/") in BROWSER else file

    config.option.loadscopereorder = False  # the order of collection
    return BrowserTogether(config, log)


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    import torch  # not in the process that distributes the tests

    from specdemo.models.kv_cache import check_invariance
    from specdemo.preflight import measure_costs

    torch.set_num_threads(1)  # the models are tiny, and the tests share the cores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_invariance, "__defaults__", (MEASUREMENT_S,))
        patch.setattr(measure_costs, "__defaults__", (REPEATS, time.perf_counter))
        yield


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the native engine."""
    from specdemo.native.build import SWITCH, native_library

    monkeypatch.setenv(SWITCH, "0")
    native_library.cache_clear()
    yield
    native_library.cache_clear()
