"""Service of the table model over HTTP, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes.remote import INFO, contexts
from specdemo.remote import serve
from specdemo.remote.contexts import Contexts
from specdemo.remote.server import create_app
from specdemo.worker import Worker

MODEL, NUMERICS = "a" * 32, "b" * 32


@contextmanager
def table_service(cloud: Contexts | None = None, token: str | None = None, **changes: Any) -> Iterator[str]:
    """Yield the address of a service with `changes` of its description."""
    info = INFO.model_copy(update={"model": MODEL, "numerics": NUMERICS, "replica": "first", **changes})
    app = create_app(info, contexts() if cloud is None else cloud, Worker(), token=token)
    listener, ready = serve.bind("127.0.0.1", 0), threading.Event()
    stdin, end = socket.socketpair()
    events = {"stdin": stdin.makefile("rb"), "announce": ready.set}
    thread = threading.Thread(target=serve.listen, args=(app, listener), kwargs=events)
    thread.start()
    try:
        assert ready.wait(60)
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        end.close()
        thread.join(60)
