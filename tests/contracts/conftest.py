"""Program, started once for all golden tests."""

from collections.abc import Iterator

import pytest

from .interfaces import Page, Service, started


@pytest.fixture(scope="session")
def programs() -> Iterator[tuple[tuple[str, str], Service, Page]]:
    with started() as running:
        yield running
