"""Host limits, enforced on the server over HTTP: errors for one client while others are served.

The client sets its address in the header of a proxy; the server trusts that header from localhost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import gradio_client
import httpx
import pytest
from fakes.trace_records import end, header, step

from e2e.limited_page import Patient, limited_page
from specdemo.core.errors import UserError
from specdemo.core.events import Event, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.trace import from_json
from specdemo.models.zoo import PAIRS
from specdemo.recipe import POLICIES, Recipe
from specdemo.ui.limits import PUBLIC, HostLimits, TimeBudget, Visitors, read_limits
from specdemo.ui.page import build, launch_options

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATIENCE = 60.0
CODE = "def fibonacci(n):"


@pytest.fixture(scope="module")
def engine() -> Patient:
    return Patient()


@pytest.fixture(scope="module")
def served(engine: Patient) -> Iterator[Any]:
    limits = replace(PUBLIC, max_tokens=64, max_gamma=6, max_nodes=16, max_prompt=1000, per_minute=None)
    demo = build(pair="bundled", engine=engine, limits=limits)
    _, demo.url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **launch_options(demo))
    yield demo
    demo.worker.close()
    demo.close()


@pytest.fixture(scope="module")
def visitor(served: Any) -> gradio_client.Client:
    """Client shared by the tests without parallel requests."""
    return client(served, "198.51.100.1")


def client(served: Any, address: str, at_once: int = 8) -> gradio_client.Client:
    return gradio_client.Client(
        served.url, verbose=False, max_workers=at_once, headers={"X-Forwarded-For": address}, analytics_enabled=False
    )


HOSTILE = {
    "many tokens": ({"max_tokens": 10**6}, "max_tokens may be 64 at most here, not 1,000,000"),
    "too many tokens": ({"max_tokens": 10**30}, "max_tokens must be from 1 to"),
    "a long draft": ({"gamma": 7}, "gamma may be 6 at most here, not 7"),
    "text instead of a number": ({"gamma": "many"}, "gamma must be a number"),
    "a high temperature": ({"temperature": 10**400}, "temperature must be from 0 to 100, not 1000"),
    "a huge k": ({"top_k": 10**12}, "top_k must be from 0 to"),
    "an unknown pair": ({"pair": "no-such-pair"}, "unknown pair 'no-such-pair': known are smollm2-135m, bundled"),
    "a path": ({"pair": "../../etc/passwd"}, "unknown pair '../../etc/passwd': known are smollm2-135m, bundled"),
    "a longer path": ({"pair": "/" * 10**6}, "pair must be a name of at most 300 characters, not 1,000,000"),
    "a long method": ({"method": "m" * 10**5}, "method must be a name of at most"),
    "a mapping as a name": ({"pair": {"a": [1]}}, "pair must be a name"),
    "a million characters": ({"prompt": "x" * 10**6}, "the prompt has 1,000,000 characters: shorten it to 1,000"),
    "a device": ({"device": "cuda:1"}, "device is set by the host of this page"),
    "a model": ({"target": "/etc", "method": "ar"}, "only listed models run here"),
    "a long list": ({"bad_words": "x" * 10**4}, "bad_words must be a text of at most 3000 characters"),
    "a list as a prompt": ({"prompt": [1, 2]}, "the prompt must be a text, not list"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_invalid_api_requests_get_a_sentence(served: Any, visitor: gradio_client.Client, case: str) -> None:
    values, message = HOSTILE[case]
    with pytest.raises(Exception) as error:
        visitor.predict(**{"prompt": CODE, **values}, api_name="/generate")
    assert message in str(error.value) and len(str(error.value)) < 1000
    assert served.worker.active == 0


def test_limits_apply_to_preflight(visitor: gradio_client.Client) -> None:
    with pytest.raises(Exception, match="unknown pair"):
        visitor.predict(pair="../../etc/passwd", api_name="/preflight")


def press_run(url: str, taken: Any = None, **values: Any) -> dict[str, Any]:
    """Response to the page's Run button, pressed by a script with custom values, or with `taken` as the data."""
    config = httpx.get(f"{url}config").json()
    known = {part["id"]: part["props"] for part in config["components"]}
    run = next(part for part, props in known.items() if props.get("elem_id") == "run")
    button = next(event for event in config["dependencies"] if [run, "click"] in event["targets"])
    inputs = [known[part] for part in button["inputs"]]
    assert values.keys() <= {props.get("elem_id") for props in inputs}
    data = [values.get(props.get("elem_id") or "", props.get("value")) for props in inputs]
    handler = next(event for event in config["dependencies"] if event["inputs"] == button["outputs"])
    request = {"data": [taken or json.dumps(data)], "fn_index": handler["id"], "session_hash": "script"}
    assert httpx.post(f"{url}gradio_api/queue/join", json=request).status_code == 200
    frame: dict[str, Any] = {}
    with httpx.stream(
        "GET", f"{url}gradio_api/queue/data", params={"session_hash": "script"}, timeout=PATIENCE
    ) as response:
        for line in response.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            shown = (message.get("output") or {}).get("data") or [""]
            if isinstance(shown[0], str) and shown[0].startswith("{"):
                frame = json.loads(shown[0])
            if message.get("msg") in ("process_completed", "close_stream"):
                return frame
    return frame


def test_limits_apply_to_the_run_button(served: Any) -> None:
    assert press_run(served.url, prompt=CODE, pair="../../etc")["phase"] == [
        "failed",
        f"unknown pair '../../etc': known are {', '.join(PAIRS)}",
    ]
    assert press_run(served.url, prompt="x" * 10**6)["phase"][1].startswith("the prompt has 1,000,000 characters")
    for junk in ("{", "null", "[1]", '{"prompt": "x"}', 7):
        assert press_run(served.url, junk) == {}
    done = press_run(served.url, prompt=CODE, **{"max-tokens": 8})
    assert done["over"] and done["phase"] == ["done", "8 tokens, token limit reached"]


def test_fifty_parallel_requests_do_not_block_another_visitor(served: Any, engine: Patient) -> None:
    crowd = client(served, "198.51.100.7", at_once=50)
    jobs = [crowd.submit("endless", api_name="/generate") for _ in range(50)]
    finished = wait([job.future for job in jobs], timeout=PATIENCE, return_when="FIRST_EXCEPTION").done
    assert finished  # the limit is reached
    lines = client(served, "203.0.113.5").submit(CODE, max_tokens=12, api_name="/generate")
    metrics = [json.loads(line) for line in lines][-1]["metrics"]
    assert metrics["tokens"] == 12  # while the other runs are active
    assert served.worker.active == PUBLIC.at_once
    engine.over.set()
    assert not wait([job.future for job in jobs], timeout=PATIENCE).not_done
    errors = [str(job.exception()) for job in jobs if job.exception()]
    assert len(errors) == 50 - PUBLIC.at_once
    assert all("you already have 2 runs in progress" in error for error in errors)
    engine.over.clear()


def test_time_limit_ends_a_run_and_keeps_its_text() -> None:
    with limited_page(HostLimits(max_seconds=1)) as short:
        lines = [json.loads(line) for line in client(short, "203.0.113.5").submit("endless", api_name="/generate")]
        frame = press_run(short.url, prompt="endless")
    assert lines[-1]["end"] == "cancelled" and lines[-1]["error"].startswith("the time limit of 1 seconds per run")
    assert lines[-1]["metrics"]["tokens"] == len(lines) - 2 > 10
    phase, why = frame["phase"]
    assert phase == "stopped" and "the time limit of 1 seconds per run" in why and frame["over"]


def test_rate_limit_applies_per_visitor() -> None:
    with limited_page(HostLimits(per_minute=2)) as slow:
        eager, other = client(slow, "198.51.100.9"), client(slow, "198.51.100.10")
        for _ in range(2):
            assert eager.predict(CODE, max_tokens=1, api_name="/generate")
        with pytest.raises(Exception, match="allows 2 runs per minute: try again in [1-6]?[0-9] s"):
            eager.predict(CODE, max_tokens=1, api_name="/generate")
        assert other.predict(CODE, max_tokens=1, api_name="/generate")


def test_controls_respect_the_limits() -> None:
    limits = HostLimits(max_tokens=100, max_gamma=2, max_nodes=4)
    demo = build(pair="bundled", limits=limits)
    demo.worker.close()
    shown = {
        part["props"]["elem_id"]: part["props"] for part in demo.config["components"] if part["props"].get("elem_id")
    }
    assert (shown["max-tokens"]["maximum"], shown["max-tokens"]["value"]) == (100, 100)
    assert (shown["gamma"]["maximum"], shown["gamma"]["value"]) == (2, 2)
    assert (shown["tree-nodes"]["maximum"], shown["tree-nodes"]["value"]) == (4, 4)


@pytest.mark.parametrize(
    ("environment", "limits"),
    [
        ({}, HostLimits()),
        ({"HOME": "/root", "SPECDEMO_PUBLIC": "1"}, PUBLIC),
        ({"SPACE_ID": "someone/page"}, PUBLIC),
        ({"SPACE_ID": "someone/page", "SPECDEMO_PUBLIC": "0"}, HostLimits()),
        (
            {"SPECDEMO_MAX_TOKENS": "128", "SPECDEMO_PAIRS": " bundled, "},
            HostLimits(max_tokens=128, pairs=("bundled",)),
        ),
        ({"SPECDEMO_PUBLIC": "1", "SPECDEMO_PER_MINUTE": "none"}, replace(PUBLIC, per_minute=None)),
        ({"SPECDEMO_MODELS": "hub", "SPECDEMO_QUEUE": ""}, HostLimits(models="hub")),
    ],
)
def test_limits_are_read_from_the_environment(environment: dict[str, str], limits: HostLimits) -> None:
    assert read_limits(environment) == limits


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_TOKENS", "lots", "SPECDEMO_MAX_TOKENS must be a whole number from 1, or none, not 'lots'"),
        ("MAX_SECONDS", "0", "SPECDEMO_MAX_SECONDS must be"),
        ("AT_ONCE", "-1", "SPECDEMO_AT_ONCE must be"),
        ("PAIRS", "bundled, nonesuch", "unknown pair 'nonesuch': known are smollm2-135m, bundled"),
        ("MODELS", "all", "unknown rule for models 'all': known are any, hub, listed"),
        ("PUBLIC", "yes", "SPECDEMO_PUBLIC must be 0 or 1"),
        ("MAX_TOKEN", "5", "unknown variable 'SPECDEMO_MAX_TOKEN': known are SPECDEMO_PUBLIC, SPECDEMO_PAIRS"),
    ],
)
def test_invalid_variables_raise(name: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_limits({f"SPECDEMO_{name}": value})


@pytest.mark.parametrize(
    ("models", "name", "granted"),
    [
        ("any", "/srv/models/mine", True),
        ("any", "org/model", True),
        ("hub", "org/model", True),
        ("hub", "gpt2", True),
        ("hub", "/srv/models/mine", False),
        ("hub", "../mine", False),
        ("hub", "~/mine", False),
        ("hub", "org/model/../../mine", False),
        ("hub", "tests", False),  # a local directory whose name looks like a hub repository
        ("hub", "o\n/m", False),
        ("listed", "org/model", False),
    ],
)
def test_model_names_follow_the_rule_of_the_host(models: str, name: str, granted: bool) -> None:
    limits, recipe = HostLimits(models=models), Recipe(target=name, method="ar")
    if granted:
        assert limits.grant(recipe, "x") == recipe
        return
    with pytest.raises(UserError, match="choose one of the pairs smollm2-135m, bundled"):
        limits.grant(recipe, "x")
    with pytest.raises(UserError, match="choose one of the pairs smollm2-135m, bundled"):  # nor by way of the drafter
        limits.grant(Recipe(target="org/model" if models == "hub" else name, drafter=name), "x")


def test_policy_bounds_are_clamped_and_explicit_values_rejected() -> None:
    limits = HostLimits(max_gamma=2)
    for policy in POLICIES:
        granted = limits.grant(Recipe(policy=policy, gamma=2), "x")
        assert granted.gamma_bounds[0] <= granted.gamma_bounds[1] <= 2
    with pytest.raises(UserError, match="gamma_max may be 2 at most here, not 3"):
        limits.grant(Recipe(policy="dynamic", gamma=2, gamma_max=3), "x")


def test_limits_apply_to_the_options_of_the_method() -> None:
    limits = HostLimits(max_nodes=2)
    assert limits.grant(Recipe(), "x") == Recipe()
    for method, name in (("tree", "tree_nodes"), ("beam", "num_beams"), ("lookahead", "lookahead_window")):
        with pytest.raises(UserError, match=f"{name} may be 2 at most here"):
            limits.grant(Recipe(method=method), "x")
        assert limits.grant(limits.fit(Recipe(method=method)), "x").method == method


@dataclass
class ActiveRun:
    done: bool = False


class Clock:
    """Clock that advances only on demand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_limit_starts_at_the_first_header_and_covers_all_lanes() -> None:
    clock, closed = Clock(), []

    def lane(name: str) -> Iterator[Event]:
        try:
            yield Loading(name)
            metrics = Metrics()
            for line in (header(), *(step(i, pieces=["a", "b"]) for i in range(9)), end()):
                clock.now += 2 if line.get("pieces") else 0
                event = from_json(line, metrics)
                metrics = getattr(event, "metrics", metrics)
                yield event
        finally:
            closed.append(name)

    clock.now += 1000  # loading and waiting are not counted
    budget = TimeBudget(25, clock)
    first, second = list(budget.spend(lane("spec"))), list(budget.spend(lane("ar")))
    assert first[-1].reason == "length" and closed == ["spec", "ar"]
    assert [event.step.i for event in second if isinstance(event, StepEvent)] == [0, 1, 2, 3]  # 18 s + 4 x 2 s
    assert second[-1].reason == "cancelled" and second[-1].metrics.tokens == 8
    assert "25 seconds" in second[-1].error
    assert list(TimeBudget(None).spend(lane("free")))[-1].reason == "length"


def test_visitors_are_counted_and_removed() -> None:
    clock = Clock()
    visitors = Visitors(HostLimits(at_once=2, per_minute=3), clock)

    def start(address: str) -> ActiveRun:
        visitors.admit(address)
        run = ActiveRun()
        visitors.entered(address, run)
        return run

    first, second = start("192.0.2.1"), start("192.0.2.1")
    with pytest.raises(UserError, match="you already have 2 runs in progress"):
        start("192.0.2.1")
    first.done = second.done = True
    clock.now += 20
    start("192.0.2.1").done = True
    with pytest.raises(UserError, match="allows 3 runs per minute: try again in 40 s"):
        start("192.0.2.1")
    start("192.0.2.2").done = True  # another visitor
    clock.now += 40
    long = start("192.0.2.1")
    assert len(visitors) == 2
    clock.now += 10_000
    start("192.0.2.3").done = True
    assert len(visitors) == 2  # a visitor with an active run, and a visitor of this minute
    long.done = True
    clock.now += 61
    start("192.0.2.4")
    assert len(visitors) == 1


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("testclient", "testclient", True),
    ],
)
def test_addresses_of_one_network_are_one_visitor(first: str, second: str, same: bool) -> None:
    visitors = Visitors(HostLimits(at_once=1))
    active = ActiveRun()
    visitors.entered(first, active)
    admit: Callable[[], None] = lambda: visitors.admit(second)  # noqa: E731
    if same:
        with pytest.raises(UserError, match="you already have 1 run in progress"):
            admit()
    else:
        admit()
