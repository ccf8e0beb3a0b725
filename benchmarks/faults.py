"""Latencies under faults and load by single visitors: tables of docs/reliability.md.

`python -m benchmarks.faults STUDY --write`. The service of the page runs in this process, with the limits of a public
page.

`trace`: a visitor opens traces; another requests a small file of the page without a pause.

`connections`: a client opens connections and sends nothing; then a visitor of another address requests the page.

`prompt`: a visitor sends the longest prompt; another decodes short texts one after another until it is read. Then a run
with the same prompt is stopped during its prefill.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.tables import Study, publish, study_command
from specdemo.core.events import Event, Header, StepEvent
from specdemo.core.metrics import percentile
from specdemo.core.step_record import MAX_STEPS
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.connections import ConnectionLimits
from specdemo.ui.gateway import TRACES
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import PUBLIC, HostLimits
from specdemo.ui.page import build
from specdemo.ui.service import Service
from specdemo.worker import Stream

DOCUMENT = "docs/reliability.md"
TABLES = {"long-prompt": DOCUMENT, "trace-delay": DOCUMENT, "open-connections": DOCUMENT}
SHORT_TOKENS = 8
STOP_AFTER_S = 4.0
POLL_S = 0.002
SMALL_FILE = "/robots.txt"
UNOPENED = "2001:db8::1"  # another visitor, behind the proxy of this machine
TRACE_COLUMNS = {
    "trace": "{trace}",
    "MB": "{megabytes:.1f}",
    "opened": "{opened}",
    "answer after s": "{seconds:.2f}",
    "requests of another visitor": "{requests}",
    "p95 s": "{p95_s:.3f}",
    "longest s": "{longest_s:.3f}",
}
CONNECTION_COLUMNS = {
    "client": "{client}",
    "opened": "{opened:,}",
    "most held": "{held:,}",
    "held after {seconds} s": "{left:,}",
    "page for another visitor meanwhile": "{status}",
}
PROMPT_COLUMNS = {
    "prompt tokens": "{tokens:,}",
    "prefill s, alone": "{alone_s:.1f}",
    "prefill s, with runs of another visitor": "{prefill_s:.1f}",
    "runs of 8 tokens": "{runs}",
    "first token p50 / p95 s": "{first_p50_s:.2f} / {first_p95_s:.2f}",
    "complete run p50 / p95 s": "{run_p50_s:.2f} / {run_p95_s:.2f}",
    "longest chunk s": "{chunk_s:.2f}",
    "end after Stop s": "{stop_s:.2f}",
}


class Visitor:
    """A visitor of the service, with an address of its own."""

    def __init__(self, service: Service, number: int) -> None:
        self._service, self._address = service, f"198.51.100.{number}"

    def start(self, prompt: str, max_tokens: int) -> Stream[tuple[str, Event]]:
        """Submit a run with the chat model in a new conversation."""
        self._service.leave(self._address)
        recipe = Recipe(pair=CHAT_PAIR, max_tokens=max_tokens, **PAIRS[CHAT_PAIR].settings)
        return self._service.start([(SPEC, recipe)], prompt, self._address, self._address)


def arrivals(stream: Stream[tuple[str, Event]]) -> Iterator[tuple[Event, float]]:
    """Yield the events of a run with the seconds since the call."""
    start, count = time.perf_counter(), 0
    while not (stream.done and count == len(stream.items)):
        for _, event in stream.items[count:]:
            count += 1
            yield event, time.perf_counter() - start
        time.sleep(POLL_S)


def prefill_times(stream: Stream[tuple[str, Event]]) -> tuple[int, float, float]:
    """Return the prompt tokens, the seconds of the prefill, and those of its longest chunk."""
    times: list[float] = []
    for event, seconds in arrivals(stream):
        if isinstance(event, Header):
            tokens = len(event.prompt_tokens)
        if times or isinstance(event, Header):
            times.append(seconds)
        if isinstance(event, StepEvent):
            break
    return tokens, times[-1] - times[0], max(b - a for a, b in pairwise(times))


def longest_prompt(characters: int) -> str:
    """Return the texts of the prompt set, repeated to `characters`."""
    texts = "\n\n".join(prompt.text for prompt in load_prompts())
    return (texts * (1 + characters // len(texts)))[:characters]


def _prompt(options: argparse.Namespace) -> None:
    """Measure the delay of another visitor during the prefill of a long prompt."""
    prompt = longest_prompt(options.characters)
    service = Service(ModelPool(), generate, replace(PUBLIC, per_minute=None, max_seconds=None))
    with closing(service.worker):
        reader, other = Visitor(service, 1), Visitor(service, 2)
        other.start("Hello", 1).wait()  # loads the model
        tokens, alone_s, chunk_s = prefill_times(reader.start(prompt, 1))
        long, firsts, totals = reader.start(prompt, 1), list[float](), list[float]()
        began = time.perf_counter()
        while not long.done:
            for event, seconds in arrivals(other.start(f"Count to {len(firsts) + 3}.", SHORT_TOKENS)):
                if isinstance(event, StepEvent) and len(firsts) == len(totals):
                    firsts.append(seconds)
            totals.append(seconds)
        prefill_s = time.perf_counter() - began
        stopped = reader.start(prompt, 1)
        time.sleep(STOP_AFTER_S)
        start = time.perf_counter()
        stopped.stop()
        stopped.wait()
        stop_s = time.perf_counter() - start
    record = {
        "tokens": tokens,
        "alone_s": alone_s,
        "prefill_s": prefill_s,
        "runs": len(totals),
        "first_p50_s": statistics.median(firsts),
        "first_p95_s": percentile(firsts, 0.95),
        "run_p50_s": statistics.median(totals),
        "run_p95_s": percentile(totals, 0.95),
        "chunk_s": chunk_s,
        "stop_s": stop_s,
    }
    publish(options, "long-prompt", PROMPT_COLUMNS, [record])


@contextmanager
def served(limits: HostLimits) -> Iterator[int]:
    """Serve the page at all addresses of this machine; yield its port."""
    page = build(pair="bundled", limits=limits)
    page.launch(server_name="0.0.0.0")
    gc.freeze()  # as in app.py
    try:
        yield page.blocks.server_port
    finally:
        page.worker.close()
        page.blocks.close(verbose=False)


def traces(limits: HostLimits) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of traces as long as the limit: empty objects, and a valid trace."""
    size = limits.max_trace or 0
    yield "lines `{}`", b"{}\n" * (size // 3)
    recorded = sorted((ASSETS / "traces").glob("*.jsonl"))[0].read_bytes().splitlines(keepends=True)
    header, first, second = recorded[:3]
    yield "a header, then lines `{}`", header + b"{}\n" * ((size - len(header)) // 3)
    step = {key: value for key, value in json.loads(second).items() if key not in ("laws", "texts")}
    length = len(json.dumps(step)) + 20
    count = min((size - len(header) - len(first)) // length, MAX_STEPS - 1)
    steps = [json.dumps({**step, "i": i, "t": float(i)}) + "\n" for i in range(1, count + 1)]
    yield f"a valid trace of {count + 1:,} steps", header + first + "".join(steps).encode()


def request(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """Return the body of a response. Raises `HTTPError`."""
    sent = Request(f"http://127.0.0.1:{port}{path}", body, headers, method=method)
    with urlopen(sent, timeout=60) as response:
        content: bytes = response.read()
        return content


def _trace(options: argparse.Namespace) -> None:
    """Measure the delay of another visitor while traces are opened, with the limits of private and public pages."""
    records = []
    for page_name, limits in (("private page", HostLimits()), ("public page", replace(PUBLIC, per_minute=None))):
        with served(limits) as port:
            request(port, "GET", SMALL_FILE)
            for name, body in traces(limits):
                delays: list[float] = []
                ended = threading.Event()
                other = threading.Thread(target=_request_until, args=(ended, port, delays))
                other.start()
                start = time.perf_counter()
                for _ in range(options.repeat):
                    answer = request(port, "POST", TRACES, body, **{"Content-Type": "application/x-ndjson"})
                seconds = (time.perf_counter() - start) / options.repeat
                ended.set()
                other.join()
                records.append(
                    {
                        "trace": f"{name}, {page_name}",
                        "megabytes": len(body) / 1e6,
                        "opened": "refused" not in json.loads(answer),
                        "seconds": seconds,
                        "requests": len(delays),
                        "p95_s": percentile(delays, 0.95),
                        "longest_s": max(delays),
                    }
                )
    publish(options, "trace-delay", TRACE_COLUMNS, records)


def _request_until(ended: threading.Event, port: int, delays: list[float]) -> None:
    while not ended.is_set():
        start = time.perf_counter()
        request(port, "GET", SMALL_FILE, **{"X-Forwarded-For": UNOPENED})
        delays.append(time.perf_counter() - start)


def still_open(clients: Sequence[socket.socket]) -> list[socket.socket]:
    """Return the connections that the server has not closed."""
    return [client for client in clients if not _is_closed(client)]


def _is_closed(client: socket.socket) -> bool:
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def _connections(options: argparse.Namespace) -> None:
    """Count the connections that a client holds which opens thousands."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (2 * options.count + 1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but selects an address
        own = probe.getsockname()[0]
    wait_s = ConnectionLimits.seconds + 2
    records: list[dict[str, Any]] = []
    with served(PUBLIC) as port:
        for name, host in (("another machine", own), ("this machine", "127.0.0.1")):
            with ExitStack() as stack:
                clients = [
                    stack.enter_context(socket.create_connection((host, port), timeout=60))
                    for _ in range(options.count)
                ]
                for client in clients:
                    client.setblocking(False)
                end = time.perf_counter() + wait_s
                status = 200
                try:  # is accepted after the connections
                    request(port, "GET", "/", **{"X-Forwarded-For": UNOPENED})
                except HTTPError as error:
                    status = error.code
                held = len(still_open(clients))
                time.sleep(max(0.0, end - time.perf_counter()))
                left = len(still_open(clients))
            records.append({"client": name, "opened": options.count, "held": held, "left": left, "status": status})
    columns = {heading.format(seconds=f"{wait_s:g}"): cell for heading, cell in CONNECTION_COLUMNS.items()}
    publish(options, "open-connections", columns, records)


STUDIES = {
    "prompt": Study(_prompt, {"characters": 19_900}),
    "trace": Study(_trace, {"repeat": 3}),
    "connections": Study(_connections, {"count": 5_000}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
