"""HTTP services in threads."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdemo.remote import server
from specdemo.remote.access import bind


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[tuple[str, int]]:
    """Serve `app` on a free port with `options` of `server.listen`; yield the address."""
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    stdin, end = socket.socketpair()
    options |= {"stdin": stdin.makefile("rb"), "announce": ready.set}
    thread = threading.Thread(target=server.listen, args=(app, listener), kwargs=options)
    address = listener.getsockname()
    thread.start()
    try:
        assert ready.wait(60)
        yield address
    finally:
        end.close()
        thread.join(60)
        assert not thread.is_alive()
