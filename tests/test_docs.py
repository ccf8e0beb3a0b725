"""Documents: links and anchors resolve, measured tables are marked, the README stays short."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "assets/pair/README.md", *sorted(ROOT.glob("docs/*.md"))]
COMMANDS = {"bench", "prove"}  # subcommands of specdemo that print a table for the docs
STUDIES = {path.stem for folder in ("benchmarks", "training") for path in (ROOT / folder).glob("*.py")} | COMMANDS


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of all headings, in GitHub's spelling."""
    found: Counter[str] = Counter()
    result = set()
    for title in re.findall(r"^#+ +(.+?) *$", without_code(text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        result.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return result


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of `text`, located at `path`, without a file or heading as destination."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        file = (path.parent / name).resolve() if name else path
        destination = text if file == path else file.read_text("utf-8") if anchor and file.is_file() else ""
        if not file.exists() or (anchor and anchor not in anchors(destination)):
            broken.append(link)
    return broken


def unmarked(text: str) -> list[str]:
    """Return errors in the begin and end markers of measured tables."""
    errors, current = [], None
    for kind, name in re.findall(r"<!-- (begin|end): (\S+) -->", text):
        if kind == "begin":
            errors += [f"{current} is not closed"] if current else []
            current = name
        else:
            errors += [f"{name} is not open"] if current != name else []
            current = None
    return errors + ([f"{current} is not closed"] if current else [])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve_and_markers_are_balanced(path: Path) -> None:
    text = path.read_text("utf-8")
    assert broken_links(path, text) == []
    assert unmarked(text) == []


def test_broken_links_and_markers_are_found() -> None:
    text = "# A `b` c\n[x](#a-b-c) [y](#a) [z](missing.md) [w](docs/models.md#memory) [v](docs/models.md#no) [u](https://u)"
    assert broken_links(ROOT / "README.md", text) == ["#a", "missing.md", "docs/models.md#no"]
    assert unmarked("<!-- begin: a --><!-- end: a -->") == []
    assert unmarked("<!-- begin: a --><!-- begin: b --><!-- end: b -->") == ["a is not closed"]
    assert unmarked("<!-- end: a --><!-- begin: b -->") == ["a is not open", "b is not closed"]


def test_every_marked_table_names_its_study_and_is_unique() -> None:
    names = [name for path in DOCUMENTS for name in re.findall(r"<!-- begin: (\S+) -->", path.read_text("utf-8"))]
    assert names and len(names) == len(set(names))
    assert {name.partition("-")[0] for name in names} <= STUDIES


def test_every_study_in_a_command_exists() -> None:
    for path in DOCUMENTS:
        modules = set(re.findall(r"\b(benchmarks|training)\.([a-z]\w*)", path.read_text("utf-8")))
        assert not {f"{folder}.{name}" for folder, name in modules if not (ROOT / folder / f"{name}.py").is_file()}


def test_the_readme_fits_one_screen() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 7_000


def test_the_figures_of_the_readme_are_those_of_the_bench_table() -> None:
    bench = (ROOT / "docs/performance.md").read_text("utf-8").partition("begin: bench -->")[2].partition("<!-- end")[0]
    measured = {
        (kind, method, temperature): (speedup, interval)
        for kind, method, temperature, speedup, interval in re.findall(
            r"^\| (\w+) +\| (\w+)[^|]* T=(\d) +\| \d+ +\| ([\d.]+) +\| ([\d.-]+) +\|", bench, re.MULTILINE
        )
    }
    rows = re.findall(
        r"^\| (\w+), temperature (\d) \| `(\w+)`[^|]*\| ([\d.]+) \| ([\d.-]+) \|",
        (ROOT / "README.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 4
    for kind, temperature, method, *figures in rows:
        assert measured[kind, method, temperature] == tuple(figures)
