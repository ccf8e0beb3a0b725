"""Health check of page, service and Ray replicas."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import StreamRequest, VerifyConfig
from specdemo.worker import Stream, Worker, WorkerBusy

STALLED_S = 25.0
_PROBE = StreamRequest(tokens=[0], config=VerifyConfig(temperature=0.0), max_tokens=1)


class Unhealthy(RuntimeError):
    """The service must be replaced; the cause is the error of a probe, if any."""


@dataclass(eq=False)
class JobHealth:
    """Health of the jobs of a worker.

    An idle worker without a token in the last `recent_s` runs a probe. A busy worker is healthy while its jobs advance.
    """

    worker: Worker
    start_probe: Callable[[], Stream[Any]]
    patience_s: float = STALLED_S
    token_age_s: Callable[[], float] = lambda: math.inf
    recent_s: float = 0.0
    probe: Stream[Any] | None = None  # the latest one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> str:
        """Return the sign of health. Raises `Unhealthy`."""
        age_s = self.token_age_s()
        if age_s <= self.recent_s:
            return f"a token was produced {age_s:.0f} s ago"
        probe = None
        with self._lock, suppress(WorkerBusy):  # jobs were submitted meanwhile
            if not self.worker.active:
                probe = self.probe = self.start_probe()
        if probe is not None and probe.wait(self.patience_s):
            if probe.error is None:
                return "the service was idle, and a probe produced a token"
            raise Unhealthy(f"an idle service cannot decode a token: {probe.error}") from probe.error
        stalled_s = self.worker.stalled_s
        if stalled_s >= self.patience_s:
            raise Unhealthy(f"no step was completed for {stalled_s:.0f} s: the device does not respond")
        return "jobs advance"


def service_health(worker: Worker, contexts: Contexts) -> JobHealth:
    """Return the health check of a service; its probe decodes a token."""
    return JobHealth(worker, lambda: worker.submit(lambda: contexts.stream(_PROBE)))
