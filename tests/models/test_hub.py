"""Models from a hub, through the real client: progress, resuming, giving up, and a sentence for each failure."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.hub_server import Faults, StandIn, serving
from fakes.properties import refusal
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.traces import trace_lines

from specdemo.core.events import Loading
from specdemo.generate import generate
from specdemo.models.hub import Hub, local_shapes
from specdemo.models.load import load
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe, plan_run
from specdemo.ui.limits import PUBLIC, HostLimits

pytestmark = pytest.mark.slow

NAME, SECRET = "tiny/target", "hf_aSecretThatMustNotShow"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    save_model(root / NAME, byte_level_tokenizer())
    save_model(root / "tiny/drafter", byte_level_tokenizer(), seed=1, num_hidden_layers=1)
    (root / NAME / "modeling_own.py").write_text("raise SystemExit('code of a model was run')\n")
    (root / NAME / "pytorch_model.bin").write_bytes(b"a pickle")
    save_model(root / "tiny/pickled", byte_level_tokenizer())
    (root / "tiny/pickled/model.safetensors").rename(root / "tiny/pickled/pytorch_model.bin")
    save_model(root / "tiny/sharded", byte_level_tokenizer(), shards="100KB")
    return root


@pytest.fixture
def server(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Local hub with chunks of 16 kB instead of 10 MB, so that small files need several, and retries without delay."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    with serving(files) as stand_in:
        yield stand_in


@pytest.fixture
def hub(server: StandIn, tmp_path: Path) -> Hub:
    return Hub(server.endpoint, tmp_path / "cache", SECRET)


def refused(hub: Hub, name: str = NAME, revision: str | None = None) -> str:
    sentence = refusal(load, ModelSpec(name, device="cpu", revision=revision), hub)
    assert sentence and SECRET not in sentence and "http" not in sentence
    return sentence


def test_models_are_downloaded_once_with_progress(hub: Hub, server: StandIn, files: Path) -> None:
    told: list[Loading] = []
    loaded = load(ModelSpec(NAME, device="cpu"), hub, told.append)
    assert loaded.stop
    size = (files / NAME / "model.safetensors").stat().st_size
    weights = [news.done for news in told if news.total == size]
    assert weights == sorted(weights) and weights[0] == 0 and weights[-1] == size and len(set(weights)) > 5
    read = [news for news in told if news.text.startswith("reading")]
    assert read[-1].done == read[-1].total == len(local_shapes(NAME, files / NAME))
    assert server.trusted == {f"Bearer {SECRET}"} and not server.leaked
    assert not server.gets(".py") and not server.gets(".bin")
    server.asked.clear()
    again = load(ModelSpec(NAME, device="cpu"), hub)
    assert not server.gets("resolve") and not server.gets("cdn")
    assert torch.equal(again.model.embedding, loaded.model.embedding)


def test_untrusted_models_use_neither_the_token_nor_the_cache_filled_with_it(server: StandIn, tmp_path: Path) -> None:
    known, strange = (
        Hub(server.endpoint, tmp_path, SECRET, trusted=frozenset({name})) for name in (NAME, "other/model")
    )
    load(ModelSpec(NAME, device="cpu"), known)
    assert server.trusted == {f"Bearer {SECRET}"}
    server.trusted.clear()
    server.asked.clear()
    load(ModelSpec(NAME, device="cpu"), strange)
    assert not server.trusted and server.gets("resolve")
    server.faults.status = 401  # a private model
    load(ModelSpec(NAME, device="cpu"), known)
    shutil.rmtree(tmp_path / "visitors")
    assert refused(strange)


def test_visitors_of_a_public_page_use_the_token_for_offered_pairs_only() -> None:
    offered = {name for pair in PUBLIC.pairs for name in (PAIRS[pair].target, PAIRS[pair].drafter) if name}
    assert replace(PUBLIC, models="hub").hub.trusted == offered and PAIRS["bundled"].target in offered
    assert HostLimits().hub.trusted is None


def test_interrupted_download_is_resumed(hub: Hub, server: StandIn, files: Path) -> None:
    server.faults = Faults(cut_after=100_000, cuts=1)
    assert load(ModelSpec(NAME, device="cpu"), hub).stop
    first, second = server.gets("cdn")
    assert first is None and second is not None
    begin = int(second.removeprefix("bytes=").partition("-")[0])
    assert 0 < begin <= 100_000  # at most the interrupted chunk is fetched twice
    ours = next((hub.cache / "models--tiny--target").rglob("snapshots/*/model.safetensors"))
    assert ours.read_bytes() == (files / NAME / "model.safetensors").read_bytes()


def test_shards_are_loaded(hub: Hub, files: Path) -> None:
    assert len(list((files / "tiny/sharded").glob("model-*"))) > 1
    assert load(ModelSpec("tiny/sharded", device="cpu"), hub).stop


def test_corrupt_download_is_detected_and_repeated(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(corrupt=True)
    assert "model.safetensors of tiny/target arrived damaged" in refused(hub)
    server.faults = Faults()
    assert load(ModelSpec(NAME, device="cpu"), hub).stop


def test_slow_download_is_cancelled(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(held_after=70_000)
    pool = ModelPool(hub=hub)
    recipe = Recipe(target=NAME, method="ar", device="cpu", max_tokens=4)
    run = generate(recipe, "def", pool)
    event = next(event for event in run if 0 < event.done < event.total)  # small files arrive in a single chunk
    assert isinstance(event, Loading) and "downloading" in event.text
    run.close()  # returns although the server still delays
    assert plan_run(recipe).target not in pool
    server.faults.go_on.set()
    server.faults = Faults()
    assert [line for line in trace_lines(recipe, "def", pool) if "phase" not in line][-1]["end"] in ("length", "stop")


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(403, "GatedRepo"), "accept its licence on huggingface.co/tiny/target, and sign in"),
        (Faults(401, "RepoNotFound"), "there is no model tiny/target on the hub, or this machine has no access"),
        (Faults(401), "sign in with `hf auth login`"),
        (Faults(403), "this machine has no access"),
        (Faults(429), "failed (error 429)"),
        (Faults(503), "the download of tiny/target failed (error 503)"),
    ],
)
def test_hub_errors(faults: Faults, words: str, hub: Hub, server: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    server.faults = faults
    with caplog.at_level(logging.DEBUG):
        assert words in refused(hub)
    assert SECRET not in caplog.text


def test_refusals_before_the_download(hub: Hub, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no model tiny/nothing on the hub" in refused(hub, "tiny/nothing")
    assert "has no such revision" in refused(hub, revision="v7")
    assert "neither a local directory nor a Hugging Face id" in refused(hub, "../etc")
    assert "no safetensors weights" in refused(hub, "tiny/pickled")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "1.0 kB are free" in refused(hub) and not server.gets("cdn")


def test_complete_files_are_reused_and_need_no_network(
    hub: Hub, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = Faults(cut_after=10, cuts=100)
    assert "failed (Software caused connection abort): run it again" in refused(hub)
    server.faults = Faults()
    server.asked.clear()
    load(ModelSpec(NAME, device="cpu"), hub)
    assert server.gets("cdn") and not server.gets("tokenizer.json")
    closed_port = "http://127.0.0.1:9"
    assert load(ModelSpec(NAME, device="cpu"), Hub(closed_port, hub.cache)).stop
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("a refused connection is tried again"))
    for revision in (None, "0" * 40):
        assert "the hub cannot be reached" in refused(Hub(closed_port, tmp_path / "empty"), revision=revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load(ModelSpec(NAME, device="cpu"), hub).stop
    assert "HF_HUB_OFFLINE" in refused(hub, "tiny/drafter")


def test_a_disk_that_fills_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "failed (No space left on device)" in refused(hub)


def test_the_environment_names_the_hub(server: StandIn, tmp_path: Path) -> None:
    """In a new process, with a token that must stay in the headers."""
    where = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": SECRET, "HF_HUB_DISABLE_XET": "1"}
    download = f"from specdemo.models.hub import Hub; print(Hub().settings({NAME!r}), Hub().weights({NAME!r}))"
    command, environment = [sys.executable, "-c", download], {**os.environ, **where}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folders = {Path(folder) for folder in done.stdout.split()}
    assert len(folders) == 1 and (folders.pop() / "model.safetensors").is_relative_to(tmp_path) and not done.stderr
    assert SECRET not in done.stdout + done.stderr and server.trusted == {f"Bearer {SECRET}"} and not server.leaked
