"""Servers of other engines as lanes: run, bench, page, limits and keys."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fakes.engine_server import EngineServer, engine_server, llama_events
from fakes.traces import step_events, text_of, tokens_of

from specdemo.bench.measure import grid, measure
from specdemo.bench.table import table
from specdemo.cli import main
from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, Loading, StepEvent
from specdemo.core.sampling import SamplingParams
from specdemo.external.address import EngineAddress, key_for
from specdemo.external.dialects import DIALECTS, GenerationRequest
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.limits import PUBLIC, HostLimits, read_limits

pytestmark = pytest.mark.slow

PROMPT, TOKENS = "def read(path):\n", 12
GREEDY = Recipe(pair="bundled", method="ar", temperature=0.0, top_p=1.0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def text(pool: ModelPool) -> list[int]:
    """Greedy tokens of the bundled target."""
    return tokens_of(generate(GREEDY, PROMPT, pool))


@pytest.fixture
def server(text: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineServer]:
    monkeypatch.delenv("SPECDEMO_ENGINE_KEY", raising=False)
    with engine_server() as running:
        running.events = llama_events(text, 2)
        yield running


@pytest.mark.parametrize("engine", DIALECTS)
def test_requests_contain_all_sampling_parameters(engine: str) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=3, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
    body = DIALECTS[engine].body(GenerationRequest((1, 2), 4, sampling, seed=5), "model")
    sent = {**body, **body.get("sampling_params", {})}
    penalty = "repeat_penalty" if engine == "llama.cpp" else "repetition_penalty"
    assert [sent[name] for name in ("temperature", "top_k", "top_p", "min_p", penalty)] == [0.7, 3, 0.8, 0.1, 1.2]
    if engine == "llama.cpp":
        assert sent["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]


def external(server: EngineServer, **options: object) -> Recipe:
    return replace(GREEDY, external=server.external, **options)


def test_a_run_decodes_the_tokens_of_the_server(server: EngineServer, text: list[int], pool: ModelPool) -> None:
    events = list(generate(external(server, seed=-1, top_k=7), PROMPT, pool))
    header, end = next(event for event in events if isinstance(event, Header)), events[-1]
    assert text_of(events) == text_of(generate(GREEDY, PROMPT, pool)) and tokens_of(events) == text
    assert not header.exact and header.environment["engine"] == "llama.cpp server: served"
    assert isinstance(end, End) and (end.reason, end.metrics.drafted, end.metrics.accepted) == ("length", 12, 8)
    (body,) = server.bodies
    assert body["prompt"] == list(header.prompt_tokens) and body["n_predict"] == TOKENS
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.0, 7, 0xFFFFFFFF)
    *shorter, end = generate(external(server, max_tokens=7), PROMPT, pool)  # the server sends more
    assert tokens_of(shorter) == text[:7] and isinstance(end, End) and end.reason == "length"


@pytest.mark.parametrize("stop", ["text", "token"])
def test_a_trace_that_ends_within_accepted_tokens_is_read(
    server: EngineServer, text: list[int], pool: ModelPool, stop: str
) -> None:
    """Tokens 4 and 5 are the accepted ones of a step."""
    position = 4
    if stop == "text":
        pieces = [piece for event in step_events(generate(external(server), PROMPT, pool)) for piece in event.pieces]
        recipe = external(server, stop_texts=("".join(pieces[: position + 1]),))
    else:
        recipe = external(server, stop_tokens=(text[position],))
    events = list(generate(recipe, PROMPT, pool))
    (read,) = trace.read("".join(trace.write(event) for event in events if not isinstance(event, Loading)))
    last = read.steps[-1].step
    assert last.tokens == tuple(text[4 : position + 1]) and read.end and read.end.reason == "stop"
    assert (last.accepted, last.draft.size, last.tested) == (position - 3, 3, position - 3)
    assert list(read.steps) == step_events(events)


def test_closing_a_run_closes_the_stream(server: EngineServer, pool: ModelPool) -> None:
    server.complete = False
    run = generate(external(server), PROMPT, pool)
    while not isinstance(next(run), StepEvent):
        pass
    run.close()
    assert server.left.wait(30)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [("shift", 1, "has another tokenizer than the target"), ("status", 503, r"refused the request \(status 503\)")],
)
def test_failures_name_the_server(server: EngineServer, pool: ModelPool, name: str, value: int, sentence: str) -> None:
    setattr(server, name, value)
    try:
        error = list(generate(external(server), PROMPT, pool))[-1].error
    except UserError as refused:
        error = str(refused)
    assert re.search(sentence, error) and f"llama.cpp at {server.url.removeprefix('http://')}" in error


# --- key and limits ----------------------------------------------------------------------------------------------


def test_the_key_is_sent_to_this_machine_and_configured_addresses(
    server: EngineServer, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEMO_ENGINE_KEY", "secret")
    events = list(generate(external(server), PROMPT, pool))
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in json.dumps([event.recipe for event in events if isinstance(event, Header)])
    environment = {"SPECDEMO_ENGINE_KEY": "secret", "SPECDEMO_ENGINES": "vllm=https://a.example"}
    sent = {url: key_for(EngineAddress("vllm", url), environment) for url in ("https://a.example", "https://b.example")}
    assert sent == {"https://a.example": "secret", "https://b.example": None}


def test_public_hosts_use_configured_servers_only() -> None:
    recipe = replace(GREEDY, external="vllm=http://h:1")
    with pytest.raises(UserError, match="leave external empty"):
        PUBLIC.grant(recipe, PROMPT)
    limits = read_limits({"SPECDEMO_PUBLIC": "1", "SPECDEMO_ENGINES": "vllm=http://h:1", "SPECDEMO_ENGINE_KEY": "x"})
    assert limits.grant(recipe, PROMPT) == recipe and HostLimits().grant(recipe, PROMPT) == recipe
    with pytest.raises(UserError, match="choose vllm=http://h:1"):
        limits.grant(replace(recipe, external="vllm=http://h:2"), PROMPT)


# --- terminal, bench and page ------------------------------------------------------------------------------------


def test_the_terminal_shows_what_the_engine_does_not_report(
    server: EngineServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--pair", "bundled", "--temperature", "0", "--external", server.external]
    assert main(["run", PROMPT, "--steps", *flags]) == 0
    printed = capsys.readouterr().out
    assert "+1  not reported by the engine" in printed and "reported by engine" in printed and "LOSSY" not in printed


def test_a_server_is_a_lane_of_bench(server: EngineServer, pool: ModelPool) -> None:
    settings = list(grid([], [1], ["fixed"], [0.0], [server.external]))
    recipes = [replace(GREEDY, **values) for values in settings]
    records = [item for item in measure(recipes, [Prompt("code", "one", PROMPT)], pool) if isinstance(item, dict)]
    baseline, lane = table(recipes, records)
    assert lane.lane == f"{EngineAddress.parse(server.external)} T=0" and lane.same_text == 1
    assert lane.speedup and lane.acceptance_rate == pytest.approx(8 / 12) and lane.alpha == pytest.approx(8 / 11)
    assert lane.c is lane.v is lane.theory is lane.held_bytes is lane.mean_beta is None and baseline.v is None
    assert lane.acceptance.position[3].share == 0.0
