"""Lines of traces and benchmark records: written by hand, arbitrary, or events as values of JSON and back."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from contracts.traces import golden_traces
from hypothesis import strategies as st

from specdemo.core import trace
from specdemo.core.events import Event, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, SPEC


def trace_lines(*arguments: Any) -> Iterator[dict[str, Any]]:
    """`generate`, with its events as JSON values."""
    return map(trace.to_json, generate(*arguments))


def run_of(recipe: Recipe, prompt: str, models: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens and the metrics of a run without an error."""
    *lines, end = trace_lines(recipe, prompt, models)
    assert end["error"] is None
    return [token for line in lines for token in line.get("tokens", ())], end["metrics"]


def events_of(lines: Iterable[dict[str, Any]]) -> Iterator[Event]:
    metrics = Metrics()
    for line in lines:
        event = trace.from_json(line, metrics)
        metrics = getattr(event, "metrics", metrics)
        yield event


def step_events(events: Iterable[Event]) -> list[StepEvent]:
    return [event for event in events if isinstance(event, StepEvent)]


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [token for event in step_events(events) for token in event.step.tokens]


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in step_events(events))


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


def golden(*names: str) -> list[dict[str, Any]]:
    traces = golden_traces()
    return [json.loads(line) for name in names for line in traces[name].splitlines()]


def jsonl(*lines: Any) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


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
    for line in lines:
        run.add_event(lane, trace.from_json(line, run.lanes[lane].metrics))


def whole(run: Run, lane: str = SPEC, lines: tuple = (PREFILL, REJECTION, ALL_KEPT)) -> Run:
    absorb(run, lane, {"phase": "loading", "text": "loading the target"}, header("ar" if lane == BASELINE else "draft"))
    absorb(run, lane, *lines, end())
    return run


ids = st.integers(0, (1 << 31) - 1)
texts = st.text(max_size=6)
probabilities = st.floats(0, 1)
tops = st.fixed_dictionaries(
    {"entropy": st.floats(-1e12, 1e12), "top": st.lists(st.tuples(ids, probabilities).map(list), max_size=3)}
)
origins = st.fixed_dictionaries(
    {}, optional={"source": texts, "position": ids, "matched": ids, "count": ids, "confidence": probabilities}
)
links = st.dictionaries(
    st.sampled_from(
        ("escalated", "edge", "provisional", "pending", "cloud_s", "rtt_s", "sent", "rows", "lost", "up_s", "down_s")
        + ("confirmed", "overruled", "bytes_up", "bytes_down", "hard_ratio", "future key")
    ),
    st.sampled_from((0.0, 1.0)) | st.floats(-1e12, 1e12),
    max_size=6,
)
RULES = ("rejection", "block", "match", "coupled", "top1", "ratio", "threshold", "typical", "future")
headers = st.fixed_dictionaries(
    {
        "specdemo": st.just(1),
        "recipe": st.fixed_dictionaries(
            {
                "method": st.sampled_from([*METHODS, "future"]),
                "gamma": st.integers(0, 1024),
                "temperature": st.sampled_from((0.0, 0.7)) | st.floats(0, 1000),
            },
            optional={
                "policy": texts,
                "rule": st.sampled_from(RULES),
                "num_beams": st.integers(1, 4),
                "chat": st.booleans(),
                "external": st.sampled_from((None, "llama.cpp=http://127.0.0.1:8080", "vllm=http://[::1]:1")),
                "cloud": st.none()
                | st.fixed_dictionaries({}, optional={"remote": texts, "mode": texts | st.just("speculative")}),
            },
        ),
        "prompt": texts,
        "prompt_tokens": st.lists(ids, max_size=3),
    },
    optional={
        "exact": st.booleans(),
        "encoder": st.booleans(),
        "vocab_size": st.integers(1, (1 << 31) - 1),
        "environment": st.fixed_dictionaries(
            {},
            optional={
                "target_bytes": st.none() | st.floats(0, 1e18),
                "drafter_bytes": st.none() | st.floats(0, 1e18),
                "parity": st.fixed_dictionaries(
                    {"cost": st.dictionaries(st.integers(0, 9).map(str), st.floats(1e-9, 1e6), max_size=3)}
                ),
            },
        ),
    },
)
ends = st.fixed_dictionaries(
    {"end": st.sampled_from(("stop", "length", "cancelled", "error")), "error": st.none() | texts},
    optional={
        "metrics": st.just({"kv_bytes": 1e6}),
        "context_full": st.booleans(),
        "pair_speeds": st.lists(st.floats(0, 1e9), max_size=5),
    },
)


@st.composite
def steps(draw: st.DrawFn, i: int, t: float) -> dict[str, Any]:
    """Return a step that `core.trace.read` accepts."""
    kind = draw(st.sampled_from(("step", "step", "step", "search", "other engine")))
    n = 0 if kind == "search" else draw(st.integers(0, 4))
    chain = kind == "other engine" or draw(st.booleans())
    parents = [node - 1 if chain else draw(st.integers(-1, node - 1)) for node in range(n)]
    accepted: list[int] = []
    for node in range(n):
        if parents[node] == (accepted[-1] if accepted else -1) and (kind == "other engine" or draw(st.booleans())):
            accepted.append(node)
    per_node = {name: [draw(st.none() | probabilities) for _ in range(n)] for name in ("p", "draw", "beta")}
    per_node["beta"] = [draw(probabilities) if v in accepted else b for v, b in enumerate(per_node["beta"])]
    token = None if kind == "search" or draw(st.integers(0, 9)) == 0 else draw(ids)
    count = draw(st.integers(0, 3)) if kind == "search" else len(accepted) + (token is not None)
    tokens = [draw(ids) for _ in range(count)]
    tokens[-1:] = [token] if token is not None else tokens[-1:]
    pieces = [draw(texts) for _ in tokens]
    link = draw(links) if draw(st.integers(0, 3)) == 0 else None
    choices = [draw(st.lists(ids, min_size=1, max_size=2)) for _ in range(n + 1)]
    reported = kind == "other engine"
    untimed = reported and draw(st.booleans())
    names = ("correction", "bonus", "plain", "unverified", *["unknown"] * reported)
    required = {
        "i": i,
        "t": t,
        "tokens": tokens,
        "token": token,
        "text": "".join(pieces),
        "pieces": pieces,
        "draft": [draw(ids) for _ in range(n)],
        "draft_text": [draw(texts) for _ in range(n)],
        "parents": parents,
        "accepted": accepted,
        "kind": draw(st.sampled_from(names)),
        "q": draw(st.none() | st.lists(probabilities, min_size=n, max_size=n)),
        "choices": [] if kind == "search" or ((reported or link is not None) and draw(st.booleans())) else choices,
        "gamma": draw(st.integers(0, 1024)),
        **{name: None if untimed else draw(st.floats(0, 1e9)) for name in ("draft_s", "verify_s", "host_s")},
        **per_node,
    }
    optional = {
        "bound": [draw(st.none() | probabilities) for _ in range(n)],
        "laws": [draw(tops) for _ in range(n + 1)],
        "drafted": [draw(tops) for _ in range(n)],
        "token_top": draw(st.none() | tops),
        "rank": [draw(ids) for _ in range(n)],
        "origin": [draw(origins) for _ in range(n)],
        "policy": draw(st.dictionaries(texts, st.floats(-1e12, 1e12), max_size=2)),
        "texts": draw(st.dictionaries(ids.map(str), texts, max_size=3)),
        "memory": {"rss_bytes": draw(st.none() | st.floats(0, 1e18))},
    }
    chosen = {name: value for name, value in optional.items() if draw(st.booleans())}
    if link is not None:
        chosen["remote"] = link
    if reported:
        chosen["undisclosed"] = draw(st.integers(0, 5))
    if kind == "search":
        chosen |= {"pending": [draw(ids)], "pending_text": draw(texts)}
    return required | chosen


@st.composite
def arbitrary_traces(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return the lines of a trace or of two; the last end may be missing."""
    lines = []
    for _ in range(draw(st.integers(1, 2))):
        times = sorted(draw(st.lists(st.floats(0, 1e9), max_size=4)))
        lines += [draw(headers), *(draw(steps(i, t)) for i, t in enumerate(times)), draw(ends)]
    return lines[: len(lines) - draw(st.integers(0, 1))] or lines


def bench_run(wall: float, drafted: int = 0, text: tuple[int, ...] = (1, 2), **changes: Any) -> dict[str, Any]:
    """Ten steps after the prefill: 0.2 s of drafting, 0.7 s of verification, 0.1 s of host time."""
    return {
        "text": list(text),
        "decode_tokens": 20 if drafted else 10,
        "wall_s": wall,
        "tokens_per_second": 1.0,
        "steps": 11,
        "draft_s": 0.2 if drafted else 0.0,
        "verify_s": 0.7,
        "host_s": 0.1,
        "drafted": drafted,
        "acceptance_rate": 0.5 if drafted else None,
        "alpha": 0.55 if drafted else None,
        "mean_beta": 0.6 if drafted else None,
        "tokens_per_step": 2.0 if drafted else 1.0,
        "tokens_per_target_pass": 2.0 if drafted else 1.0,
        "ttft_s": 0.1,
        "bytes_read": 100.0,
        "held_bytes": 5e6,
        **changes,
    }
