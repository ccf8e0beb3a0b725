"""Paths through the program, as docs/architecture.md lists them."""

import re
from pathlib import Path

import specdemo

PACKAGE = Path(specdemo.__file__).parent
UI = PACKAGE / "ui"
_DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"
_MODULE = re.compile(r"`([\w/]+\.(?:py|js|c|h))`(?:\s+\(([^)]*)\))?")

DocumentedPath = dict[str, set[str]]  # functions by module, relative to `specdemo/ui` or `specdemo`


def documented_paths() -> dict[str, DocumentedPath]:
    """Return the paths by heading."""
    section = _DOCUMENT.read_text("utf-8").partition("\n## Five paths\n")[2].partition("\n## ")[0]
    paths: dict[str, DocumentedPath] = {}
    for part in section.split("\n### ")[1:]:
        heading, _, text = part.partition("\n")
        path = paths.setdefault(heading, {})
        for module, names in _MODULE.findall(text):
            path.setdefault(module, set()).update(re.findall(r"`(\w+)`", names))
    return paths


def module_file(module: str) -> Path:
    """Return the file of a documented module."""
    (file,) = (file for folder in (UI, PACKAGE) if (file := folder / module).is_file())
    return file
