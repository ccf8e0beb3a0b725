"""External names may be added, never removed: flags, keys, fields, routes, elements.

After an intended addition: `python tests/contracts/interfaces.py --write`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from . import names
from .interfaces import NAMES

pytestmark = pytest.mark.slow

GOLDEN = json.loads(NAMES.read_text("utf-8"))


def test_every_section_is_compared() -> None:
    assert GOLDEN.keys() == names.SECTIONS.keys()


@pytest.mark.parametrize("section", names.SECTIONS)
def test_no_external_name_is_lost(section: str, programs: Any) -> None:
    lost = names.missing(GOLDEN[section], names.SECTIONS[section](*programs))
    assert not lost, "\n".join(lost)


def test_a_lost_name_is_found() -> None:
    golden = {"a": ["x", "y"], "b": {"c": {}, "d": "value"}}
    assert not names.missing(golden, {"a": ["y", "x", "z"], "b": {"c": {}, "d": "value", "e": 1}, "f": 1})
    assert names.missing(golden, {"a": ["x"], "b": {"d": "switch"}}) == [
        "/a/y",
        "/b/c",
        "/b/d is 'switch', not 'value'",
    ]
