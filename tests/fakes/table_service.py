"""Service of the table model over HTTP, in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes.listening import listening
from fakes.remote import INFO, contexts
from specdemo.remote.admission import ServiceOptions
from specdemo.remote.contexts import Contexts
from specdemo.remote.server import create_app
from specdemo.worker import Worker

MODEL, NUMERICS = "a" * 32, "b" * 32


@contextmanager
def table_service(cloud: Contexts | None = None, token: str | None = None, **changes: Any) -> Iterator[str]:
    """Yield the address of a service with `changes` of its description."""
    info = INFO.model_copy(update={"model": MODEL, "numerics": NUMERICS, "replica": "first", **changes})
    app = create_app(info, contexts() if cloud is None else cloud, Worker(), ServiceOptions(token))
    with listening(app) as address:
        yield "http://{}:{}".format(*address)
