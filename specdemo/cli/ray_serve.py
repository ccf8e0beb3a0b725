"""Ray Serve application: replicas of the service, with affinity by session, autoscaling, health and metrics."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.metrics import Counter, Gauge

from specdemo import set_environment_defaults
from specdemo.core.errors import UserError

NAME = "specdemo"
_ONGOING = 4  # requests of a replica before another starts
_MOST_ONGOING, _MOST_QUEUED = 64, 256
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_POLL_S = 0.5
_POSITIONS = 16  # longest draft with a series per position


class ReplicaMetrics:
    """Metrics of a replica, exported by Ray."""

    def __init__(self) -> None:
        self._steps = Counter("specdemo_steps", "Verified drafts")
        self._tokens = Counter("specdemo_tokens", "Tokens committed by steps")
        self._drafted = Counter("specdemo_drafted_tokens", "Draft tokens")
        self._accepted = Counter("specdemo_accepted_tokens", "Accepted draft tokens", tag_keys=("position",))
        self._hits = Counter("specdemo_context_hits", "Steps that continued a context")
        self._prefills = Counter("specdemo_prefills", "Steps that read the complete text")
        self._repeated = Counter("specdemo_repeated_prefills", "Prefills of a text that another context contained")
        self.jobs = Gauge("specdemo_jobs", "Active and queued jobs")
        self.context_bytes = Gauge("specdemo_context_bytes", "Memory of contexts")
        self.resident_bytes = Gauge("specdemo_resident_bytes", "Resident memory of the process")

    def count(self, request: Any, response: Any) -> None:
        """Count a step, a `VerifyRequest` with its `VerifyResponse`."""
        self._steps.inc()
        self._tokens.inc(response.accepted_len + (response.token is not None))
        if request.k:
            self._drafted.inc(request.k)
        for position in range(1, response.accepted_len + 1):
            self._accepted.inc(tags={"position": str(min(position, _POSITIONS))})
        (self._hits if request.base else self._prefills).inc()
        if not request.base and request.epoch:
            self._repeated.inc()


@serve.ingress()
class ServiceReplica:
    """Replica of the service with the checked options of `serve`."""

    def __init__(self, options: argparse.Namespace, requires_token: bool) -> None:
        set_environment_defaults()  # torch reads the variables when it is imported
        from specdemo.cli.serve import build_service
        from specdemo.remote.access import TOKEN
        from specdemo.remote.server import service_health

        if requires_token and TOKEN not in os.environ:
            raise UserError(f"a replica has no {TOKEN}: set the variable on every node")
        self._metrics = ReplicaMetrics()
        name = serve.get_replica_context().replica_id.unique_id
        self._app = build_service(options, name, self._metrics.count)
        state = self._app.state
        self._worker, self._contexts = state.worker, state.contexts
        self._health = service_health(state.worker, state.contexts)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Raise an error if the replica must be replaced."""
        await asyncio.to_thread(self._health.check)
        with suppress(RuntimeError):  # the queue is full
            self._worker.submit(self._measure)

    def __del__(self) -> None:
        self._worker.close()

    def _measure(self) -> Iterator[None]:
        """Measure within a job: contexts belong to the thread of the worker."""
        from specdemo.models.memory import process_bytes

        self._metrics.jobs.set(self._worker.active - 1)
        self._metrics.context_bytes.set(self._contexts.reserved_bytes)
        self._metrics.resident_bytes.set(process_bytes())
        yield


def application(args: dict[str, str]) -> serve.Application:
    """Return the application of a Serve configuration; `args["flags"]`: flags of `serve`."""
    from specdemo.cli.arguments import parser
    from specdemo.cli.serve import check_options

    flags = args.get("flags", "")
    try:
        options = parser().parse_args(["serve", "--ray", *shlex.split(flags)])
    except SystemExit as error:  # the cause is printed
        raise UserError(f"the flags {flags!r} are invalid: use those of serve") from error
    check_options(options)
    return bind_replicas(options)


def bind_replicas(options: argparse.Namespace) -> serve.Application:
    """Return the application with the checked options of `serve`."""
    from specdemo.models.spec import find_device
    from specdemo.remote.access import TOKEN

    cores = max(1, (os.cpu_count() or 1) // options.max_replicas)
    deployment = serve.deployment(
        ServiceReplica,
        name=NAME,
        ray_actor_options={"num_cpus": cores, "num_gpus": int(find_device(options.device or "auto").type == "cuda")},
        max_ongoing_requests=_MOST_ONGOING,
        max_queued_requests=_MOST_QUEUED,
        health_check_period_s=10.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas, max_replicas=options.max_replicas, target_ongoing_requests=_ONGOING
        ),
        logging_config=_LOGGING,
    )
    return deployment.bind(options, TOKEN in os.environ)


def serve_until_signal(options: argparse.Namespace) -> None:
    """Serve on this machine, or on the cluster of RAY_ADDRESS."""
    from specdemo.cli.serve import announce_address
    from specdemo.remote.access import bind
    from specdemo.remote.server import call_at_end
    from specdemo.signals import handle_signals

    with closing(bind(options.host, options.port)) as listener:  # Ray opens it again
        port = listener.getsockname()[1]
    stopped = threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        with handle_signals(lambda number, frame: stopped.set(), signal.SIGINT, signal.SIGTERM):
            _start(options, port)
            if cluster.dashboard_url:
                print(f"dashboard: http://{cluster.dashboard_url}")
            announce_address(options, port)
            if options.until_stdin_ends:
                call_at_end(sys.stdin.buffer, stopped.set)
            while not stopped.wait(_POLL_S):  # a thread of Ray may have received the signal
                pass
            serve.shutdown()
    finally:
        ray.shutdown()


def _start(options: argparse.Namespace, port: int) -> None:
    http = {"host": options.host, "port": port}
    if options.certificate:
        key = options.key or options.certificate  # Ray requires both names
        http |= {"ssl_certfile": str(options.certificate), "ssl_keyfile": str(key)}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options=http, logging_config=_LOGGING)
    try:
        serve.run(bind_replicas(options), name=NAME)
    except RuntimeError as error:
        raise UserError(f"no replica started: {error}") from error
