"""Hypothesis strategies for lines of valid traces: chains, forests, links, searches and other engines."""

from typing import Any

from hypothesis import strategies as st

from specdemo.drafters import METHODS

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
def trace_lines(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return the lines of a trace or of two; the last end may be missing."""
    lines = []
    for _ in range(draw(st.integers(1, 2))):
        times = sorted(draw(st.lists(st.floats(0, 1e9), max_size=4)))
        lines += [draw(headers), *(draw(steps(i, t)) for i, t in enumerate(times)), draw(ends)]
    return lines[: len(lines) - draw(st.integers(0, 1))] or lines
