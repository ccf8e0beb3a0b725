"""Ray Serve: configuration, replicas, affinity, lost replicas, redeployment, metrics."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from fakes.http_server import free_port
from fakes.traces import trace_lines

from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not find_spec("ray"), reason="ray[serve] cannot be installed here"),
]

ROOT = Path(__file__).parents[2]
PROMPT = "def read_lines(path):\n"
POOL = ModelPool()
DEPLOYED = "--pair bundled --device cpu --host 127.0.0.1 --min-replicas 1 --max-replicas 1"
FLAGS = "--pair bundled --device cpu --port 0 --min-replicas 2 --max-replicas 2 --until-stdin-ends"
PATIENCE_S = 60.0
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 1.0, "rule": "coupled", "seed": 11},
}


def documented_config() -> dict[str, Any]:
    """Return the Serve configuration of the example for Kubernetes."""
    import yaml

    example = yaml.safe_load((ROOT / "docs/ray-service.yaml").read_text("utf-8"))["spec"]
    config: dict[str, Any] = yaml.safe_load(example["serveConfigV2"])
    return config


def test_the_settings_of_the_example_belong_to_the_deployment_of_the_application() -> None:
    from specdemo.cli import ray_serve

    (application,) = documented_config()["applications"]
    deployment = ray_serve.application(application["args"])._bound_deployment
    assert [entry["name"] for entry in application["deployments"]] == [deployment.name]
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 8)


class Cluster:
    """`serve --ray` in a process of its own; `folder` and ports of metrics are those of no other cluster."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "specdemo", "serve", "--ray", *FLAGS.split()]
        environment = {
            **os.environ,
            "RAY_metrics_report_interval_ms": "500",
            "RAY_TMPDIR": str(folder),
            "AUTOSCALER_METRIC_PORT": str(free_port()),
            "DASHBOARD_METRIC_PORT": str(free_port()),
        }
        self._metric_addresses = folder / "ray/prom_metrics_service_discovery.json"
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
        targets = json.loads(self._metric_addresses.read_text())[0]["targets"]
        sums: Counter[str] = Counter()
        for target in targets:
            for line in urlopen(f"http://{target}/metrics").read().decode().splitlines():
                name, _, value = line.partition("{")[0], "", line.rpartition(" ")[2]
                if name.startswith("ray_specdemo_"):
                    sums[name.removeprefix("ray_specdemo_")] += float(value)
        return sums


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # paths of sockets must be short
        opened = Cluster(Path(folder))
        yield opened
        opened.process.stdin.close()
        assert opened.process.wait(PATIENCE_S) == 0


def lines(
    cluster: Cluster | DeployedCluster | None, mode: str = "speculative", **settings: Any
) -> Iterator[dict[str, Any]]:
    cloud = None if cluster is None else CloudConfig(cluster.url, mode=mode, deadline_ms=5000, lost_after_s=120)
    yield from trace_lines(Recipe(device="cpu", max_tokens=24, cloud=cloud, **settings), PROMPT, POOL)


def text_of(lines: list[dict[str, Any]]) -> list[int]:
    return [token for line in lines if "i" in line for token in line["tokens"]]


def replicas_of(lines: list[dict[str, Any]]) -> list[str]:
    return [line["replica"] for line in lines if line.get("replica")]


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_another_replica_continues_after_a_signal(cluster: Cluster, number: signal.Signals) -> None:
    """All replicas of the first step get the signal. The text is sampled: it depends on the position of the noise."""
    expected = text_of(list(lines(None, **SETTINGS["sampled"])))
    run = []
    for line in lines(cluster, **SETTINGS["sampled"]):
        run.append(line)
        if line.get("i") == 1:
            for replica in cluster.replicas:
                replica.send_signal(number)
    first, *others = replicas_of(run)  # the next replica may have got the signal, too
    assert text_of(run) == expected and others and first not in others


class DeployedCluster:
    """`serve deploy` with the documented configuration on a node of `ray start`."""

    def __init__(self, folder: Path) -> None:
        ports = {name: free_port() for name in ("port", "dashboard-port", "ray-client-server-port")}
        self._file, self._port = folder / "serve.yaml", free_port()
        self._dashboard = f"http://127.0.0.1:{ports['dashboard-port']}"
        self.url = f"http://127.0.0.1:{self._port}"
        authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**os.environ, **authentication, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        flags = [f"--{name}={value}" for name, value in {**ports, "num-cpus": 4, "temp-dir": folder}.items()]
        self._node = self._run("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", *flags)
        for line in self._node.stdout:
            if "block forever" in line:
                break

    def deploy(self, flags: str) -> None:
        config = documented_config()
        config["http_options"] = {"host": "127.0.0.1", "port": self._port}
        (application,) = config["applications"]
        application["args"]["flags"] = flags
        application["deployments"][0]["ray_actor_options"]["num_cpus"] = 1
        self._file.write_text(json.dumps(config))  # JSON is YAML
        with self._run("ray.serve.scripts", "deploy", f"--address={self._dashboard}", str(self._file)) as command:
            output, _ = command.communicate()
        assert command.returncode == 0, output
        end = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert time.monotonic() < end, "the application does not start"
            threading.Event().wait(0.2)

    def close(self) -> None:
        for process in (*psutil.Process(self._node.pid).children(recursive=True), self._node):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._node.communicate()

    def _is_ready(self) -> bool:
        try:
            return urlopen(f"{self.url}/v1/ready").status == 200
        except OSError:
            return False

    def _run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def deployed() -> Iterator[DeployedCluster]:
    with TemporaryDirectory(prefix="ray") as folder:  # paths of sockets must be short
        with closing(DeployedCluster(Path(folder))) as cluster:
            yield cluster


def test_a_redeployment_changes_and_loses_no_text(deployed: DeployedCluster) -> None:
    """Two texts are under way when their replica is replaced; others begin and are streamed meanwhile."""
    kinds = {**SETTINGS, "streamed": {"temperature": 0.0, "mode": "cloud_only"}}
    expected = {name: text_of(list(lines(None, **settings))) for name, settings in SETTINGS.items()}
    expected["streamed"] = expected["greedy"]

    def other_replica(before: str) -> str:
        """Decode until another replica has responded; return its name."""
        seen: set[str] = set()
        while not seen:
            for name, settings in kinds.items():
                run = list(lines(deployed, **settings))
                assert run[-1].get("error") is None and text_of(run) == expected[name]
                seen |= {*replicas_of(run)} - {before}
        (name,) = seen
        return name

    deployed.deploy(f"{DEPLOYED} --contexts 98")
    first = other_replica("")
    under_way = {name: lines(deployed, **settings) for name, settings in SETTINGS.items()}
    begun = {name: [next(run) for _ in range(4)] for name, run in under_way.items()}
    deployed.deploy(f"{DEPLOYED} --contexts 99")
    second = other_replica(first)
    for name, run in under_way.items():
        whole = [*begun[name], *run]
        assert text_of(whole) == expected[name]
        assert replicas_of(whole) == [first, second]
