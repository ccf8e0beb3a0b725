"""Declarations for the JavaScript type checker, and data passed to scripts of the page."""

import json
import re
from pathlib import Path

from specdemo.ui import cockpit
from specdemo.ui.run_store import RunStore

DECLARATIONS = Path(cockpit.__file__).with_name("globals.d.ts")


def test_all_server_functions_are_declared() -> None:
    declared = re.search(r"server: Record<(.*?),", DECLARATIONS.read_text("utf-8"), re.DOTALL)
    assert declared is not None
    assert set(re.findall(r'"(\w+)"', declared[1])) == {query.__name__ for query in RunStore().queries}


def test_data_is_passed_as_json() -> None:
    data = {"names": ["prompt"], "defaults": ['names, "defaults" \\ \n{}']}
    text = cockpit.script("copy_link", data)
    assert text.endswith(f")({json.dumps(data)}, ...values)") and text.count(json.dumps(data)) == 1
    source = Path(cockpit.__file__).with_name("copy_link.js").read_text("utf-8")
    assert source in text


def test_automated_browsers_are_shown_the_same_page() -> None:
    sources = [path.read_text("utf-8") for path in Path(cockpit.__file__).parents[1].rglob("*.js")]
    assert len(sources) > 20 and not [text for text in sources if "webdriver" in text]
