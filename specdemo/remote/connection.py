"""Connection of a run to its services: time limits, a thread, failover, and repeated requests."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from specdemo.core.errors import UserError
from specdemo.remote.link import Cause, HttpClient, NewContext, OtherModel, ResendText, Retry
from specdemo.remote.protocol import ReadyResponse, ServiceIdentity, ServiceInfo
from specdemo.worker import run_in_thread, wait_for

MAX_TIMEOUT_S = 8.0  # longest wait for a response to a request
READ_S = 0.1  # additional time of a step per unread token
SKIP_S = 10.0
_READ_TIMEOUT_S = 0.01  # additional timeout of a request per unread token
_LEAST_S = 0.1
_LATE_S = 1.0  # a call that ends this late was interrupted
_READY_S = 1.0
_GRACE_S = 0.25
_PAUSE_S = 0.25  # longest pause before a request is repeated
_CONNECTIONS = 2  # attempts to connect to hosts that do not answer

T = TypeVar("T")


class ConnectionLost(UserError):
    """A step took longer than its time limit, see `Requests`."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits; unless `strict`, a token is committed provisionally after `deadline_s`."""

    deadline_s: float = 0.4
    lost_s: float = 30.0
    strict: bool = True

    def first_timeout(self, unread: int) -> float:
        return max(self.deadline_s, min(self.deadline_s + _READ_TIMEOUT_S * unread, MAX_TIMEOUT_S))


class Connection:
    """Services of equal model that share a network; `client` is in use.

    The session determines their order (rendezvous hashing). A service that fails, or neither responds in time nor to
    `/v1/ready`, is skipped for `SKIP_S`; after a restart with another model, for the rest of the run.
    """

    def __init__(
        self,
        clients: Sequence[HttpClient],
        session: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clients = sorted(clients, key=lambda it: hashlib.sha256(f"{session} {it.url}".encode()).digest())
        self.client = self.clients[0]
        self.network = self.client.network
        self.clock = clock
        self.sleep = sleep
        self.closed = False
        self._skipped_until: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, "connection")
        self.start_run()

    @property
    def url(self) -> str:
        return self.client.url

    def start_run(self) -> None:
        """Forget the measurements; the next response names its service."""
        self.network.take()
        self._noted_url = self.url
        self._noted = ServiceIdentity(numerics=self.client.identity.numerics)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call for the thread of the connection."""
        return self._thread.submit(call)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a queued call. Raise `Stopped` if the job is stopped meanwhile."""
        future = self.submit(call)
        wait_for(future)
        return future.result()

    def describe(self, timeout: float, lost_s: float) -> ServiceInfo:
        """Return the first description; a busy service is asked again. Raises `Retry`, `UserError`."""
        requests = Requests(self, Deadlines(lost_s=lost_s))
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._describe(timeout)
            except Retry as failure:
                may_respond = failure.cause is Cause.LATE
                may_respond |= failure.cause is Cause.UNREACHABLE and attempts < _CONNECTIONS
                if not may_respond or requests.remaining() <= 0:
                    raise
                timeout *= 2

    def fail_over(self, failure: Exception) -> Exception:
        """Return `ResendText` if another service continues, else `failure`. Raises `OtherModel`."""
        is_refused = isinstance(failure, OtherModel)
        if not is_refused and not self._is_dead(failure):
            return failure
        now = self.clock()
        self._skipped_until[self.url] = math.inf if is_refused else now + SKIP_S
        waits = {client: max(0.0, self._skipped_until.get(client.url, now) - now) for client in self.clients}
        other = min(self.clients, key=waits.__getitem__)
        if is_refused and waits[other]:
            raise failure
        if other is self.client:
            return failure
        change = ResendText(str(failure) if is_refused else f"{self.url} does not respond ({failure})")
        other.identity = self.client.identity
        self.client = other
        return change

    def note_service(self, gap_s: float, length: int) -> bool:
        """Measure a change of the service of a text of this length; return True if another service continues."""
        identity = self.client.identity
        network = self.network
        switched = self.url != self._noted_url or self._noted.replica not in ("", identity.replica)
        if switched:
            network.measures |= {"switched": 1, "gap_s": gap_s, "reread": length}
        if switched or identity.replica != self._noted.replica:
            network.replica = identity.replica
        if identity.numerics != self._noted.numerics:
            network.measures["numerics"] = 1
        self._noted_url = self.url
        self._noted = identity
        return switched

    def close(self) -> None:
        """End the thread; its reads end soon."""
        self.closed = True
        for client in self.clients:
            client.close()
        self._thread.shutdown(wait=False)

    def _describe(self, timeout: float) -> ServiceInfo:
        """Return a description, after those of all services that respond were compared."""
        calls: dict[HttpClient, Future[ServiceInfo]] = {}
        for client in self.clients:
            calls[client] = run_in_thread(partial(client.call, "GET", "/v1/target", None, ServiceInfo, timeout))
        if any(call.exception() is None for call in as_completed(calls.values())):
            wait(calls.values(), _GRACE_S + 2 * self.network.rtt_s)  # for the other descriptions
        infos: dict[HttpClient, ServiceInfo] = {}
        failures: list[Retry] = []
        for client, call in calls.items():
            try:
                if call.done():
                    infos[client] = call.result()
            except Retry as failure:
                failures.append(failure)
            if client not in infos:
                self._skipped_until[client.url] = self.clock() + SKIP_S
        if not infos:
            raise max(failures, key=lambda failure: (failure.cause is Cause.LATE, failure.cause is Cause.UNREACHABLE))
        self.client = next(iter(infos))
        first = infos[self.client]
        for client, info in infos.items():
            if len(self.clients) > 1 and not (info.model and info.model == first.model):
                raise OtherModel(client.url, info, first)
        self.client.identity = first
        return first

    def _is_dead(self, failure: Exception) -> bool:
        """Return True if another service must continue; a lonely service is never given up."""
        if len(self.clients) == 1 or not isinstance(failure, Retry) or failure.cause is Cause.BUSY:
            return False
        if failure.cause is Cause.DOWN:
            return True
        try:
            self.client.call("GET", "/v1/ready", None, ReadyResponse, _READY_S + 2 * self.network.rtt_s)
        except Retry as not_ready:
            return not_ready.cause is not Cause.BUSY
        except UserError:  # an older service, which lacks the route
            pass
        return False


class Requests:
    """Requests of a step for a text of `length` tokens: each is repeated, until the time of the step is over.

    The limit is `lost_s` without progress, in total `lost_s` plus `READ_S` per unread token. Progress is a larger
    prefill position. The time of a call that took longer than `remaining()` is ignored: the process was suspended.
    """

    def __init__(
        self, connection: Connection, deadlines: Deadlines, length: int = 0, unread: int = 0, advice: str = ""
    ) -> None:
        """`unread`: tokens that the service must read."""
        self._connection = connection
        self._deadlines = deadlines
        self._length = length
        self._unread = unread
        self._advice = advice
        self._timeout = deadlines.first_timeout(unread)
        self._lost_s = max(deadlines.lost_s, _LEAST_S)
        self._left = self._lost_s
        self._position = 0
        self._start = self._progress = self._asked = self._sent = self._requested = connection.clock()
        self._failed: float | None = None  # start of the first failed request
        connection.network.limit = self.remaining

    def remaining(self) -> float:
        """Return the remaining seconds."""
        now = self._connection.clock()
        if (since := now - self._asked) > max(self._left, 0.0) + _LATE_S:
            self._start += since
            self._progress += since
        self._asked = now
        self._left = min(self._progress, self._start + READ_S * self._unread) + self._lost_s - now
        return self._left

    def reread(self) -> None:
        """Allow for another prefill of the text, whose positions start at 0."""
        self._unread = max(self._unread, self._length)
        self._position = 0

    def report(self, position: int) -> bool:
        """Record a prefill position; return True if it is progress."""
        if not self._position < position <= self._length:
            return False
        self._position = position
        self._progress = self._connection.clock()
        return True

    def send(self, attempt: Callable[[HttpClient, float], T]) -> T:
        """Return the result of `attempt(client, timeout)`.

        Raises: ResendText, NewContext, ConnectionLost, UserError.
        """
        connection = self._connection
        while True:
            if connection.closed:
                raise ConnectionLost(f"the connection to {connection.url} was closed")
            self._sent = connection.clock()
            try:
                result = attempt(connection.client, self._timeout)
            except (Retry, ResendText, NewContext, OtherModel) as failure:
                self._recover(failure)
                continue
            gap_s = 0.0 if self._failed is None else self._sent - self._failed
            if connection.note_service(gap_s, self._length):
                self._requested = self._sent
            self._failed = None
            return result

    def add_response(self, cloud_s: float) -> None:
        """Measure a response that took the service `cloud_s`."""
        now = self._connection.clock()
        measures = self._connection.network.measures
        measures["cloud_s"] += cloud_s
        measures["rtt_s"] += now - self._requested - cloud_s
        self._requested = now

    def _recover(self, failure: Exception) -> None:
        """Prepare the next request. Raises errors that change it, and `ConnectionLost`."""
        connection = self._connection
        is_quick = connection.clock() - self._sent < self._timeout / 2
        is_first = self._failed is None
        if is_first:
            self._failed = self._sent
        failure = connection.fail_over(failure)
        resend = not isinstance(failure, Retry)
        if resend:
            self.reread()
        progress = isinstance(failure, Retry) and self.report(failure.position)
        if self.remaining() <= 0:
            cause = f"has made no progress for {connection.clock() - self._progress:.0f} s ({failure})"
            raise ConnectionLost(f"the cloud at {connection.url} {cause}: {self._advice}")
        if not progress:
            is_quick |= isinstance(failure, Retry) and failure.cause is Cause.BUSY
            if is_quick and not (resend and is_first):
                connection.sleep(min(self._timeout / 4, _PAUSE_S))
            self._timeout = min(2 * self._timeout, MAX_TIMEOUT_S)
        if resend:
            self._timeout = max(self._timeout, self._deadlines.first_timeout(self._length))
            raise failure
