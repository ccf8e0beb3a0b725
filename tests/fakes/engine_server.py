"""HTTP server that answers like llama.cpp's, with recorded or made events."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes.http_server import Handler, http_server
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
    probes: list[list[int]] = field(default_factory=list)  # prompts of requests for the most probable tokens
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

    class Engine(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": "served"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.body())
            state.keys.append(self.headers["Authorization"])
            if self.path == "/detokenize":
                text = tokenizer.decode([token + state.shift for token in body["tokens"]])
                return self.answer(200, json.dumps({"content": text}).encode())
            if self.path == "/v1/completions":
                state.probes.append(body["prompt"])
                top = [{"id": i, "logprob": -float(i)} for i in range(1, 1 + body["logprobs"])]
                choice = {"text": "", "logprobs": {"content": [{"top_logprobs": top}]}}
                answer = {"choices": [choice], "system_fingerprint": "b123-abc"}
                return self.answer(200, json.dumps(answer).encode())
            state.bodies.append(body)
            if state.status != 200:
                return self.answer(state.status, json.dumps({"error": {"message": "no slot"}}).encode())
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

    with http_server(Engine) as url:
        state.url = url
        yield state
