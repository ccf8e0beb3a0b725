"""Markup, styles, scripts and fonts of the cockpit, shared by the page, saved web pages and lessons.

A script and the modules that it imports are sent as one module, since a request per module delays the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from specdemo.models.zoo import ASSETS
from specdemo.ui.theme import stylesheet

_FOLDER = Path(__file__).parent / "cockpit"
FILE_PATH = "/cockpit/{version}/{name}"
_SAVED_PAGE = "saved_page.html"
_ENTRIES = ("page", "lessons")
FONTS = {"Inter": "inter.woff2", "JetBrains Mono": "jetbrains_mono.woff2"}  # families and files
_TYPES = {".html": "text/html", ".js": "text/javascript", ".woff2": "font/woff2"}
_IMPORT = re.compile(r'^import .*"\./(\w+)\.js";\n', re.MULTILINE)
_LONG = "public, max-age=31536000, immutable"  # another version has another address
# The query is read at once: restored settings replace the address.
_MOUNT = """const component = { element, props, trigger, query: new URLSearchParams(location.search) };
import(new URL("PATH", document.baseURI).href).then(({ mount }) => mount(component)).catch((error) => {
  document.body.dataset.shown = "yes";
  element.prepend("The scripts of the page failed: reload the page.");
  throw error;
});"""


@cache
def script_text(name: str) -> str:
    return (_FOLDER / f"{name}.js").read_text(encoding="utf-8")


def markup() -> str:
    return (_FOLDER / "cockpit.html").read_text(encoding="utf-8")


def mount_module(name: str) -> str:
    """Return the `js_on_load` that calls `mount` of the script `name`."""
    return _MOUNT.replace("PATH", _address(f"{name}.js"))


def font_tags() -> list[str]:
    """Return elements of the head: fonts are loaded with the page, so texts keep their place."""
    faces = "".join(
        f"@font-face {{ font-family: '{family}'; src: url({_address(name)}) format('woff2'); "
        "font-weight: 400 700; font-display: swap; }"
        for family, name in FONTS.items()
    )
    preload = f'<link rel="preload" as="font" type="font/woff2" href="{_address(FONTS["Inter"])}" crossorigin />'
    return [preload, f"<style>{faces}</style>"]


def _address(name: str) -> str:
    return FILE_PATH.format(version=_version(), name=name).removeprefix("/")  # the page may have a prefix


def file_route() -> Route:
    """Return the route of scripts and saved page, whose addresses contain a digest."""

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        content = _files().get(name)
        if content is None or request.path_params["version"] != _version():
            return PlainTextResponse("There is no such file: reload the page.", 404)
        return Response(content, media_type=_TYPES[Path(name).suffix], headers={"Cache-Control": _LONG})

    return Route(FILE_PATH, file)


@cache
def _files() -> Mapping[str, bytes]:
    texts = {_SAVED_PAGE: _saved_page(), **{f"{name}.js": bundle(name) for name in _ENTRIES}}
    fonts = {name: (ASSETS / "fonts" / name).read_bytes() for name in FONTS.values()}
    return {name: text.encode() for name, text in texts.items()} | fonts


@cache
def _version() -> str:
    return hashlib.sha256(b"".join(_files().values())).hexdigest()[:16]


def bundle(entry: str) -> str:
    """Return a module without imports: the modules that it imports precede it in the same scope."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in texts:
            text = script_text(name)
            for imported in _IMPORT.findall(text):
                add(imported)
            texts[name] = _IMPORT.sub("", text)

    add(entry)
    return "".join(texts.values())


def _saved_page() -> str:
    """Return the page to which the browser adds a run."""
    styles = stylesheet() + (_FOLDER / "cockpit.css").read_text(encoding="utf-8")
    script = base64.b64encode(bundle("saved_page").encode()).decode()  # of any content, within HTML
    template = Template((_FOLDER / "saved_page.html").read_text(encoding="utf-8"))
    return template.substitute(styles=styles, script=script, markup=markup())
