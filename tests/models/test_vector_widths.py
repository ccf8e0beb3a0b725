"""The tests of the native engine pass with every vector width that the CPU supports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdemo.native.build import VECTORS, supported_vectors

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.exhaustive]

TESTS = Path(__file__).parent
FILES = (
    "test_activations.py",
    "test_native_engine.py",
    "test_native_passes.py",
)


@pytest.mark.parametrize("vectors", supported_vectors()[1:])  # `make test` uses the widest
def test_every_width_passes(vectors: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / name) for name in FILES)],
        cwd=TESTS.parents[1],
        env={**environment, VECTORS: vectors},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
