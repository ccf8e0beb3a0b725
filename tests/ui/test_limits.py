"""Host limits: variables, granted recipes, time budgets and visitors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes.traces import end, events_of, header, step

from specdemo.core.errors import UserError
from specdemo.core.events import Event, Loading, StepEvent
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.ui.limits import PUBLIC, HostLimits, RunRates, TimeBudget, read_limits

NO_ORIGINS = (
    "any",
    "*",
    "school.example",
    "https://school.example/",
    "https://school.example/course",
    "https://*.example",
    "https://user@school.example",
    "https://school.example;script-src",
    "data:",
    "ftp://school.example:21",
)


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
        *(("FRAMES", origin, "SPECDEMO_FRAMES must be origins like https") for origin in NO_ORIGINS),
        ("MAX_TOKEN", "5", "unknown variable 'SPECDEMO_MAX_TOKEN': known are SPECDEMO_PUBLIC, SPECDEMO_PAIRS"),
    ],
)
def test_invalid_variables_raise(name: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_limits({f"SPECDEMO_{name}": value})


NO_HUB_NAMES = (
    "/srv/models/mine",
    "../mine",
    "~/mine",
    "org/model/../../mine",
    "org/model/../file.gguf",
    "org/model/file.bin",
    "o\n/m",
    "tests",  # a local directory whose name looks like a hub repository
)


def test_model_names_follow_the_rule_of_the_host() -> None:
    granted = {"any": ("/srv/models/mine", "org/model"), "hub": ("org/model", "gpt2", "org/model/Q8/file.GGUF")}
    for models, names in granted.items():
        for name in names:
            recipe = Recipe(target=name, method="ar")
            assert HostLimits(models=models).grant(recipe, "x") == recipe
    for models, name in [*(("hub", name) for name in NO_HUB_NAMES), ("listed", "org/model")]:
        of_drafter = Recipe(target="org/model" if models == "hub" else name, drafter=name)
        for recipe in (Recipe(target=name, method="ar"), of_drafter):
            with pytest.raises(UserError, match="choose one of the pairs smollm2-135m, bundled"):
                HostLimits(models=models).grant(recipe, "x")


@dataclass(eq=False)
class ActiveRun:
    done: bool = False


def test_time_limit_starts_at_the_first_header_and_covers_all_lanes() -> None:
    now, closed = [1000.0], []

    def lane(name: str) -> Iterator[Event]:
        try:
            yield Loading(name)
            for event in events_of([header(), *(step(i, pieces=["a", "b"]) for i in range(9)), end()]):
                now[0] += 2 * isinstance(event, StepEvent)
                yield event
        finally:
            closed.append(name)

    now[0] += 1000  # loading and waiting are not counted
    budget = TimeBudget(25, lambda: now[0])
    first, second = list(budget.spend(lane("spec"))), list(budget.spend(lane("ar")))
    assert first[-1].reason == "length" and closed == ["spec", "ar"]
    assert [event.step.i for event in second if isinstance(event, StepEvent)] == [0, 1, 2, 3]  # 18 s + 4 x 2 s
    assert second[-1].reason == "cancelled" and second[-1].metrics.tokens == 8
    assert "25 seconds" in second[-1].error
    assert list(TimeBudget(None).spend(lane("free")))[-1].reason == "length"


def test_runs_of_a_visitor_are_limited() -> None:
    now = [1000.0]
    rates = RunRates(HostLimits(at_once=2, per_minute=3), lambda: now[0])

    def start(address: str, replaced: ActiveRun | None = None) -> ActiveRun:
        return rates.start(address, ActiveRun, replaced)

    first, second = start("192.0.2.1"), start("192.0.2.1")
    with pytest.raises(UserError, match="you already have 2 runs in progress"):
        start("192.0.2.1")
    start("192.0.2.1", replaced=second).done = True
    first.done = second.done = True
    with pytest.raises(UserError, match="allows 3 runs per minute: try again in 20 s"):
        start("192.0.2.1")
    with pytest.raises(UserError, match="allows 3 runs per minute"):
        rates.count("192.0.2.1")
    start("192.0.2.2").done = True  # another visitor
    now[0] += 20
    start("192.0.2.1").done = True


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
