"""Process of the cloud service: application for a loaded target, socket, shutdown."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import IO

import torch
import uvicorn
from fastapi import FastAPI

from specdemo.core.texts import BannedText
from specdemo.models.hub import Hub
from specdemo.models.identity import identify
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.memory import has_memory_for_text
from specdemo.models.threads import thread_initializer
from specdemo.models.tokenizer import token_bytes
from specdemo.models.zoo import fingerprint
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.connections import (
    ConnectionLimits,
    LimitedListener,
    VisitorConnections,
    limit_connections,
)
from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import ServiceInfo
from specdemo.remote.server import create_app
from specdemo.signals import handle_signals
from specdemo.worker import Worker

_KEEP_ALIVE_S = 75
_SHUTDOWN_TIMEOUT_S = 5


def serve_model(
    target: LoadedModel, options: ServiceOptions | None = None, hub: Hub | None = None, replica: str = ""
) -> FastAPI:
    """Create the application of a target; `replica`: name of this service."""
    options = options or ServiceOptions()
    invariance, model = target.invariance, target.model
    tokenizer = fingerprint(target.tokenizer)
    identity = identify(target, tokenizer, hub or Hub())
    info = ServiceInfo(
        name=Path(target.spec.name).name,
        vocab_size=target.vocab_size,
        context=min(target.context, 1 << 30),
        stop=sorted(target.stop),
        tokenizer=tokenizer,
        model=identity.model,
        numerics=identity.numerics,
        replica=replica,
        engine=target.engine,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        threads=torch.get_num_threads(),
        weight_bytes=target.weight_bytes,
        bit_equal=invariance.equal,
        chains_only=target.chains_only,
    )
    pieces = cache(lambda: token_bytes(target.tokenizer))
    contexts = Contexts(
        lambda: CachedModel(model, invariance.pad),
        vocab_size=target.vocab_size,
        context=info.context,
        stop=target.stop,
        budget_bytes=options.budget_bytes,
        max_contexts=options.max_contexts,
        expiry_s=options.expiry_s,
        ban=lru_cache(maxsize=8)(lambda texts: BannedText(texts, pieces())),
    )
    worker = Worker(
        waiting=options.waiting, prepare=thread_initializer(), texts=options.texts, has_memory=has_memory_for_text
    )
    return create_app(info, contexts, worker, options)


class _Server(uvicorn.Server):
    """Stop jobs at shutdown, and return; uvicorn would raise the signal again."""

    def __init__(self, config: uvicorn.Config, worker: Worker, announce: Callable[[], object], drain_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._announce = announce
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener before jobs end: clients must not connect again."""
        closing = asyncio.to_thread(self._worker.close, _SHUTDOWN_TIMEOUT_S, self._drain_s)
        await asyncio.gather(super().shutdown(sockets), closing)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handle_signals(self.handle_exit, signal.SIGINT, signal.SIGTERM):
            yield


def listen(
    app: FastAPI,
    listener: socket.socket,
    certificate: Path | None = None,
    key: Path | None = None,
    stdin: IO[bytes] | None = None,
    announce: Callable[[], object] = lambda: None,
    connections: ConnectionLimits = ConnectionLimits(),  # noqa: B008  # frozen
    drain_s: float = 0.0,
) -> None:
    """Serve until SIGINT, SIGTERM or the end of `stdin`; call `announce` when ready."""
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop would not call `LimitedListener.accept`
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S + math.ceil(drain_s),
        ssl_certfile=certificate and str(certificate),
        ssl_keyfile=key and str(key),
    )
    app.add_middleware(VisitorConnections, limits=connections)
    proxies = limit_connections(config, connections)
    if certificate is not None:
        listener = LimitedListener(listener, connections, proxies)
    server = _Server(config, app.state.worker, announce, drain_s)
    if stdin is not None:
        call_at_end(stdin, lambda: server.handle_exit(signal.SIGTERM, None))
    server.run(sockets=[listener])


def call_at_end(file: IO[bytes], call: Callable[[], object]) -> None:
    """Make the call in a thread when `file` ends."""

    def watch(descriptor: int) -> None:
        while os.read(descriptor, 4096):  # a buffered reader blocks the interpreter's exit
            pass
        call()

    threading.Thread(target=watch, args=(file.fileno(),), daemon=True).start()
