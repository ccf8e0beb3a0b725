"""Files served with the page: documents, scripts and the first paint; example prompts and lessons."""

import json
import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import gradio as gr
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from specdemo.core.theory import expected_tokens, speedup
from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.recipe import Recipe
from specdemo.ui import page_files
from specdemo.ui.documents import FILES, document_page, document_route, page_links
from specdemo.ui.frames import read_traces
from specdemo.ui.lessons import lesson_data, lessons_markup
from specdemo.ui.page import available_examples
from specdemo.ui.page_files import CLAIM, bundle, file_routes, first_paint, mount_module
from specdemo.ui.run_store import RECORDED

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'<a href="([^"]*)"')


def test_all_documents_of_the_checkout_are_served() -> None:
    assert {*FILES} == {"readme", *(path.stem for path in ROOT.glob("docs/*.md"))}
    client = TestClient(Starlette(routes=[document_route()]))
    for name in FILES:
        response = client.get(f"/documentation/{name}")
        assert response.status_code == 200 and response.text == document_page(name)
    assert client.get("/documentation/passwd").status_code == 404
    assert client.get("/documentation/..%2Fapp").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_links_of_a_document_lead_to_documents_and_headings(name: str) -> None:
    page = document_page(name)
    assert "&lt;!--" not in page and page.count("<h1") == 1 and "<img" not in page
    ids = {other: {*re.findall(r'<h\d id="([^"]*)"', document_page(other))} for other in FILES}
    for link in LINK.findall(page):
        assert not link.startswith("/")  # the page may have a prefix
        if link == "../" or re.match("https?:", link):
            continue
        target, _, anchor = link.partition("#")
        assert (target or name) in ids and (not anchor or anchor in ids[target or name]), link


@pytest.mark.parametrize(("space", "linked"), [("a/b", True), ('a/b"><script>', False), ("", False)])
def test_the_repository_is_that_of_the_space(space: str, linked: bool) -> None:
    with gr.Blocks() as blocks:
        page_links({"SPACE_ID": space})
    (links,) = (str(block.value) for block in blocks.blocks.values() if isinstance(block, gr.HTML))
    assert ("https://huggingface.co/spaces/a/b/tree/main" in links) == linked and "script" not in links


# --- scripts, fonts and the first paint -------------------------------------------------------------------------------


def test_automated_browsers_are_shown_the_same_page() -> None:
    sources = [path.read_text("utf-8") for path in Path(page_files.__file__).parent.rglob("*.js")]
    assert len(sources) > 10 and not [text for text in sources if "webdriver" in text]


@pytest.mark.parametrize("entry", ["page", "lessons"])
def test_a_script_is_served_with_its_imports_for_a_long_time(entry: str) -> None:
    client = TestClient(Starlette(routes=file_routes()))
    (address,) = re.findall(r'"(cockpit/[\w/]+\.js)"', mount_module(entry))
    response = client.get(f"/{address}")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/javascript")
    assert "immutable" in response.headers["cache-control"]
    assert "export function mount(" in response.text and not re.search("^import ", response.text, re.MULTILINE)
    folder = address.rpartition("/")[0]
    other = address.replace(folder, "cockpit/0123456789abcdef")
    assert client.get(f"/{other}").status_code == client.get(f"/{folder}/none.js").status_code == 404


def test_the_result_of_the_recorded_example_is_visible_before_any_script() -> None:
    page = first_paint().decode()
    run = read_traces((RECORDED / "hybrid, short answer.jsonl").read_text("utf-8"))
    assert CLAIM in page and json.loads(run.frame(0))["headline"]["text"] in page


@pytest.mark.parametrize("entry", ["page", "lessons", "saved_page"])
def test_names_of_modules_are_unique_within_a_script(entry: str) -> None:
    names = re.findall(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", bundle(entry), re.MULTILINE)
    assert len(names) > 50 and sorted(names) == sorted({*names})


@pytest.mark.skipif(not which("node"), reason="node is not installed")
@pytest.mark.parametrize("entry", ["page", "lessons", "saved_page"])
def test_a_script_with_its_imports_is_valid(entry: str, tmp_path: Path) -> None:
    script = tmp_path / f"{entry}.mjs"
    script.write_text(bundle(entry), "utf-8")
    checked = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


# --- example prompts --------------------------------------------------------------------------------------------------

EXAMPLES = json.loads((ASSETS / "examples.json").read_text("utf-8"))
CHAT_PAIR = "smollm2-135m"  # available if its model is installed


@pytest.mark.parametrize("example", EXAMPLES["ready"], ids=lambda example: example["title"])
def test_an_example_is_a_valid_recipe_with_a_short_effect(example: dict[str, Any]) -> None:
    names = ("method", "chat", "temperature")
    models = {"pair": example["pair"]} if example["pair"] in PAIRS else {"target": "org/model"}
    recipe = Recipe(**models, **{name: example[name] for name in names})
    assert example.keys() == {"title", "pair", "prompt", "effect", *names}
    assert example["pair"] in (CHAT_PAIR, "bundled") and recipe.chat == (example["pair"] == CHAT_PAIR)
    assert example["effect"].endswith(".") and len(example["effect"].split()) <= 12


def test_only_examples_of_available_pairs_are_shown() -> None:
    both = available_examples(EXAMPLES, {CHAT_PAIR, "bundled"})
    assert [example.items() >= own.items() for example, own in zip(both["ready"], EXAMPLES["ready"], strict=True)]
    bundled = available_examples(EXAMPLES, {"bundled"})
    assert {example["pair"] for example in bundled["ready"]} == {"bundled"}
    best = bundled["best"]["draft"]
    assert (best["pair"], best["method"], best["chat"]) == ("bundled", "draft", False)
    assert best["prompt"] == EXAMPLES["methods"]["draft"]["best"]["prompt"]
    chat = available_examples(EXAMPLES, {CHAT_PAIR})
    assert len(chat["ready"]) == 6 and not chat["best"] and not chat["worst"]
    assert available_examples({"ready": [], "methods": {}}, PAIRS) == {"ready": [], "best": {}, "worst": {}}


# --- claims of the lessons --------------------------------------------------------------------------------------------


def predicted(alpha: float) -> float:
    costs = lesson_data()["costs"]
    gamma = round(costs["gamma"])
    return speedup(expected_tokens(alpha, gamma), gamma, costs["c"], costs["v"], costs["o"])


def test_right_choices_are_those_of_the_recorded_runs() -> None:
    data = lesson_data()
    right = re.findall(r"<button [^>]*data-right>(.*?)</button>", lessons_markup())
    assert float(right[0].removesuffix(" ms")) == round(1000 * data["passes"]["several"], 2)
    assert right[1] == f"{len(data['race'][0][1]) - 1} passes"
    rejected = data["survive"][-1]["nodes"][1]
    share = rejected["p"] / rejected["q"]
    assert rejected["state"] == "rejected" and right[2] == f"In {100 * share:.0f} % of the draws"
    assert data["copied"][-1]["step"]["origin"][0]["source"] == "n-gram" and right[3] == "From the text before"
    least = int(re.search(r"\d+", right[4])[0]) / 100
    assert predicted(least - 0.01) <= 1 < predicted(least)


def test_the_conclusion_follows_from_both_figures() -> None:
    shown = re.search(r"This predicts ([\d.]+)×; measured were ([\d.]+)×. (.*?)<", lessons_markup())
    assert shown and (float(shown[1]) > 1) != (float(shown[2]) > 1) and "disagree" in shown[3]
