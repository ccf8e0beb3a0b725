"""Ray Serve: configuration, replicas, affinity, a killed replica, metrics."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from fakes.trace_lines import trace_lines

from specdemo.cli import main
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT = "def read_lines(path):\n"
POOL = ModelPool()
FLAGS = "--pair bundled --device cpu --port 0 --min-replicas 2 --max-replicas 2 --until-stdin-ends"
PATIENCE_S = 60.0
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 1.0, "rule": "coupled", "seed": 11},
}


def test_a_missing_package_is_refused_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "specdemo.cli.ray_serve", raising=False)
    assert main(["serve", "--ray"]) == 2
    assert capsys.readouterr().err == "specdemo: package ray is not installed: install specdemo[ray], or omit --ray\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--max-replicas 2", "min-replicas and max-replicas have no effect without --ray"),
        ("--ray --min-replicas 3 --max-replicas 2", "min-replicas must be from 1 to max-replicas, not 3 of 2"),
        ("--ray --connections 9", "connections and client-connections have no effect with --ray"),
    ],
)
def test_invalid_numbers_of_replicas_are_refused(flags: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"specdemo: {sentence}")


def test_the_example_for_kubernetes_is_valid() -> None:
    """Ray's schema accepts it, and its settings belong to the deployment of the application."""
    pytest.importorskip("ray", reason="ray[serve] cannot be installed here")
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from specdemo.cli import ray_serve

    example = yaml.safe_load((ROOT / "docs/ray-service.yaml").read_text("utf-8"))["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(example["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == f"{ray_serve.__name__}:{ray_serve.application.__name__}"
    deployment = ray_serve.application(application.args)._bound_deployment
    assert [entry.name for entry in application.deployments] == [deployment.name]
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 8)
    assert example["rayClusterConfig"]["rayVersion"] >= "2.60"


class Cluster:
    """`serve --ray` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "specdemo", "serve", "--ray", *FLAGS.split()]
        environment = {**os.environ, "RAY_metrics_report_interval_ms": "500"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        lines = dict(self.process.stdout.readline().rsplit(" ", 1) for _ in range(2))
        self.dashboard, self.url = lines["dashboard:"].strip(), lines["listening on"].strip()

    @property
    def replicas(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "ServeReplica" in shlex.join(child.cmdline())]

    @property
    def metrics(self) -> Counter[str]:
        """Sums over the replicas, and over the labels of metrics."""
        targets = json.loads(Path("/tmp/ray/prom_metrics_service_discovery.json").read_text())[0]["targets"]
        sums: Counter[str] = Counter()
        for target in targets:
            for line in urlopen(f"http://{target}/metrics").read().decode().splitlines():
                name, _, value = line.partition("{")[0], "", line.rpartition(" ")[2]
                if name.startswith("ray_specdemo_"):
                    sums[name.removeprefix("ray_specdemo_")] += float(value)
        return sums


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="ray[serve] cannot be installed here")
    opened = Cluster()
    yield opened
    opened.process.stdin.close()
    assert opened.process.wait(PATIENCE_S) == 0


def lines(cluster: Cluster | None, **settings: Any) -> Iterator[dict[str, Any]]:
    cloud = None if cluster is None else CloudConfig(cluster.url, deadline_ms=5000, lost_after_s=120)
    yield from trace_lines(Recipe(device="cpu", max_tokens=24, cloud=cloud, **settings), PROMPT, POOL)


def text_of(lines: list[dict[str, Any]]) -> list[int]:
    return [token for line in lines if "i" in line for token in line["tokens"]]


def replicas_of(lines: list[dict[str, Any]]) -> list[str]:
    return [line["replica"] for line in lines if line.get("replica")]


@pytest.mark.exhaustive
def test_a_session_uses_one_replica_and_its_text_is_that_of_a_local_target(cluster: Cluster) -> None:
    expected = {name: text_of(list(lines(None, **settings))) for name, settings in SETTINGS.items()}
    used: list[str] = []
    steps = 0
    while len(set(used)) < 2:  # sessions are random
        for name, settings in SETTINGS.items():
            run = list(lines(cluster, **settings))
            used += replicas_of(run)
            steps += sum("i" in line for line in run)
            assert text_of(run) == expected[name]
    assert urlopen(cluster.dashboard).status == 200
    metrics, end = cluster.metrics, time.monotonic() + PATIENCE_S
    while (metrics["steps_total"] < steps or not metrics["resident_bytes"]) and time.monotonic() < end:
        threading.Event().wait(0.2)
        metrics = cluster.metrics
    assert metrics["steps_total"] == metrics["context_hits_total"] + metrics["prefills_total"] == steps
    assert metrics["prefills_total"] == len(used) and not metrics["repeated_prefills_total"]
    assert 0 < metrics["accepted_tokens_total"] < metrics["drafted_tokens_total"]
    assert metrics["tokens_total"] == metrics["accepted_tokens_total"] + steps
    assert metrics["resident_bytes"] > metrics["context_bytes"] >= 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS)
def test_another_replica_continues_after_a_kill(cluster: Cluster, settings: str) -> None:
    """All replicas of the first step are killed."""
    expected = text_of(list(lines(None, **SETTINGS[settings])))
    run = []
    for line in lines(cluster, **SETTINGS[settings]):
        run.append(line)
        if line.get("i") == 1:
            for replica in cluster.replicas:
                replica.send_signal(signal.SIGKILL)
    first, second = replicas_of(run)
    assert text_of(run) == expected and first != second
