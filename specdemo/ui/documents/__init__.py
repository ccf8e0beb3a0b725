"""Documents of the program as HTML pages, linked from the page where they are installed."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template

import gradio as gr
from markdown_it import MarkdownIt
from markdown_it.token import Token
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from specdemo.ui.theme import palette

DOCUMENT_PATH = "/documentation/{name}"
OVERVIEW = "readme"
_ROOT = Path(__file__).resolve().parents[2]
# The documents are inside the package in a wheel and next to it in a checkout; a wheel has no README.
FILES = {
    **({OVERVIEW: _ROOT.parent / "README.md"} if (_ROOT.parent / "README.md").is_file() else {}),
    **{
        path.stem: path
        for folder in (_ROOT / "docs", _ROOT.parent / "docs")
        if folder.is_dir()
        for path in sorted(folder.glob("*.md"))
    },
}
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_COMMENTS = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)
_NEW_TAB = 'target="_blank"'  # the page keeps its run
_EMPTY_HEAD = re.compile(r"<th( style=\"[^\"]*\")?></th>")


def document_route() -> Route:

    async def page(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("There is no such document.", 404)
        return HTMLResponse(document_page(name))

    return Route(DOCUMENT_PATH, page)


def page_links(environment: Mapping[str, str]) -> None:
    """Add links to the documents, the lessons and the repository, as far as they exist."""
    links = {"Lessons": "lessons"}
    if FILES:
        links |= {"Documentation": f"documentation/{next(iter(FILES))}"}
    if "sources" in FILES:
        links |= {"Papers": "documentation/sources"}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", space := environment.get("SPACE_ID", "")):
        links |= {"Repository": f"https://huggingface.co/spaces/{space}/tree/main"}
    items = " ".join(f'<a href="{html.escape(address)}" {_NEW_TAB}>{name}</a>' for name, address in links.items())
    gr.HTML(f'<nav aria-label="Documents">{items}</nav>', elem_id="page-links", apply_default_css=False)


def document_link(name: str) -> None:
    """Add a link to a document, if it is installed."""
    if name in FILES:
        link = f'<a href="documentation/{name}" {_NEW_TAB}>{html.escape(_title(name))}</a>'
        gr.HTML(f'<p class="more-about">Documentation: {link}</p>', apply_default_css=False)


@cache
def document_page(name: str) -> str:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(_markdown(name))
    _add_anchors(tokens)
    for token in tokens:
        token.children = [_linked(child) for child in token.children or () if child.type != "image"]
    items = "".join(
        f'<li><a href="{other}"{" aria-current=page" if other == name else ""}>{html.escape(_title(other))}</a></li>'
        for other in FILES
    )
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    text = _EMPTY_HEAD.sub(r"<td\1></td>", parser.renderer.render(tokens, parser.options, {}))
    text = _scrolled(_scrolled(text, "table", "Table"), "pre", "Code")
    return template.substitute(title=html.escape(_title(name)), colours=palette(), items=items, text=text)


def _markdown(name: str) -> str:
    return _COMMENTS.sub("", _FRONT_MATTER.sub("", FILES[name].read_text(encoding="utf-8")))


def _title(name: str) -> str:
    if name == OVERVIEW:
        return "Overview"
    return next(line[2:] for line in _markdown(name).splitlines() if line.startswith("# "))


def _add_anchors(tokens: Sequence[Token]) -> None:
    """Name headings as GitHub does."""
    counts: Counter[str] = Counter()
    for heading, title in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            anchor = re.sub(r"[^\w\- ]", "", title.content.lower()).replace(" ", "-")
            heading.attrs["id"] = f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor
            counts[anchor] += 1


def _linked(token: Token) -> Token:
    """Lead links to other documents; other files have no address."""
    address = str(token.attrs.get("href", ""))
    if token.type != "link_open" or re.match(r"[a-z]+:|#", address):
        return token
    path, _, anchor = address.partition("#")
    name = Path(path).stem.lower()
    if path.endswith(".md") and name in FILES and Path(path).parent.name in ("", "docs", ".."):
        token.attrs["href"] = f"{name}#{anchor}" if anchor else name
    else:
        del token.attrs["href"]
    return token


def _scrolled(text: str, element: str, label: str) -> str:
    """Surround wide elements by a group that the keyboard scrolls. Documents contain no HTML of their own."""
    group = f'<div class="scrolled" tabindex="0" role="group" aria-label="{label}">'
    return text.replace(f"<{element}>", f"{group}<{element}>").replace(f"</{element}>", f"</{element}></div>")
