"""Health of a service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import StreamRequest, VerifyConfig
from specdemo.worker import Worker, WorkerBusy

STALLED_S = 25.0
_PROBE = StreamRequest(tokens=[0], config=VerifyConfig(temperature=0.0), max_tokens=1)


class Unhealthy(RuntimeError):
    """The service must be replaced."""


class ServiceHealth:
    """Health of the jobs of a service. A check of a busy service waits for no job."""

    def __init__(self, worker: Worker, contexts: Contexts, patience_s: float = STALLED_S) -> None:
        self._worker, self._contexts = worker, contexts
        self._patience_s = patience_s

    def check(self) -> None:
        """Decode a token if the service is idle. Raise `Unhealthy` if that fails or jobs do not advance."""
        if not self._worker.active:
            self._probe()
        if (stalled_s := self._worker.stalled_s) >= self._patience_s:
            raise Unhealthy(f"no step was completed for {stalled_s:.0f} s: the device does not respond")

    def _probe(self) -> None:
        with suppress(WorkerBusy):  # jobs were submitted meanwhile
            probe = self._worker.submit(self._decode)
            probe.wait(self._patience_s)
            probe.stop()
            if probe.error is not None:
                raise Unhealthy(f"an idle service cannot decode a token: {probe.error}") from probe.error

    def _decode(self) -> Iterator[Any]:
        return self._contexts.stream(_PROBE)
