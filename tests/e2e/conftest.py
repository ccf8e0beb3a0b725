"""Fixtures of the page: a running server and a browser."""

import sys

import pytest

if "e2e.page_fixtures" not in sys.modules:  # pytest may import this file twice
    pytest.register_assert_rewrite("e2e.page_fixtures")

from e2e.page_fixtures import *  # noqa: E402, F403
