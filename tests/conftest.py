"""Selection of the fast tests: everything except `SLOW`, `make test-fast`.

Slow tests use a browser, the bundled weights, other processes or long runs. Their files are listed here by path; single
tests in other files are marked `@pytest.mark.slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny, and the tests share the cores

TESTS = Path(__file__).parent
SLOW = (
    "benchmarks",
    "e2e",
    "training",
    "bench/test_bench.py",
    "drafters/test_universal.py",
    "models/test_architectures.py",
    "models/test_batch_invariance.py",
    "models/test_bundled_pair.py",
    "models/test_encoder_decoder.py",
    "models/test_hub.py",
    "models/test_llama_engine.py",
    "models/test_model_pool.py",
    "remote/test_cloud_service.py",
    "test_preflight.py",
)


def is_slow(path: Path) -> bool:
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return any(name == slow or name.startswith(f"{slow}/") for slow in SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow files in fast runs: collecting them takes seconds."""
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
