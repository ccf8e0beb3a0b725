"""HTTP service that describes the bundled target and answers requests with arbitrary messages."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fakes.http_server import Handler, http_server
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


def rejection(request: dict[str, Any], token: int) -> dict[str, Any]:
    """Return a response that commits `token` and no draft token."""
    n = len(request.get("draft_tokens", ()))
    fields = {"epoch": request.get("epoch", 0), "round": request["round"], "accepted_len": 0, "p": [0.5] * n}
    return {**fields, "correction" if n else "bonus": token, "choices": [[token]] * (n + 1)}


@contextmanager
def hostile_service(respond: Respond, **changes: Any) -> Iterator[str]:
    """Yield the address of a service that answers POST requests by `respond`."""
    info = bundled_info(**changes)

    class Hostile(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, json.dumps(info).encode())

        def do_POST(self) -> None:
            status, message = respond(json.loads(self.body()))
            self.answer(status, json.dumps(message).encode())

    with http_server(Hostile) as url:
        yield url
