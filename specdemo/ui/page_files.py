"""Files of the page: its head and first paint, and markup, scripts and fonts shared with saved pages and lessons.

A script and the modules that it imports are sent as one module, since a request per module delays the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.models.zoo import ASSETS
from specdemo.ui.frames import read_traces
from specdemo.ui.run_store import RECORDED
from specdemo.ui.summary import headline
from specdemo.ui.theme import DARK, LIGHT, stylesheet

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


PICTURE_PATH = "/preview.png"
CLAIM = "A small helper guesses the next words, the large model checks all at once. Same text, less waiting."
TITLE = "specdemo: speculative decoding, visible and measured"
DESCRIPTION = (
    "A small model guesses several tokens, the large model checks them in one pass. The text is that of "
    "the large model. See every guess, compare with autoregressive decoding, and predict the speed-up."
)
_OF_GRADIO = re.compile(rb'<meta\s+(?:property|name)="(?:og|twitter):[^>]*>\s*')
_ROOT = re.compile(rb'("root":|const root = )"([^"]*)"')  # in the configuration and in a script
_START = b'<meta charset="utf-8" />'
_BODY = b"<gradio-app"
_EXAMPLE = RECORDED / "hybrid, short answer.jsonl"
# Covers the page until its parts are mounted.
_FIRST_PAINT = Template("""<style>
#first-paint { position: fixed; inset: 0; z-index: 100; padding: 20px 32px; font: 17px/1.5 Inter, sans-serif; }
#first-paint { background: $ground; color: $ink; animation: specdemo-uncover 0s 12s forwards; }
@keyframes specdemo-uncover { to { visibility: hidden; } }
#first-paint b { font-size: 22px; }
body[data-shown] #first-paint { display: none; }
@media (prefers-color-scheme: dark) { #first-paint { background: $dark_ground; color: $dark_ink; } }
</style>
<div id="first-paint"><b>specdemo</b><p>$claim</p><p><b>$result</b></p><p>Loading …</p></div>
""")
_FIRST_PAGE = b'"current_page":""'
_LOADED = re.compile(rb'<(?:script type="module"|link rel="(?:preload|stylesheet)")[^>]*>(?:</script>)?')
_ADD_SLASH = """if (!location.pathname.endsWith("/")) {
  const base = document.createElement("base");
  base.href = `${location.origin}${location.pathname}/`;
  document.head.append(base);
}"""
_BASE = rb"\1document.baseURI.slice(0, -1)"


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


def file_routes() -> list[Route]:
    """Return the routes of scripts and saved page, whose addresses contain a digest, and of the picture of previews."""

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        content = _files().get(name)
        if content is None or request.path_params["version"] != _version():
            return PlainTextResponse("There is no such file: reload the page.", 404)
        return Response(content, media_type=_TYPES[Path(name).suffix], headers={"Cache-Control": _LONG})

    picture = Route(PICTURE_PATH, lambda _: FileResponse(ASSETS / "preview.png", media_type="image/png"))
    return [Route(FILE_PATH, file), picture]


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


def with_head(page: bytes, keeps_root: bool) -> bytes:
    """Replace the tags of link previews; add the script; derive addresses from the location of the page.

    Gradio's root depends on headers, which proxies change. On a Space `keeps_root`: it may be the path of a replica.
    """
    root = _ROOT.search(page)
    address = root.group(2).decode() if root else ""
    tags = {
        "og:type": "website",
        "og:title": TITLE,
        "og:description": DESCRIPTION,
        "og:image": address + PICTURE_PATH,
        "twitter:card": "summary_large_image",
    }
    lines = [f'<meta property="{name}" content="{html.escape(value)}" />' for name, value in tags.items()]
    lines += [f"<title>{TITLE}</title>", f'<meta name="description" content="{html.escape(DESCRIPTION)}" />']
    lines.append('<link rel="icon" href="favicon.ico" />')
    if _FIRST_PAGE in page:
        lines.append(f"<script>{_ADD_SLASH}</script>")
        page = page.replace(_BODY, first_paint() + _BODY, 1)
    lines += font_tags()
    lines.append(f"<script>{script_text('end_loading')}</script>")
    for path in (b"manifest.json", b"pwa_icon/"):
        page = page.replace(b'"/' + path, b'"' + path)
    if not keeps_root:
        page = _ROOT.sub(_BASE, page)
    page = _OF_GRADIO.sub(b"", page).replace(_START, _START + "".join(lines).encode(), 1)
    return _LOADED.sub(_written, page) if _FIRST_PAGE in page else page


def _written(tag: re.Match[bytes]) -> bytes:
    """Let a script write the tag: browsers load files ahead of the script that adds the slash."""
    text = json.dumps(tag[0].decode()).replace("</", "<\\/")
    return f"<script>document.write({text})</script>".encode()


@cache
def first_paint() -> bytes:
    """Return the title, the claim and the result of the recorded example: visible before any script has run."""
    run = read_traces(_EXAMPLE.read_text("utf-8"))
    result = headline(run.lanes, {})
    colours = {"ground": LIGHT["ground"], "ink": LIGHT["ink"], "dark_ground": DARK["ground"], "dark_ink": DARK["ink"]}
    words = f"Example: {result['text']}" if result else ""
    return _FIRST_PAINT.substitute(colours, claim=html.escape(CLAIM), result=html.escape(words)).encode()


class PageHead:
    """ASGI middleware that changes the head of HTML pages and the icons of the app, and adds the first paint."""

    def __init__(self, app: ASGIApp, keeps_root: bool) -> None:
        self._app = app
        self._keeps_root = keeps_root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        page = bytearray()

        async def replace(message: Message) -> None:
            nonlocal start
            headers = Headers(raw=message.get("headers", ()))
            kind = headers.get("content-type", "")
            if kind.startswith(("text/html", "application/manifest")) and "content-encoding" not in headers:
                start = message
            elif start is None:
                await send(message)
            else:
                page.extend(message.get("body", b""))
                if not message.get("more_body"):
                    body = with_head(bytes(page), self._keeps_root)
                    MutableHeaders(scope=start)["content-length"] = str(len(body))
                    await send(start)
                    await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, replace)
