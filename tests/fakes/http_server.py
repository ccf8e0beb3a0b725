"""HTTP server in a thread, for services that tests invent, and ports for other servers."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Handler without a log."""

    def answer(self, status: int, body: bytes) -> None:
        """Send a JSON response; the client may have left."""
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def log_message(self, *_: object) -> None: ...


@contextmanager
def http_server(handler: type[Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free_port() -> int:
    """Return a port that the system chose, so that test processes do not choose the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
