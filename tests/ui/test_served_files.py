"""Documents served with the page: links, anchors, tables, and the address of the repository."""

import re
from importlib import metadata
from pathlib import Path

import gradio as gr
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from specdemo.ui import documents
from specdemo.ui.documents import document_link, document_names, document_page, document_route, page_links, repository

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'<a href="([^"]*)"')


def test_all_documents_of_the_checkout_are_served() -> None:
    assert {*document_names()} == {"readme", *(path.stem for path in ROOT.glob("docs/*.md"))}
    client = TestClient(Starlette(routes=[document_route()]))
    for name in document_names():
        response = client.get(f"/documentation/{name}")
        assert response.status_code == 200 and response.text == document_page(name)
    assert client.get("/documentation/passwd").status_code == 404
    assert client.get("/documentation/..%2Fapp").status_code == 404


@pytest.mark.parametrize("name", document_names())
def test_links_of_a_document_lead_to_documents_and_headings(name: str) -> None:
    page = document_page(name)
    assert "&lt;!--" not in page and page.count("<h1") == 1 and "<img" not in page
    ids = {other: {*re.findall(r'<h\d id="([^"]*)"', document_page(other))} for other in document_names()}
    for link in LINK.findall(page):
        assert not link.startswith("/")  # the page may have a prefix
        if link == "../" or re.match("https?:", link):
            continue
        target, _, anchor = link.partition("#")
        assert (target or name) in ids and (not anchor or anchor in ids[target or name]), link


def test_missing_documents_are_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_FILES", {})
    with gr.Blocks() as blocks:
        page_links({})
        document_link("edge-cloud")
    drawn = "".join(str(block.value) for block in blocks.blocks.values() if isinstance(block, gr.HTML))
    assert LINK.findall(drawn) == ["lessons"]


def test_the_repository_is_that_of_the_space_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ["Homepage, https://example.org", "Repository, https://example.org/code"]
    monkeypatch.setattr(metadata, "metadata", lambda name: type("", (), {"get_all": lambda self, key: urls})())
    assert repository({}) == "https://example.org/code"
    assert repository({"SPACE_ID": 'a/b"><script>'}) == "https://example.org/code"
    assert repository({"SPACE_ID": "a/b"}) == "https://huggingface.co/spaces/a/b/tree/main"
    urls.clear()
    assert repository({}) is None

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "metadata", missing)
    assert repository({}) is None
