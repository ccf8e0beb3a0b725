"""No pair of displayed figures contradicts the other, in quiet times and beside another program."""

import json
import re
from typing import Any

import pytest
from fakes.properties import holds_for
from fakes.shown_claims import chat_line, claims, without_names
from fakes.shown_figures import LEAST_PASS, MOST_PER_PASS, Line, RunFigures, unexplained
from fakes.trace_records import absorb, end, header, step
from hypothesis import strategies as st

from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, SPEC
from specdemo.ui.tabs.edge import describe_link, edge_lane
from specdemo.ui.visitors import answer_footer

pytestmark = pytest.mark.slow

NOISE = 0.02  # of quiet times
LINK = {"sent": 1.0, "bytes_up": 300.0, "bytes_down": 200.0, "escalated": 1.0}


@st.composite
def compared_runs(draw: st.DrawFn, quiet: bool) -> list[Line]:
    """Return two traces. In disturbed times some passes take longer by a factor."""
    linked, pass_s, row_s = draw(st.booleans()), draw(st.floats(1e-3, 0.1)), draw(st.floats(0, 1))
    steady = st.floats(1 - NOISE, 1 + NOISE)
    slow = st.just(draw(st.floats(1, 1.5) | st.floats(1, 10)))
    disturbances = (steady,) if quiet else (steady, slow, steady | slow)  # of no, all or some passes of a lane
    lanes: list[list[Line]] = []
    length = draw(st.integers(3, 12))
    for method in ("draft", "ar"):
        factors = draw(st.sampled_from(disturbances))
        steps = [timed(step(0, pieces=["a"]), pass_s, 0.0, draw(factors))]
        for i in range(1, length):
            guesses = draw(st.integers(0, 4)) if method == "draft" else 0
            kept = draw(st.integers(0, guesses))
            line = step(
                i, pieces=["x"] * (kept + 1), draft=("x",) * guesses, accepted=tuple(range(kept)), tested=guesses
            )
            line = timed(line, pass_s * (1 + row_s * guesses), 0.1 * pass_s * guesses, draw(factors))
            steps.append(line | {"policy": {}})
        length = 1 + sum(len(line["tokens"]) for line in steps[1:])
        lanes.append(steps)
    text = [token for line in lanes[0] for token in line["tokens"]]
    for plain, token in zip(lanes[1], text, strict=True):
        plain["tokens"] = [token]
    if draw(st.booleans()):
        lanes[1].pop()
    return [
        line for method, steps in zip(("draft", "ar"), lanes, strict=True) for line in written(method, steps, linked)
    ]


def timed(line: Line, verify_s: float, draft_s: float, factor: float) -> Line:
    return line | {"draft_s": draft_s, "verify_s": factor * verify_s, "host_s": 0.01 * verify_s}


def written(method: str, steps: list[Line], linked: bool) -> list[Line]:
    """Return the lines of a trace, with the times at which its steps end."""
    cloud = {"mode": "speculative" if method == "draft" else "cloud_only", "remote": "http://cloud"} if linked else None
    made = header(method, {"seed": 0, "max_tokens": 99, "top_p": 1.0, "cloud": cloud}, vocab_size=300)
    now, lines = 0.3, []
    for line in steps:
        now += sum(line[part] for part in ("draft_s", "verify_s", "host_s"))
        share = line["verify_s"] / 8
        link = {"remote": LINK | {"cloud_s": share, "up_s": share, "down_s": share, "rtt_s": 7 * share}}
        lines.append(line | {"t": now} | (link if linked else {}))
    return [made, *lines, end()]


def shown(lines: list[Line]) -> tuple[Run, dict[str, Any]]:
    run = Run((SPEC, BASELINE))
    name = ""
    for line in lines:
        if "specdemo" in line:
            name = BASELINE if line["recipe"]["method"] == "ar" else SPEC
        absorb(run, name, line)
    run.finish()
    return run, json.loads(run.frame(0))


TILES = {
    "acceptance": "guesses kept",
    "tokens_per_pass": "tokens / pass",
    "tokens_per_second": "tokens / s",
    "speedup": "speed-up",
    "memory": "memory",
}


def check(lines: list[Line]) -> RunFigures:
    run, state = shown(lines)
    figures = RunFigures.of(lines)
    ledger = " ".join(" ".join(cells) for _, *cells in state["figures"][SPEC]["ledger"]["rows"])
    texts = {
        "headline": state["headline"]["text"],
        "advice": " ".join(state["headline"][name] for name in ("reason", "loss")),
        "verdict": state["verdict"],
        "race-lengths": state["lengths"],
        "pass-costs": (state["passes"] or {"words": ""})["words"],
        "ledger": ledger,
        **{f"lane {name}": f"{rate} {state['texts'].get(name, '')}" for name, rate in state["rates"].items()},
        **{f"tile {name}": f"{TILES.get(name, '')} {value} {note}" for name, (value, note) in state["tiles"].items()},
    }
    parts = [*texts.items(), *(("run-table", " ".join(row)) for row in state["table"][1:])]
    for part, text in parts:
        rest = unexplained(without_names(text, figures), claims(figures, part, 1))
        assert not re.search(r"\d", rest), (part, text)
    assert not re.search(r"\d", unexplained(answer_footer(run.lanes, run.speeds), chat_line(figures)))
    check_rules(figures, state)
    return figures


def check_rules(figures: RunFigures, state: dict[str, Any]) -> None:
    """Relations between figures that a visitor could compute from the screen."""
    speedup = re.search(r"([\d.]+)×", state["headline"]["text"])
    assert (speedup is None) == figures.withheld()
    if state["passes"]:
        ratio, (single, several) = number(r"costs ([\d.]+) times", state["passes"]["words"]), state["passes"]["bars"]
        assert ratio >= LEAST_PASS - 0.005 and several[1] / single[1] == pytest.approx(ratio, abs=0.005)
    if speedup is None:
        texts = [state["headline"]["text"], state["verdict"], state["table"], state["tiles"]]
        assert "×" not in json.dumps(texts, ensure_ascii=False)
        return
    value = float(speedup[1])
    spec, plain = (re.findall(r"([\d.]+) tok/s", state["rates"][name])[0] for name in (SPEC, BASELINE))
    quotient = float(spec) / float(plain)
    rounded = half_digit(speedup[1]) + quotient * (half_digit(spec) / float(spec) + half_digit(plain) / float(plain))
    assert value == pytest.approx(quotient, abs=1.01 * rounded)
    if not figures.first.linked:
        gain = number(r"([\d.]+)", state["tiles"]["tokens_per_pass"][0])
        assert value <= MOST_PER_PASS * gain + 0.06
    if costs := re.search(r"gave ([\d.]+) tokens for the time of ([\d.]+) single", state["headline"]["reason"]):
        gave, took = map(float, costs.groups())
        assert gave / took == pytest.approx(value, abs=0.051 + 0.01 * value / took)
        parts = re.search(
            r"time of ([\d.]+) \(guessing ([\d.]+), checking ([\d.]+), the rest ([\d.]+)\)", state["verdict"]
        )
        total, *shares = map(float, parts.groups())
        assert sum(shares) == pytest.approx(total, abs=0.021)


def half_digit(text: str) -> float:
    """Return the largest error of a rounded figure."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1])


@holds_for(30, lines=compared_runs(quiet=True))
def test_figures_of_quiet_times_agree_and_are_shown(lines: list[Line]) -> None:
    assert not check(lines).withheld()


@holds_for(30, lines=compared_runs(quiet=False))
def test_figures_of_disturbed_times_agree_or_are_withheld(lines: list[Line]) -> None:
    check(lines)


@holds_for(10, lines=compared_runs(quiet=False).filter(lambda lines: lines[0]["recipe"]["cloud"]))
def test_shares_of_the_link_sum_to_the_whole(lines: list[Line]) -> None:
    run, _ = shown(lines)
    words = describe_link(edge_lane(run))
    times = re.search(r"Time: (.*?)\. The link took (\d+) %", words)
    assert times
    shares = dict(re.findall(r"([a-z' ]+?) (\d+) %", times[1]))
    assert sum(map(int, shares.values())) == pytest.approx(100, abs=0.5 * len(shares))
    link = sum(int(value) for name, value in shares.items() if name.strip() in ("sending", "link delay", "receiving"))
    assert int(times[2]) == pytest.approx(link, abs=2)
