"""HTTP server that answers like llama.cpp's, with recorded or made events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS


@dataclass
class EngineServer:
    """Address, answers and requests of the server; without `complete`, a stream stays open after its events."""

    url: str = ""
    events: Sequence[str] = ()
    status: int = 200
    complete: bool = True
    shift: int = 0  # added to the ids of /detokenize
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # the client closed the stream

    @property
    def external(self) -> str:
        return f"llama.cpp={self.url}"


def llama_events(tokens: Sequence[int], accepted: int) -> list[str]:
    """Return the events of a text whose drafts of `accepted` + 1 tokens are accepted except for the last."""
    events, drafted, passed = [], 0, 0
    for n, token in enumerate(tokens, 1):
        if n > 1 and (n - 2) % (accepted + 1) == 0:
            drafted, passed = drafted + accepted + 1, passed + accepted
        counts = {"draft_n": drafted, "draft_n_accepted": passed} if drafted else {}
        events.append(json.dumps({"content": "", "tokens": [token], "timings": {"predicted_n": n, **counts}}))
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit"}
    return [*events, json.dumps({**last, "timings": {"predicted_n": len(tokens)}})]


@contextmanager
def engine_server() -> Iterator[EngineServer]:
    """Run the server with the tokenizer of the bundled pair."""
    tokenizer, state = read_tokenizer(ModelSpec(PAIRS["bundled"].target, device="cpu")), EngineServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.keys.append(self.headers["Authorization"])
            if self.path == "/detokenize":
                return self._send({"content": tokenizer.decode([token + state.shift for token in body["tokens"]])})
            state.bodies.append(body)
            if state.status != 200:
                return self._send({"error": {"message": "no slot"}}, state.status)
            self.send_response(200)
            self.end_headers()
            try:
                for event in state.events:
                    self.wfile.write(f"data: {event}\n\n".encode())
                if state.complete:
                    return self.wfile.write(b"data: [DONE]\n\n")
                self.connection.settimeout(30)
                if not self.connection.recv(1):
                    state.left.set()
            except OSError:
                state.left.set()

        def _send(self, value: Any, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
