"""Markup, styles and scripts of the cockpit, shared by the page, saved web pages and lessons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

_FOLDER = Path(__file__).parent / "cockpit"
# These files share one scope, in order of dependency.
PLAYER = ("elements", "step_rules", "step_player", "timeline")
DISPLAY = (
    *PLAYER,
    "lanes",
    "headline",
    "pace",
    "socket",
    "tiles",
    "tooltip",
    "replay",
    "walkthrough",
    "charts",
    "sources",
    "inspector",
    "plot_export",
    "switches",
)


def scripts(*names: str) -> str:
    return "\n".join((_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in names)


def markup() -> str:
    return (_FOLDER / "cockpit.html").read_text(encoding="utf-8")


def saved_page(texts: Mapping[str, str]) -> str:
    """Return an HTML page that replays a run without a server; `texts` are its heading, about, data and colours."""
    styles = "".join((_FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in ("cockpit", "step_player"))
    code = scripts("web_page/data", *DISPLAY, "web_page/start")
    template = Template((_FOLDER / "web_page" / "page.html").read_text(encoding="utf-8"))
    return template.substitute(texts, styles=texts["colours"] + styles, scripts=code, markup=markup())
