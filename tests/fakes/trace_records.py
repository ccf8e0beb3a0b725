"""Hand-written trace lines: a chain run with a rejection, an accepted draft and a cut step."""

from typing import Any

from specdemo.core import trace
from specdemo.core.events import StepEvent
from specdemo.core.metrics import Metrics
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, SPEC


def step(i: int, *, pieces: list[str], draft: tuple = (), accepted: tuple = (), tested: int = 0, **more: Any) -> dict:
    """Step of a chain: `draft` as texts, of which the first `tested` were tested. Token ids are arbitrary."""
    n = len(draft)
    extra = len(pieces) > len(accepted)
    kind = "plain" if not n else "bonus" if len(accepted) == n else "correction"
    return {
        "i": i,
        "tokens": [100 * i + k for k in range(len(pieces))],
        "text": "".join(pieces),
        "pieces": pieces,
        "draft": [1000 + k for k in range(n)],
        "draft_text": list(draft),
        "parents": list(range(-1, n - 1)),
        "accepted": list(accepted),
        "token": 100 * i + len(pieces) - 1 if extra else None,
        "kind": kind,
        "p": [0.5] * n,
        "q": [0.25] * n if n else None,
        "top": [1] * n,
        "choices": [[1]] * (n + 1),
        "draw": [0.125 if k < tested else None for k in range(n)],
        "beta": [0.75 if k < tested else None for k in range(n)],
        "gamma": 3,
        "draft_s": 0.01,
        "verify_s": 0.02,
        "host_s": 0.0,
        "t": 0.05 * (i + 1),
        "memory": {"rss_bytes": 5e8, "device_bytes": None, "kv_bytes": 1e6},
    } | more


SIZES = {"target_bytes": 28e6, "drafter_bytes": 5e6}


def header(method: str = "draft", options: dict[str, Any] | None = None, **more: Any) -> dict:
    recipe = {"method": method, "gamma": 3, "temperature": 0.0, **(options or {})}
    return {
        "specdemo": 1,
        "recipe": recipe,
        "prompt": "def",
        "prompt_tokens": [5, 6],
        "exact": True,
        "environment": SIZES,
    } | more


def end(how: str = "length", error: str | None = None) -> dict:
    return {"end": how, "error": error, "metrics": {}}


PREFILL = step(0, pieces=["a"])
REJECTION = step(1, pieces=["b", "X"], draft=("b", "c", "d"), accepted=(0,), tested=2)
ALL_KEPT = step(2, pieces=["e", "f", "g"], draft=("e", "f"), accepted=(0, 1), tested=2)
CUT = step(3, pieces=["h"], draft=("h", "i"), accepted=(0,), tested=1)  # a stop token ends the text


def step_event(line: dict) -> StepEvent:
    event = trace.from_json(line, Metrics())
    assert isinstance(event, StepEvent)
    return event


def absorb(run: Run, lane: str, *lines: dict) -> None:
    """Add trace lines to a run, as events."""
    for line in lines:
        run.add_event(lane, trace.from_json(line, run.lanes[lane].metrics))


def whole(run: Run, lane: str = SPEC, lines: tuple = (PREFILL, REJECTION, ALL_KEPT)) -> Run:
    absorb(run, lane, {"phase": "loading", "text": "loading the target"}, header("ar" if lane == BASELINE else "draft"))
    absorb(run, lane, *lines, end())
    return run
