"""HTTP service that describes the bundled target and answers requests with arbitrary messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes.remote import INFO
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, fingerprint

Respond = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]  # request -> status and body


def bundled_info(**changes: Any) -> dict[str, Any]:
    """Return the description of a service with the bundled target."""
    tokenizer = read_tokenizer(ModelSpec(PAIRS["bundled"].target, device="cpu"))
    info = {**json.loads(INFO.model_dump_json()), "tokenizer": fingerprint(tokenizer), "context": 512}
    return {**info, "vocab_size": len(tokenizer), **changes}


@contextmanager
def hostile_service(respond: Respond, **changes: Any) -> Iterator[str]:
    """Yield the address of a service that answers POST requests by `respond`."""
    info = bundled_info(**changes)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, info)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*respond(json.loads(body)))

        def _send(self, status: int, message: dict[str, Any]) -> None:
            body = json.dumps(message).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the client left
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
