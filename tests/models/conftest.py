"""Choice of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdemo.models.engines.native_build import SWITCH, native_library


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the native engine."""
    monkeypatch.setenv(SWITCH, "0")
    native_library.cache_clear()
    yield
    native_library.cache_clear()
