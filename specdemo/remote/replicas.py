"""Several services of one target: choice by session, and failover."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TypeAlias

from specdemo.core.errors import UserError
from specdemo.remote.link import (
    ConnectionTimeout,
    ContextGone,
    HttpClient,
    MeteredNetwork,
    NoResponse,
    OtherModel,
    RequestTimeout,
    ServiceDown,
    other_model,
)
from specdemo.remote.protocol import (
    MessageT,
    NetworkMessage,
    PrefillPosition,
    ReadyResponse,
    ServiceIdentity,
    ServiceInfo,
)
from specdemo.worker import run_in_thread

SKIP_S = 10.0
_READY_S = 1.0
_GRACE_S = 0.25


Client: TypeAlias = "HttpClient | Replicas"


class ReplicaSwitched(ContextGone):
    """Another service continues, and needs the complete text."""


class Replicas:
    """`HttpClient` over several `clients`, which share a network.

    The session determines the order (rendezvous hashing). A service that fails, or neither responds in time nor to
    `/v1/ready`, is skipped for `SKIP_S`; after a restart with another model, for the rest of the run.
    """

    def __init__(
        self, clients: Sequence[HttpClient], session: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clients = sorted(clients, key=lambda client: _weight(session, client.url))
        self.session = session
        self._clock = clock
        self._client = self.clients[0]
        self._skipped_until: dict[str, float] = {}

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def network(self) -> MeteredNetwork:
        return self._client.network

    @property
    def identity(self) -> ServiceIdentity:
        return self._client.identity

    def describe(self, timeout: float) -> ServiceInfo:
        """Return the first description. Raises NoResponse (of a busy service, if any), UserError."""
        calls = [
            (client, run_in_thread(partial(client.call, "GET", "/v1/target", None, ServiceInfo, timeout)))
            for client in self.clients
        ]
        self._await_descriptions([call for _, call in calls])
        infos, failures = [], []
        for client, call in calls:
            if not call.done():
                continue
            try:
                infos.append((client, call.result()))
            except NoResponse as failure:
                failures.append(failure)
        if not infos:
            raise max(failures, key=_repeatable)
        self._client, first = infos[0]
        described = [client for client, _ in infos]
        for client in self.clients:
            if client not in described:
                self._skip(client)
        for client, info in infos if len(self.clients) > 1 else ():
            if not info.model:
                raise UserError(f"{client.url} states no digest of its model: update this service, or give one address")
            if info.model != first.model:
                raise other_model(client.url, info.identity, first.identity)
        self._client.identity = first.identity
        return first

    def call(
        self, method: str, path: str, message: NetworkMessage | None, response_type: type[MessageT], timeout: float
    ) -> MessageT:
        """Raises also `ReplicaSwitched`."""
        try:
            return self._client.call(method, path, message, response_type, timeout)
        except NoResponse as failure:
            self._fail_over(failure)
            raise
        except OtherModel as refusal:
            self._refuse(refusal)
            raise

    def tokens(
        self, path: str, message: NetworkMessage, timeout: float
    ) -> Generator[int | PrefillPosition | None, None, None]:
        """Raises also `ReplicaSwitched`."""
        try:
            yield from self._client.tokens(path, message, timeout)
        except NoResponse as failure:
            self._fail_over(failure)
            raise
        except OtherModel as refusal:
            self._refuse(refusal)
            raise

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _fail_over(self, failure: NoResponse) -> None:
        client = self._client
        if len(self.clients) == 1 or not isinstance(failure, (RequestTimeout, ServiceDown)):
            return
        if isinstance(failure, RequestTimeout) and self._responds(client):
            return
        self._skip(client)
        now = self._clock()
        other = min(self.clients, key=lambda other: max(now, self._skipped_until.get(other.url, now)))
        if other is not client:
            self._switch(other, f"{client.url} does not respond ({failure})", failure)

    def _refuse(self, refusal: OtherModel) -> None:
        """Continue with a service that has not failed lately, if there is one, and never use this one again."""
        now = self._clock()
        self._skipped_until[self._client.url] = math.inf
        if left := [other for other in self.clients if self._skipped_until.get(other.url, now) <= now]:
            self._switch(left[0], str(refusal), refusal)

    def _switch(self, other: HttpClient, sentence: str, cause: Exception) -> None:
        other.identity, self._client = self._client.identity, other
        raise ReplicaSwitched(sentence) from cause

    def _await_descriptions(self, calls: Sequence[Future[ServiceInfo]]) -> None:
        """Wait for the first description, and for others a little longer."""
        pending = set(calls)
        while pending and not any(call.done() and call.exception() is None for call in calls):
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        wait(pending, _GRACE_S + 2 * self.network.link.rtt_s)

    def _skip(self, client: HttpClient) -> None:
        self._skipped_until[client.url] = self._clock() + SKIP_S

    def _responds(self, client: HttpClient) -> bool:
        try:
            client.call("GET", "/v1/ready", None, ReadyResponse, _READY_S + 2 * client.network.link.rtt_s)
        except NoResponse as failure:
            return not isinstance(failure, (RequestTimeout, ServiceDown))
        except UserError:  # an older service
            return True
        return True


def _repeatable(failure: NoResponse) -> tuple[bool, bool]:
    """Sort failures, first those that remain: a busy service may respond later."""
    late = isinstance(failure, RequestTimeout)
    return late and not isinstance(failure, ConnectionTimeout), late


def _weight(session: str, url: str) -> bytes:
    return hashlib.sha256(f"{session} {url}".encode()).digest()
