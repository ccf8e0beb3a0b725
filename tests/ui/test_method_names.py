"""Visible names of methods, and the identifiers that links, settings and files keep."""

from __future__ import annotations

import pytest

from specdemo.core.errors import UserError
from specdemo.drafters import METHODS
from specdemo.recipe import Recipe
from specdemo.ui.lane import title
from specdemo.ui.method_names import method_name, visible_recipe, with_method_names
from specdemo.ui.streams import reason


def test_abbreviations_have_a_visible_name_that_no_other_method_has() -> None:
    names = [method_name(name) for name in METHODS]
    assert method_name("nasd") == "n-grams" and len(set(names)) == len(names)
    assert method_name("of another version") == "of another version"
    assert title({"method": "nasd", "gamma": 3}) == "n-grams, γ 3"
    assert visible_recipe("nasd gamma=3 T=0") == "n-grams gamma=3 T=0" and visible_recipe("ar T=0") == "ar T=0"


def test_messages_of_the_page_name_methods_and_keep_paths() -> None:
    with pytest.raises(UserError) as error:
        Recipe(target="org/large", method="draft")
    assert "choose method nasd, self or ar" in str(error.value)
    assert "choose method n-grams (nasd), self or ar" in reason(error.value)
    assert with_method_names("/models/nasd is no model of nasd.") == "/models/nasd is no model of n-grams (nasd)."
