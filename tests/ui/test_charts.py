"""Pictures of lanes as SVG, with the same content as the page."""

from __future__ import annotations

from xml.etree import ElementTree

from fakes.trace_records import ALL_KEPT, PREFILL, REJECTION, absorb, end, header, step

from specdemo.core.step import Outcome
from specdemo.ui.frames import Run, cells
from specdemo.ui.lane import SPEC, Lane
from specdemo.ui.text_picture import as_svg, colours_of

NAME = "{http://www.w3.org/2000/svg}"


def lane(*lines: dict, prompt: str = "def") -> Lane:
    run = Run()
    for line in (header(prompt=prompt), *lines, end()):
        absorb(run, SPEC, line)
    return run.lanes[SPEC]


def texts(svg: str, kind: str) -> str:
    ink = colours_of(Outcome(kind))[1]
    return "".join(
        node.text or "" for node in ElementTree.fromstring(svg).iter(f"{NAME}text") if node.get("fill") == ink
    )


def test_every_kind_has_its_colour() -> None:
    made = lane(PREFILL, REJECTION, ALL_KEPT)
    svg, drawn = as_svg(made), [cell for event in made.steps for cell in cells(event, made.recipe)]
    for kind, legend in (("accepted", "accepted"), ("rejected", "rejected"), ("plain", "")):
        wanted = "".join(text for k, text, *_ in drawn if k == kind)
        assert texts(svg, kind) == wanted + legend
    assert 'text-decoration="line-through"' in svg and 'font-style="italic"' in svg


def test_generated_markup_gives_well_formed_svg() -> None:
    evil = '<script>&"\x00\x1b]]> \u4f60\u597d \u0301 \r\n\ttail'
    svg = as_svg(lane(step(0, pieces=[evil]), step(1, pieces=["x"], draft=(evil,), accepted=(), tested=1), prompt=evil))
    root = ElementTree.fromstring(svg)
    assert not list(root.iter(f"{NAME}script")) and "tail" in texts(svg, "plain")


def test_draft_tokens_that_an_engine_does_not_report_are_counted() -> None:
    """The rejected drafts stand before the correction, as on the page and in the terminal."""
    counted = step(1, pieces=["a", "b"], draft=("a",), accepted=(0,), tested=1)
    counted |= {"undisclosed": 3, "kind": "correction"}
    nodes = ElementTree.fromstring(as_svg(lane(PREFILL, counted))).iter(f"{NAME}text")
    shown = [node.text for node in nodes][2:]
    assert shown[:3] == ["a", "+3", "b"]
