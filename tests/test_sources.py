"""The list of the sources: complete, every reference resolves, and every command runs."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import gradio as gr
import pytest

from benchmarks.runs import cloud_service
from specdemo.cli import main
from specdemo.cli.arguments import ARGUMENTS, parser
from specdemo.core.policies import POLICIES
from specdemo.core.rules import RULES
from specdemo.drafters import METHODS
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.ui.page import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SERVICE = "http://127.0.0.1:8300"  # replaced by the address of a running service
SECTIONS = {  # numbered sections, figures, tables and algorithms of each document
    "Theory of NASD": "1.1 1.2 1.3 2.1 2.2 2.3 3.1 3.2 3.3 3.4 3.5 4.1 4.2 4.3 5.1 5.2 5.3 5.4 6 defaults",
    "Fast Inference from Transformers, a reading": "1 2.1 2.2 2.3 3.1 3.2 3.3 3.4 3.5 4.1 Fig.1 Fig.2 Fig.3 Fig.4 "
    "Table1 Table2 Table3 Algorithm1 Theorem3.8 Corollary3.9 Theorem3.11 App.A.1 eq.1",
    "Theory of speculative decoding": "1.1 1.2 1.3 2.1 2.2 2.3 2.4 2.5 2.6 3.1 3.2 3.3 4.1 4.2 4.3 4.4 5.1 5.2 5.3 6",
    "Implementation walk-through": "1.1 1.2 1.3 2.1 2.2 2.3 3.1 3.2 3.3 3.3.1 3.3.2 3.3.3 3.3.4 3.3.5 3.3.6 4.1 4.2 "
    "4.3 4.4 5.1 5.2 5.3 5.4 5.5 6.1 6.2 7.1 8",
    "Practice guide": "0 1 2 3.1 3.2 4.1 4.2 5.1 5.2 6.1 6.2 7 8 9 10 11 12 13",
}
PROMPTS_PER_KIND = 2  # read by the commands
OVER_A_SECOND = re.compile(r"specdemo (bench|calibrate|preflight|prove) |--remote ")


class Row(NamedTuple):
    """Row of the list."""

    document: str
    sections: tuple[str, ...]
    subject: str
    here: str

    @property
    def references(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.here)


def read(text: str) -> list[Row]:
    rows = []
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
        rows += [Row(title, tuple(a.replace(" ", "") for a in first.split(",")), *rest) for first, *rest in cells[1:]]
    return rows


ROWS = read((ROOT / "docs/sources.md").read_text("utf-8"))
COMMANDS = dict.fromkeys(ref for row in ROWS for ref in row.references if ref.startswith("specdemo "))


@pytest.mark.parametrize("document", SECTIONS)
def test_every_section_has_a_row(document: str) -> None:
    listed = {section for row in ROWS if row.document == document for section in row.sections}
    assert not set(SECTIONS[document].split()) - listed
    assert {row.document for row in ROWS} == SECTIONS.keys()


@cache
def elements() -> set[str]:
    """Return the element ids of the page."""
    page = build(pair="bundled", device="cpu")
    page.worker.close()
    blocks = page.blocks.blocks.values()
    ids = {getattr(block, "elem_id", None) for block in blocks}
    markup = (ROOT / "specdemo/ui/cockpit/cockpit.html").read_text("utf-8")
    markup += "".join(block.value or "" for block in blocks if isinstance(block, gr.HTML))
    return {*filter(None, ids), *re.findall(r'id="([^"]+)"', markup)}


@cache
def flags() -> set[str]:
    """Return the flags of all commands."""
    found: set[str] = set()
    for name, (_, add_arguments) in ARGUMENTS.items():
        command = type(parser())(prog=name)
        add_arguments(command)
        found |= {flag for argument in command.arguments for flag in argument.option_strings}
    return found


def problem(reference: str) -> str:
    """Return why a reference does not resolve, or an empty text."""
    names = {*METHODS, *RULES, *POLICIES, *PAIRS, *ARGUMENTS, "use_cache=False", "use_egag", "policy", "max_fn"}
    if reference.startswith("specdemo "):
        arguments = shlex.split(reference)[1:]
        try:
            parser().parse_args(arguments)
        except (SystemExit, argparse.ArgumentError):
            return f"{reference} is no valid command"
        return ""
    if reference.startswith("#"):
        return "" if reference[1:] in elements() else f"{reference} is no element of the page"
    if reference.startswith("--"):
        return "" if reference in flags() else f"{reference} is no flag"
    if reference.startswith("python -m "):
        return "" if find_spec(reference.split()[2]) else f"{reference} is no module"
    if reference.startswith("tests/"):
        file, _, test = reference.partition("::")
        exists = (ROOT / file).is_file() and f"def {test}(" in (ROOT / file).read_text("utf-8")
        return "" if exists else f"{reference} is no test"
    return "" if reference in names or is_defined(reference) else f"{reference} is not defined"


def is_defined(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(("specdemo", *parts[:end]))
        try:
            value = import_module(module)
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            value = getattr(value, attribute, None)
        return value is not None
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.document} {', '.join(row.sections)}")
def test_every_reference_resolves(row: Row) -> None:
    assert not [text for text in map(problem, row.references) if text]
    linked = "](" in row.here or "rows" in row.here
    assert row.subject and (row.references or linked or row.here.startswith(("*Not*", "*Planned*")))
    if row.here.startswith("*Not*"):
        assert len(row.here) > 60  # a reason and an alternative


@pytest.mark.parametrize("wrong", ["`#nowhere`", "`core.theory.nothing`", "`--nonsense`", "`specdemo run`", "`magic`"])
def test_wrong_references_are_found(wrong: str) -> None:
    (row,) = read(f"# S\n\n## D\n\n| section | subject | here |\n|---|---|---|\n| 1, Fig. 2 | x | {wrong} |\n")
    assert row.sections == ("1", "Fig.2") and [text for text in map(problem, row.references) if text]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with cloud_service("--device", "cpu") as running:
        yield running.url


@pytest.mark.parametrize("command", [text for text in COMMANDS if not OVER_A_SECOND.search(text)])
def test_commands_run(
    command: str, pool: ModelPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("specdemo.generate"), "ModelPool", lambda: pool)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def first_prompts(kinds: Sequence[str] = (), chat: bool = False) -> list[Prompt]:
    return alternate_classes(load_prompts(kinds, chat), PROMPTS_PER_KIND)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [text for text in COMMANDS if OVER_A_SECOND.search(text)])
def test_commands_of_many_runs_or_of_a_service(
    command: str, pool: ModelPool, service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("generate", "cli.commands"):
        monkeypatch.setattr(import_module(f"specdemo.{module}"), "ModelPool", lambda: pool)
    monkeypatch.setattr(import_module("specdemo.cli.commands"), "load_prompts", first_prompts)
    assert main(shlex.split(command.replace(SERVICE, service))[1:]) == 0
    assert capsys.readouterr().out
