"""Link metrics of traces, settings, limits, local services."""

import signal
import sys
from dataclasses import replace
from typing import Any

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step, step_event

from specdemo.core.errors import UserError
from specdemo.core.ledger import parts
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.remote.local_service import LocalServices, ServiceProcess
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import PUBLIC, HostLimits
from specdemo.ui.link_charts import LINK_TABLE_HEAD, describe_link, edge_lane, step_measurements
from specdemo.ui.service import Service

PATIENCE = 60.0
WIRE = {"remote": "http://cloud:8300", "mode": "speculative", "rtt_ms": 30.0}
RECIPE = {"method": "draft", "gamma": 3, "temperature": 0.0, "rule": "rejection", "cloud": WIRE}
ASKED = {"escalated": 1.0, "sent": 1.0, "rows": 0.0, "bytes_up": 200.0, "bytes_down": 300.0}
TIMES = {"cloud_s": 0.008, "rtt_s": 0.032, "up_s": 0.015, "down_s": 0.013}


def over_the_link(i: int, accepted: int, **notes: float) -> dict[str, Any]:
    """Step verified in time: 3 ms of drafting, 40 ms of waiting, and 7 ms unaccounted between steps."""
    pieces = [*"abc"[:accepted], "X"]
    line = step(i, pieces=pieces, draft=(*"abc",), accepted=(*range(accepted),), tested=min(accepted + 1, 3))
    times = {"draft_s": 0.003, "verify_s": 0.04, "host_s": 0.0, "t": 0.05 * (i + 1)}
    return line | times | {"remote": {**ASKED, **TIMES, **notes}}


UNVERIFIED = {"p": [None] * 2, "beta": [None] * 2, "draw": [None] * 2, "choices": [], "top": [None] * 2, "q": None}
LINES = [
    PREFILL | {"remote": {**ASKED, **TIMES}, "verify_s": 0.04, "draft_s": 0.0},
    over_the_link(1, 1),
    over_the_link(2, 3, hard_ratio=0.5),
    step(3, pieces=["a"], draft=("a", "b"), accepted=(0,), **UNVERIFIED, remote={"escalated": 1.0, "provisional": 1.0}),
    over_the_link(4, 0, confirmed=1.0, overruled=0.0, hard_ratio=1.0),
]
STEPS = [step_event(line).step for line in LINES]


def played(**options: Any) -> Run:
    run = Run()
    absorb(run, SPEC, header(recipe=RECIPE | options), *LINES, end())
    run.finish()
    return run


# --- the run in numbers ------------------------------------------------------------------------------------------


def test_parts_of_steps_fill_the_time_without_overlap() -> None:
    end_s = 0.0
    for _, start, seconds in (part for of_step in parts(STEPS) for part in of_step):
        assert start == pytest.approx(end_s) and seconds > 0
        end_s = start + seconds
    assert end_s == pytest.approx(LINES[-1]["t"])
    causes = [(cause, pytest.approx(seconds)) for cause, _, seconds in parts(STEPS)[1]]
    delay = (0.04 - 0.015 - 0.013 - 0.008) / 2
    assert causes[2:] == [("up", 0.015), ("way", delay), ("verify", 0.008), ("way", delay), ("down", 0.013)]
    assert [cause for cause, _ in causes[:2]] == ["idle", "draft"]


def test_visitors_cannot_kill_shared_services() -> None:
    public = Service(ModelPool(), lambda *_: iter(()), PUBLIC)
    with pytest.raises(UserError, match="belong to all visitors"):
        public.kill_replica(played())


def test_table_contains_the_measures_of_the_guide() -> None:
    total, *rows = [dict(zip(LINK_TABLE_HEAD, row, strict=True)) for row in step_measurements(STEPS)]
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"] and total["round"] == "all"
    assert [row["la/k"] for row in rows] == ["–", "0.33", "1.00", "–", "0.00"]
    assert [row["cumulative acceptance"] for row in rows] == ["–", "33 %", "67 %", "67 %", "44 %"]
    assert rows[1]["alpha_mean"] == "0.750" and rows[3]["alpha_mean"] == "–"
    assert (rows[1]["edge_time ms"], rows[1]["cloud_prefill ms"], rows[1]["rtt ms"]) == ("3.00", "8.00", "32.00")
    assert (rows[3]["cloud_prefill ms"], rows[3]["rtt ms"], rows[3]["verdict"]) == ("–", "–", "provisional")
    assert (total["k"], total["bytes up"], total["escalated"], total["hard_ratio"]) == ("11", "800", "5", "0.75")


def test_markdown_of_a_trace_is_escaped() -> None:
    said = describe_link(edge_lane(played(method="![](http://evil.example/a.png)")))
    assert "![](" not in said and "evil" in said


# --- limits of a host --------------------------------------------------------------------------------------------


def over(url: str, **more: Any) -> Recipe:
    return Recipe(max_tokens=8, cloud=CloudConfig(url, **more))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (over("http://169.254.169.254/latest"), "only listed services"),
        (over("http://good.evil:1"), "only listed services"),
        (over("http://good:1 http://evil:1"), "only listed services"),
        (over(""), "no local cloud service"),
        (over("http://good:1", rtt_ms=5), "link emulation is disabled"),
        (over("http://good:1", lost_after_s=1e4), "lost_after_s may be 120 seconds"),
        (over("http://good:1", deadline_ms=2e5), "deadline_ms may be 120 seconds"),
    ],
)
def test_public_page_contacts_listed_services_only(recipe: Recipe, words: str) -> None:
    named = replace(PUBLIC, remote=("http://good:1/", "https://better"))
    with pytest.raises(UserError, match=words):
        named.grant(recipe, "def")
    if not recipe.cloud.remote.startswith("http://good:1"):
        with pytest.raises(UserError, match="with mode off"):
            PUBLIC.grant(recipe, "def")
    assert HostLimits().grant(recipe, "def") == recipe
    for fine in (over("http://good:1"), over("https://better/"), over("", mode="edge_only")):
        assert named.grant(fine, "def") == fine


# --- local services ----------------------------------------------------------------------------------------------


class FakeProcesses:
    """Start processes that print an address and run until stopped."""

    def __init__(self) -> None:
        self.started: list[ServiceProcess] = []

    def __call__(self, spec: ModelSpec, count: int) -> ServiceProcess:
        address = f"http://{spec.name}:{len(self.started)}"
        script = f"import sys; print('listening on {address}', flush=True); sys.stdin.read()"
        self.started.append(ServiceProcess([sys.executable, "-S", "-c", script]))
        return self.started[-1]


ONE, TWO = ModelSpec("one"), ModelSpec("two")


def test_services_are_shared_by_target_and_stopped_when_idle() -> None:
    fake = FakeProcesses()
    services = LocalServices(start=fake)
    with services.running({ONE: 1}) as urls, services.running({ONE: 1}) as same, services.running({}) as none:
        assert urls == same == {ONE: "http://one:0"} and none == {} and len(fake.started) == 1
    with services.running({ONE: 1}):
        assert len(fake.started) == 1  # reused
        with services.running({TWO: 1}) as other:
            assert other == {TWO: "http://two:1"} and fake.started[0].alive
    fake.started[0].process.kill()
    fake.started[0].process.wait()
    with services.running({ONE: 1}):
        assert len(fake.started) == 3 and not fake.started[1].alive  # dead: replaced; idle: stopped
    services.close()
    assert not any(process.alive for process in fake.started)


def test_a_target_may_have_several_services() -> None:
    """A killed service is replaced at the next run; others than the wanted ones are stopped."""
    fake = FakeProcesses()
    services = LocalServices(start=fake)
    with services.running({ONE: 2}) as urls:
        assert urls == {ONE: "http://one:0 http://one:1"}
        services.kill("host:1")
        assert fake.started[1].process.wait(PATIENCE) == -signal.SIGKILL and fake.started[0].alive
        services.kill("host:1")  # a second click
        for name in ("host:7", ""):
            with pytest.raises(UserError, match="no local service has verified a step of this run"):
                services.kill(name)
    with services.running({ONE: 2}) as urls:
        assert urls == {ONE: "http://one:0 http://one:2"}
    with services.running({ONE: 1}):
        assert [process.alive for process in fake.started] == [True, False, False]
    services.close()


def test_failed_start_reports_the_error() -> None:
    script = "import sys; print('warning: x', file=sys.stderr); sys.exit('specdemo: there is no model of that name')"
    services = LocalServices(start=lambda spec, count: ServiceProcess([sys.executable, "-S", "-c", script]))
    with pytest.raises(UserError, match=r"did not start: there is no model of that name$"), services.running({ONE: 1}):
        pass
