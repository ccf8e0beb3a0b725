"""A loaded target put behind the service, listening until it is told to stop."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import IO

import torch
import uvicorn
from fastapi import FastAPI

from specdemo.core.errors import UserError
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.zoo import fingerprint
from specdemo.remote.contexts import Contexts
from specdemo.remote.protocol import ServiceInfo
from specdemo.remote.server import ServiceLimits, service
from specdemo.worker import Worker

KEPT_S = 75  # an idle connection is kept this long


def application(
    target: LoadedModel,
    *,
    token: str | None = None,
    budget_bytes: int = 2 << 30,
    most: int = 256,
    expiry_s: float = 600.0,
    limits: ServiceLimits | None = None,
    waiting: int = 64,
) -> FastAPI:
    """The service around `target`; everything on the device goes through one worker."""
    invariance, model = target.invariance, target.model
    config = model.config.get_text_config()
    about = ServiceInfo(
        name=Path(target.spec.name).name,
        vocab_size=config.vocab_size,
        context=min(CachedModel(model).context, 1 << 30),
        stop=sorted(target.stop),
        tokenizer=fingerprint(target.tokenizer),
        engine=target.engine,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        threads=torch.get_num_threads(),
        weight_bytes=target.weight_bytes,
        bit_equal=invariance.equal,
    )
    contexts = Contexts(
        lambda: CachedModel(model, invariance.pad),
        vocab_size=config.vocab_size,
        context=about.context,
        stop=target.stop,
        device=model.device,
        budget_bytes=budget_bytes,
        most=most,
        expiry_s=expiry_s,
    )
    return service(about, contexts, Worker(waiting=waiting), token=token, limits=limits)


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, port 0 being any that is free. Raises `UserError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # or asyncio leaves Nagle's delay on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host") from error
    return listener


def listen(
    app: FastAPI,
    listener: socket.socket,
    certificate: Path | None = None,
    key: Path | None = None,
    leash: IO[bytes] | None = None,
) -> None:
    """Serve until interrupted, or until `leash` has been read to its end; with a certificate, over TLS."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEPT_S,
        ssl_certfile=certificate and str(certificate),
        ssl_keyfile=key and str(key),
    )
    server = uvicorn.Server(config)

    def held() -> None:
        while leash.read(4096):
            pass
        server.should_exit = True

    if leash is not None:
        threading.Thread(target=held, daemon=True).start()
    server.run(sockets=[listener])
