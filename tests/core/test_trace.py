"""Trace lines: every field of an event in both directions, defaults of older lines, limits and error messages."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from specdemo.core import step_record, trace
from specdemo.core.errors import MAX_KEYS, UserError, limited_object
from specdemo.core.events import End, Header, Loading, MemoryUse, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft, LinkStats, Origin, Step, TopTokens, Verdict
from specdemo.core.trace import Trace

TIMES = {"draft_s": 0.5, "verify_s": 0.25, "host_s": 0.125, "t": 2.0}


def event(step: Step, **more: Any) -> StepEvent:
    return StepEvent(step, metrics=Metrics().plus(step), **more)


PREFILL = event(Step(0, (3,), Draft(), Verdict((), 3, choices=((3,),)), 4, **TIMES), pieces=("c",))
PREFILL_LINE = {
    "i": 0, "tokens": [3], "draft": [], "parents": [], "accepted": [], "token": 3, "kind": "plain", "p": [], "q": None,
    "top": [], "choices": [[3]], "draw": [], "beta": [], "bound": [], "gamma": 4, "policy": {}, "text": "c",
    "pieces": ["c"], "draft_text": [], "memory": {"rss_bytes": None, "device_bytes": None, "kv_bytes": None}, **TIMES,
}  # fmt: skip

CHAIN = event(
    Step(
        1,
        (5, 9),
        Draft.chain((5, 6), (0.5, 0.25), origin=(Origin("text", 3, 2), Origin("n-gram", order=2, count=4))),
        Verdict(
            (0,), 9, p=(0.75, 0.125), draw=(0.25, 0.875), beta=(0.5, 0.625), choices=((5, 1), (9, 2), (8, 7)),
            bound=(1.0, 0.5), rank=(1, 2), target_top=tuple(TopTokens(n / 4, ((n, 0.5),)) for n in range(3)),
            draft_top=tuple(TopTokens(n / 8, ((n, 0.25), (9, 0.5))) for n in range(2)),
            token_top=TopTokens(0.75, ((9, 1.0),)), link=LinkStats(cloud_s=0.5, sent=1, rows=2), replica="b",
        ),
        4,
        policy={"lambda": 0.5},
        **TIMES,
    ),
    pieces=("e", "i"),
    draft_texts=("e", "f"),
    token_texts={5: "e", 9: "i"},
    memory=MemoryUse(1.0, 2.0, 3.0),
)  # fmt: skip
CHAIN_LINE = {
    "i": 1, "tokens": [5, 9], "draft": [5, 6], "parents": [-1, 0], "accepted": [0], "token": 9, "kind": "correction",
    "p": [0.75, 0.125], "q": [0.5, 0.25], "top": [5, 9], "choices": [[5, 1], [9, 2], [8, 7]], "draw": [0.25, 0.875],
    "beta": [0.5, 0.625], "bound": [1.0, 0.5], "gamma": 4, "policy": {"lambda": 0.5}, "text": "ei",
    "pieces": ["e", "i"], "draft_text": ["e", "f"],
    "memory": {"rss_bytes": 1.0, "device_bytes": 2.0, "kv_bytes": 3.0},
    "remote": {"escalated": 1.0, "cloud_s": 0.5, "sent": 1.0, "rows": 2.0}, "replica": "b",
    "laws": [{"entropy": n / 4, "top": [[n, 0.5]]} for n in range(3)],
    "drafted": [{"entropy": n / 8, "top": [[n, 0.25], [9, 0.5]]} for n in range(2)],
    "token_top": {"entropy": 0.75, "top": [[9, 1.0]]}, "rank": [1, 2],
    "origin": [{"source": "text", "position": 3, "matched": 2}, {"source": "n-gram", "order": 2, "count": 4}],
    "texts": {"5": "e", "9": "i"}, **TIMES,
}  # fmt: skip

SEARCH = event(
    Step(1, (4,), Draft(), Verdict((), None, choices=((4, 5),), committed=(4,), pending=(7, 8)), 0, **TIMES),
    pieces=("d",),
    pending_text="gh",
)
SEARCH_LINE = PREFILL_LINE | {
    "i": 1, "tokens": [4], "token": None, "choices": [[4, 5]], "gamma": 0, "text": "d", "pieces": ["d"],
    "pending": [7, 8], "pending_text": "gh",
}  # fmt: skip

REPORTED = event(
    Step(
        *(1, (6, 7), replace(Draft.chain((6,)), undisclosed=2)),
        Verdict((0,), 7, p=(None,), draw=(None,), beta=(None,), bound=(None,)),
        *(3, None, None, None, 2.0),
    ),
    pieces=("f", "g"),
    draft_texts=("f",),
)
REPORTED_LINE = PREFILL_LINE | {
    "i": 1, "tokens": [6, 7], "draft": [6], "parents": [-1], "accepted": [0], "token": 7, "kind": "correction",
    "p": [None], "draw": [None], "beta": [None], "bound": [None], "top": [None], "choices": [], "gamma": 3,
    "text": "fg", "pieces": ["f", "g"], "draft_text": ["f"], "undisclosed": 2,
    "draft_s": None, "verify_s": None, "host_s": None,
}  # fmt: skip

EVENTS = {
    "prefill": (PREFILL, PREFILL_LINE),
    "chain": (CHAIN, CHAIN_LINE),
    "search": (SEARCH, SEARCH_LINE),
    "reported": (REPORTED, REPORTED_LINE),
    "loading": (Loading("read", 3, 9), {"phase": "loading", "text": "read", "done": 3, "total": 9}),
    "header": (
        Header({"method": "ar"}, "x", (1, 2), 9, False, True, True, 5, {"engine": "native"}),
        {
            "specdemo": 1, "recipe": {"method": "ar"}, "prompt": "x", "prompt_tokens": [1, 2], "vocab_size": 9,
            "exact": False, "bit_equal": True, "encoder": True, "cached_tokens": 5, "environment": {"engine": "native"},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_every_field_is_written_and_read(name: str) -> None:
    written, line = EVENTS[name]
    assert json.loads(trace.write(written)) == line and trace.write(written).endswith("}\n")
    assert trace.from_json(line, Metrics()) == written


def test_the_end_contains_the_known_memory_and_all_metrics() -> None:
    metrics = Metrics.of([PREFILL.step, CHAIN.step])
    figures = dict.fromkeys(("peak_rss_bytes", "peak_device_bytes", "kv_bytes"))
    done = End("length", None, metrics)
    assert trace.to_json(done) == {"end": "length", "error": None, "metrics": metrics.as_dict()}
    assert trace.from_json({"end": "length"}, metrics) == done
    empty = trace.to_json(replace(done, peak=MemoryUse()))
    assert empty["metrics"] == metrics.as_dict() | figures
    full = End("error", "no memory", metrics, MemoryUse(1.0, 2.0, 3.0, 4.0, 5.0), True, (8.0, 9.5))
    known = dict(zip(figures, (1.0, 2.0, 3.0), strict=True)) | {"store_bytes": 4.0, "peak_reserved_bytes": 5.0}
    assert trace.to_json(full) == {
        "end": "error", "error": "no memory", "metrics": metrics.as_dict() | known, "context_full": True,
        "pair_speeds": [8.0, 9.5],
    }  # fmt: skip
    assert trace.from_json(trace.to_json(full), metrics) == full
    only_store = {"end": "length", "metrics": {"store_bytes": 7.0}}
    assert trace.from_json(only_store, metrics) == replace(done, peak=MemoryUse(store=7.0))


def test_metrics_accumulate_over_the_lines() -> None:
    head = Header({}, "", (1,))
    lines = [trace.write(event) for event in (head, PREFILL, CHAIN, End("stop"))]
    _, first, second, last = trace.parse(lines)
    assert first == PREFILL and second.metrics == last.metrics == Metrics.of([PREFILL.step, CHAIN.step])


def test_absent_keys_of_older_lines_have_defaults() -> None:
    assert trace.from_json({"phase": "loading", "text": "x"}, Metrics()) == Loading("x", 0, 0)
    head = {"specdemo": 1, "recipe": {}, "prompt_tokens": []}
    assert trace.from_json(head, Metrics()) == Header({}, "", ())
    optional = ("policy", "memory", "bound", "top")
    line = {name: value for name, value in PREFILL_LINE.items() if name not in optional}
    assert trace.from_json(line, Metrics()) == PREFILL
    nothing = dict.fromkeys(("remote", "pending", "pending_text", "laws", "drafted", "token_top", "texts"))
    assert trace.from_json(line | nothing | {"undisclosed": None}, Metrics()) == PREFILL


@pytest.mark.parametrize(
    ("change", "bounds"),
    [
        ({}, (1.0, 0.5)),  # p / q: 0.75 / 0.5 and 0.125 / 0.25
        ({"q": [0.0, 0.5], "p": [0.5, 0.5]}, (1.0, 1.0)),
        ({"p": [None, 0.125]}, (None, 0.5)),
        ({"parents": [-1, -1]}, (None, None)),  # siblings are tested against residuals
    ],
)
def test_bounds_of_older_chains_follow_from_p_and_q(change: dict[str, Any], bounds: tuple[float | None, ...]) -> None:
    line = {name: value for name, value in CHAIN_LINE.items() if name != "bound"} | change
    assert step_record.step_of(line).verdict.bound == bounds  # type: ignore[arg-type]


# --- untrusted files ---

RECIPE = {"method": "draft", "gamma": 4, "temperature": 1.0}
HEADER = {"specdemo": 1, "recipe": RECIPE, "prompt_tokens": [1]}
LAST = {"end": "stop"}


def text(*lines: Any) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def refusal(given: Any, **limits: int) -> str:
    with pytest.raises(UserError) as refused:
        trace.read(given, **limits)
    return str(refused.value)


def test_the_events_of_a_file_are_read() -> None:
    whole, cut = trace.read(text(HEADER, PREFILL_LINE, CHAIN_LINE, LAST) + "\n \n" + text(HEADER, PREFILL_LINE))
    second = replace(CHAIN, metrics=Metrics.of([PREFILL.step, CHAIN.step]))
    assert whole.steps == (PREFILL, second) and whole.end == End("stop", None, second.metrics)
    assert cut == Trace(whole.header, (PREFILL,))  # metrics start again
    assert whole.header.recipe == RECIPE | {
        "policy": "fixed", "rule": "rejection", "num_beams": 1, "external": None, "cloud": None,
    }  # fmt: skip
    assert whole.header.environment == {"target_bytes": None, "drafter_bytes": None, "parity": {"cost": {}}}
    last_without_newline = text(HEADER, PREFILL_LINE, LAST).rstrip("\n")
    assert len(trace.read(last_without_newline)[0].steps) == 1
    for name in ("search", "reported"):
        assert trace.read(text(HEADER, PREFILL_LINE, EVENTS[name][1], LAST))[0].steps[1].step == EVENTS[name][0].step


def test_limits_are_inclusive() -> None:
    file = text(HEADER, PREFILL_LINE, SEARCH_LINE, LAST)
    size, limits = len(file), {"most_characters": len(file), "most_steps": 2, "most_traces": 1}
    assert len(trace.read(file, **limits)[0].steps) == 2
    assert refusal(file + "\n", **limits) == f"the file has {size + 1:,} characters: at most {size:,} are read"
    only_steps = text(HEADER, PREFILL_LINE, SEARCH_LINE)
    assert refusal(only_steps, most_steps=1) == "the file has more than 1 steps: record a shorter run"
    twice = {"most_traces": 1, "most_steps": 3}
    assert refusal(file * 2, **twice) == "the file has more than 3 steps: record a shorter run"
    assert refusal(text(HEADER) * 2, **twice) == "the file has 2 traces: at most 1 can be shown together"


NOT_JSON = "is not JSON: the file is not a trace, or was truncated"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("\n", "the file is empty: a trace has a header, a line per step, and an end"),
        ("{", f"line 1 {NOT_JSON}, or nests more than 16 deep"),
        ("x", f"line 1 {NOT_JSON}"),
        ("\n[1]", "line 2 is not a JSON object: every line of a trace is an object"),
        (text(LAST), "line 1 is not a header: a trace starts with a line that contains specdemo"),
        (text(HEADER, LAST, LAST), "line 3 follows the last line of its trace"),
        (text(HEADER, CHAIN_LINE), "line 2 does not follow the previous line: steps are missing or out of order"),
        (
            text(HEADER, PREFILL_LINE, CHAIN_LINE | {"t": 1.75}),
            "line 3 does not follow the previous line: steps are missing or out of order",
        ),
        (
            text(HEADER, PREFILL_LINE | {"policy": {"\x07" + "x" * 99: 1}}),
            f"line 2 is not a valid trace line (policy. {'x' * 72} …: String should have at most 40 characters)",
        ),
        (
            text(HEADER | {"recipe": RECIPE | {"x": "y" * 20_000}}),
            "line 1 is not a valid trace line (recipe: the unknown fields have more than 20,000 characters)",
        ),
        (
            text(HEADER | {"environment": {"x": 0}}).replace(": 0}", ": 1e999}"),
            "line 1 is not a valid trace line (environment: a number is not a finite number)",
        ),
    ],
)
def test_the_cause_of_a_refusal_is_a_sentence(given: Any, sentence: str) -> None:
    assert refusal(given) == sentence


MANY = 2000


@pytest.mark.parametrize(
    "line",
    [
        HEADER | {"prompt_tokens": [None] * MANY},
        HEADER | {"environment": {"parity": {"cost": dict.fromkeys(map(str, range(MANY)), 0)}}},
        *(PREFILL_LINE | {name: [{}] * MANY} for name, value in CHAIN_LINE.items() if isinstance(value, list)),
        PREFILL_LINE | {"choices": [[None] * MANY]},
        PREFILL_LINE | {"laws": [{"entropy": 0.0, "top": [None] * MANY}]},
        *(PREFILL_LINE | {name: dict.fromkeys(map(str, range(MANY)))} for name in ("policy", "remote", "texts")),
        PREFILL_LINE | {"texts": dict.fromkeys((f"x{i}" for i in range(MANY)), "")},
    ],
)
def test_validation_ends_at_the_first_invalid_value(line: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not a valid trace line") as refused:
        trace.read(text(line) if "specdemo" in line else text(HEADER, line))
    cause = refused.value.__context__
    assert isinstance(cause, ValidationError) and cause.error_count() < 5


def refusal_of_step(line: dict[str, Any]) -> str:
    file = text(HEADER, PREFILL_LINE, line)
    cause = refusal(file)
    assert cause.startswith("line 3 is not a valid trace line (its fields: ")
    return cause.removeprefix("line 3 is not a valid trace line (its fields: ").removesuffix(")")


LENGTHS = "the lists of a draft differ in length"
PATH = "the accepted nodes are not a path of tested nodes"
ADD_UP = "tokens and accepted nodes do not add up"
DURATIONS = "the durations of a step are known or unknown together"
UNKNOWN = "kind and durations may be unknown in steps with `undisclosed` only"


@pytest.mark.parametrize(
    ("line", "change", "sentence"),
    [
        *((CHAIN_LINE, {name: CHAIN_LINE[name][:1]}, LENGTHS) for name in ("draft_text", "parents", "p", "draw")),
        *((CHAIN_LINE, {name: CHAIN_LINE[name][:1]}, LENGTHS) for name in ("beta", "q", "drafted", "bound", "rank")),
        (CHAIN_LINE, {"origin": [{}]}, LENGTHS),
        (CHAIN_LINE, {"parents": [-1, 1]}, "a parent must precede its child"),
        (CHAIN_LINE, {"accepted": [1]}, PATH),
        (CHAIN_LINE, {"beta": [None, None]}, PATH),
        (CHAIN_LINE, {"pieces": ["e", "j"]}, "the pieces do not add up to the text"),
        (CHAIN_LINE, {"pending": []}, "a search step has no draft and no token"),
        (SEARCH_LINE, {"token": 4}, "a search step has no draft and no token"),
        (CHAIN_LINE, {"accepted": []}, ADD_UP),
        (CHAIN_LINE, {"token": None}, ADD_UP),
        (CHAIN_LINE, {"token": 5}, "token is not the last of tokens"),
        (CHAIN_LINE, {"laws": []}, "`laws` must have an entry per row"),
        (CHAIN_LINE, {"choices": [[1]]}, "choices must have an entry per row"),
        (REPORTED_LINE, {"accepted": []}, "a draft with undisclosed tokens lists the accepted ones only"),
        (PREFILL_LINE, {"kind": "unknown"}, UNKNOWN),
        *((PREFILL_LINE, {name: None}, UNKNOWN) for name in ("draft_s", "verify_s", "host_s")),
        *((REPORTED_LINE, {name: 1.0}, DURATIONS) for name in ("draft_s", "verify_s", "host_s")),
    ],
)
def test_contradictory_fields_are_refused(line: dict[str, Any], change: dict[str, Any], sentence: str) -> None:
    assert refusal_of_step(line | {"i": 1} | change) == sentence


def header_with(**values: Any) -> str:
    return text({**HEADER, **values})


def test_keys_of_an_object_are_limited_inclusively() -> None:
    pairs = [(f"key {i}", i) for i in range(MAX_KEYS + 1)]
    assert limited_object(pairs[1:]) == dict(pairs[1:])
    with pytest.raises(UserError, match="an object has 257 keys: at most 256 are read"):
        limited_object(pairs)


def test_sizes_of_a_line_are_limited_inclusively(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = json.loads('{"a":' * 15 + "0" + "}" * 15)
    assert trace.read(header_with(x=objects)) and "more than 16 deep" in refusal(header_with(x={"a": objects}))
    extra = "y" * (20_000 - len(json.dumps({"x": ""})))
    assert trace.read(header_with(recipe=RECIPE | {"x": extra}))
    assert "20,000 characters" in refusal(header_with(recipe=RECIPE | {"x": extra + "y"}))
    line = header_with(x=[1, {"a": 2}, '[,{"\\']).rstrip("\n")
    values = 5 + 7  # brackets and commas outside of texts
    monkeypatch.setattr(trace, "MAX_LINE", len(line))
    monkeypatch.setattr(trace, "MAX_VALUES", values)
    assert trace.read(line)
    monkeypatch.setattr(trace, "MAX_VALUES", values - 1)
    assert refusal(line) == f"line 1 has more than {values - 1} values: record a shorter run"
    monkeypatch.setattr(trace, "MAX_LINE", len(line) - 1)
    assert refusal(line) == f"line 1 has {len(line)} characters: at most {len(line) - 1} are read"
