"""Markup, styles and JavaScript modules of the cockpit, shared by the page, saved web pages and lessons."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from specdemo.ui.theme import stylesheet

_FOLDER = Path(__file__).parent / "cockpit"
FILE_PATH = "/cockpit/{version}/{name}"
_SAVED_PAGE = "saved_page.html"
_IMPORT = re.compile(r'((?:import|from) )"\./(\w+)\.js"')
_LONG = "public, max-age=31536000, immutable"  # another version has another address
# The query is read at once: restored settings replace the address.
_MOUNT = """const root = `${window.gradio_config?.root ?? location.origin}/`;
const component = { element, props, server, trigger, query: new URLSearchParams(location.search) };
import(new URL("PATH", root).href).then(({ mount }) => mount(component)).catch((error) => {
  document.body.dataset.shown = "yes";
  element.prepend("The scripts of the page failed: reload the page.");
  throw error;
});"""


@cache
def _scripts() -> Mapping[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.js"))}


def script_text(name: str) -> str:
    return _scripts()[name]


def markup() -> str:
    return (_FOLDER / "cockpit.html").read_text(encoding="utf-8")


def mount_module(name: str) -> str:
    """Return the `js_on_load` that calls `mount` of a module."""
    path = FILE_PATH.format(version=_version(), name=f"{name}.js")
    return _MOUNT.replace("PATH", path.removeprefix("/"))  # the page may have a prefix


def file_route() -> Route:
    """Return the route of modules and saved page, whose addresses contain a digest."""

    def file(request: Request) -> Response:
        text = _files().get(request.path_params["name"])
        if text is None or request.path_params["version"] != _version():
            return PlainTextResponse("There is no such file: reload the page.", 404)
        kind = "html" if request.path_params["name"] == _SAVED_PAGE else "javascript"
        return Response(text, media_type=f"text/{kind}", headers={"Cache-Control": _LONG})

    return Route(FILE_PATH, file)


@cache
def _files() -> Mapping[str, str]:
    return {_SAVED_PAGE: _saved_page(), **{f"{name}.js": text for name, text in _scripts().items()}}


@cache
def _version() -> str:
    return hashlib.sha256("".join(_files().values()).encode()).hexdigest()[:16]


def _with_imports(entry: str) -> dict[str, str]:
    """Return the texts of a module and its imports by name."""
    texts: dict[str, str] = {}
    names = [entry]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = script_text(name)
            names += [imported for _, imported in _IMPORT.findall(texts[name])]
    return texts


def _saved_page() -> str:
    """Return the page to which the browser adds a run; modules are data URLs, which have no relative addresses."""
    names = ("charts", "cockpit", "step_player")
    styles = "".join((_FOLDER / f"{name}.css").read_text(encoding="utf-8") for name in names)
    modules = {
        f"cockpit/{name}": _data_url(_IMPORT.sub(r'\1"cockpit/\2"', text))
        for name, text in _with_imports("saved_page").items()
    }
    template = Template((_FOLDER / "saved_page.html").read_text(encoding="utf-8"))
    return template.substitute(styles=stylesheet() + styles, modules=json.dumps({"imports": modules}), markup=markup())


def _data_url(module: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(module.encode()).decode()}"
