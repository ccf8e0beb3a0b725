"""Visitors of the page without a browser."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.request import Request, urlopen

from websockets.sync.client import connect

TIMEOUT_S = 600.0


class PageClient:
    """A session of the page at `url`, which ends with a slash."""

    def __init__(self, url: str, session: str) -> None:
        self._url, self._session = url, session
        with urlopen(f"{url}config", timeout=TIMEOUT_S) as response:
            config = json.load(response)
        self._properties = {component["id"]: component["props"] for component in config["components"]}
        run = next(id_ for id_, values in self._properties.items() if values.get("elem_id") == "run")
        self._pressed = next(event for event in config["dependencies"] if [run, "click"] in event["targets"])
        self._drawn = next(event for event in config["dependencies"] if event["inputs"] == self._pressed["outputs"])

    def frames(self, settings: Mapping[str, Any], *, continue_chat: bool = False) -> Iterator[str]:
        """Press Run or Continue chat with `settings` by element id and yield the frames of the run."""
        properties = [self._properties[id_] for id_ in self._pressed["inputs"]]
        values = [settings.get(values.get("elem_id"), values.get("value")) for values in properties]
        pressed = json.dumps([secrets.token_urlsafe(12), *values, *(["next"] if continue_chat else [])])
        body = {"data": [pressed], "fn_index": self._drawn["id"], "session_hash": self._session}
        joined = Request(
            f"{self._url}gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urlopen(joined, timeout=TIMEOUT_S).read()
        with urlopen(f"{self._url}gradio_api/queue/data?session_hash={self._session}", timeout=TIMEOUT_S) as stream:
            first = next(line for line in stream if b'"process_generating"' in line)
            frame = json.loads(json.loads(first[len(b"data: ") :])["output"]["data"][0])
            address = f"{self._url}frames/{frame['run']}".replace("http", "ws", 1)
            with connect(address, open_timeout=TIMEOUT_S, max_size=None) as frames:
                yield from frames
            for line in stream:
                if b'"close_stream"' in line:
                    return


def read_frames(url: str, settings: str) -> None:
    """Press Run and read the stream without rendering; runs in a process of the lowest priority."""
    os.nice(19)
    for _ in PageClient(url, f"reader{os.getpid()}").frames(json.loads(settings)):
        pass


def responds(host: str, port: int, timeout_s: float) -> bool:
    """Return True if the page is served at this port, without a proxy."""
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
