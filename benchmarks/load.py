"""Load on page and services: texts, waiting times, throughput, fairness, memory, and recovery from faults.

`python -m benchmarks.load --visitors 50`, `--edges 16`, `--completions 16`: visitors press Run on a page, edges draft
by prompt lookup and verify with services, clients stream completions. Each begins its next text at once. Greedy texts
are compared with isolated AR decoding. `--batch 1 64` compares numbers of texts per pass, in alternating windows. With
`--services 3 --fault kill --every 10`, services are killed in turn and replaced. `--long-prompt` adds a client of each
kind with a prompt of N characters.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

import psutil
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from app import choose_port
from benchmarks.runs import Service, possibly_failed, traced
from benchmarks.tables import ROOT, Study, publish, study_command
from specdemo.core.errors import UserError
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

HOST = "127.0.0.1"
TIMEOUT_S = 600.0
WARM_UP_PROMPT = "def f():"
PROMPT_STEP = 5  # every fifth prompt of the set
WARM_UP_S, SAMPLE_S, REPLACE_S = 1.0, 5.0, 3.0
FAULTS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "freeze": signal.SIGSTOP}
ERRORS = (OSError, HTTPException, WebSocketException, UserError)
COLUMNS = {
    "clients": "{clients}",
    "texts per pass": "{batch}",
    "texts": "{texts:,}",
    "lost, different, failed": "{lost}, {different}, {failed}",
    "first token p50 / p95 s": "{first_p50_s:.2f} / {first_p95_s:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "Jain index": "{fairness:.2f}",
    "changes of the service": "{switches}",
    "until it continues p50 / p95 s": "{gap_p50_s:.2f} / {gap_p95_s:.2f}",
}
MEMORY_COLUMNS = {
    "process": "{process}",
    "minutes": "{minutes:.1f}",
    "MB after 1/2, at the end": "{half:.0f}, {last:.0f}",
}


def frames_of_run(url: str, session: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Start a run of a session of the page at `url` without a browser, and yield its frames.

    `url` ends with a slash; settings that are not given have their default.
    """
    body = {"id": secrets.token_hex(16), "session_hash": session, "settings": settings}
    start = Request(f"{url}runs", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(start, timeout=TIMEOUT_S) as response:
        frame = response.read().decode()
    yield frame
    first = json.loads(frame)
    if first["over"]:
        return
    address = f"{url}frames/{first['run']}?from={len(first['r'])}".replace("http", "ws", 1)
    with connect(address, open_timeout=TIMEOUT_S, max_size=None) as frames:
        yield from frames


@dataclass(frozen=True)
class Answer:
    """A text as its client received it."""

    tokens: list[int]
    first_s: float | None = None  # seconds until the first token
    problem: str = ""  # "lost" or "failed"
    gaps_s: tuple[float, ...] = ()  # seconds until another service continued


Client = Callable[[str, int], Answer]  # prompt, most tokens


def visit(frames: Iterable[str], clock: Iterator[float]) -> Answer:
    """Read the frames of a run; `clock` yields the seconds since Run was pressed."""
    tokens: list[int] = []
    first_s, count, phase, complete, over = None, 0, "", True, False
    for text in frames:
        frame, seconds = json.loads(text), next(clock)
        complete &= frame["at"] == count
        count = frame["at"] + len(frame["r"])
        phase, over = frame["phase"][0], frame["over"]
        new = [token for record in frame["r"] if "step" in record for token in record["step"]["tokens"]]
        if new and first_s is None:
            first_s = seconds
        tokens += new
    problem = "lost" if not (complete and over) else "" if phase == "done" else "failed"
    return Answer(tokens, first_s, problem)


def streamed(lines: Iterable[str], clock: Iterator[float]) -> Answer:
    """Read the lines of a streamed completion; `clock` yields the seconds since the request."""
    tokens: list[int] = []
    first_s = None
    for line in lines:
        choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
        if choices and (new := choices[0].get("token_ids")):
            first_s = next(clock) if first_s is None else first_s
            tokens += new
    return Answer(tokens, first_s, "" if tokens else "failed")


def seconds_since(start: float) -> Iterator[float]:
    while True:
        yield time.monotonic() - start


def visitor(urls: Sequence[str], number: int, pair: str, pool: ModelPool, prompt: str, most: int) -> Answer:
    settings = {"method": "nasd", "temperature": 0, "top_p": 1, "compare": False, "chat": False}
    frames = frames_of_run(urls[0], f"visitor{number}", {**settings, "prompt": prompt, "max_tokens": most})
    return visit(frames, seconds_since(time.monotonic()))


def edge(urls: Sequence[str], number: int, pair: str, pool: ModelPool, prompt: str, most: int) -> Answer:
    rotated = [*urls[number % len(urls) :], *urls[: number % len(urls)]]  # the first is used until it fails
    cloud = CloudConfig(" ".join(rotated), encoding="msgpack", deadline_ms=5000)
    recipe = Recipe(pair=pair, method="lookup", temperature=0.0, top_p=1.0, max_tokens=most, cloud=cloud)
    trace = possibly_failed(recipe, prompt, pool)
    links = [event.step.verdict.remote for event in trace.steps]
    gaps = tuple(remote["gap_s"] for remote in links if remote.get("switched"))
    first_s = trace.steps[0].step.t if trace.steps else None
    return Answer(trace.tokens, first_s, "failed" if trace.end.error else "", gaps)


def completion(urls: Sequence[str], number: int, pair: str, pool: ModelPool, prompt: str, most: int) -> Answer:
    body = {"model": "default", "prompt": prompt, "max_tokens": most}
    body |= {"temperature": 0, "stream": True, "return_token_ids": True}
    headers, start = {"content-type": "application/json"}, time.monotonic()
    request = Request(f"{urls[number % len(urls)]}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        return streamed((line.decode() for line in answer), seconds_since(start))


CLIENTS = {"visitors": visitor, "edges": edge, "completions": completion}


@contextmanager
def page_process(*options: str, **variables: str) -> Iterator[tuple[str, psutil.Process]]:
    port = choose_port(HOST, None)
    command = [sys.executable, "-u", "app.py", "--no-browser", "--host", HOST, "--port", str(port), *options]
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("specdemo is ready"):
                if not line:
                    raise UserError("the page did not start: run app.py to see its error")
            yield f"http://{HOST}:{port}/", psutil.Process(process.pid)
        finally:
            process.terminate()


@dataclass
class Servers:
    """Page and services with a number of texts per pass, their clients by kind, and the memory of their processes."""

    clients: dict[str, list[Client]] = field(default_factory=dict)
    services: list[Service] = field(default_factory=list)
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    megabytes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def sample(self) -> None:
        """Record the memory of the page and of a service that no fault has hit."""
        for name, process in self.processes.items():
            self.megabytes[name].append(process.memory_info().rss / 1e6)


def opened_servers(options: argparse.Namespace, batch: int, pool: ModelPool, opened: ExitStack) -> Servers:
    """Start page and services that the clients need, and decode a text with each of these."""
    servers, urls = Servers(), {}
    if options.visitors:
        page = page_process("--pair", options.pair, SPECDEMO_QUEUE="256", SPECDEMO_BATCH=str(batch))
        url, servers.processes["page"] = opened.enter_context(page)
        urls["visitors"] = [url]
    if options.edges or options.completions:
        for _ in range(options.services):
            flags = ("--batch", str(batch), "--method", options.method, "--queue", "256")
            servers.services.append(Service("--pair", options.pair, *flags))
            opened.callback(servers.services[-1].close)
        servers.processes["service"] = servers.services[-1].process
        urls["edges"] = urls["completions"] = [service.url for service in servers.services]
    for kind, client in CLIENTS.items():
        if count := getattr(options, kind):
            count += bool(options.long_prompt)  # the last client sends the long prompt
            servers.clients[kind] = [partial(client, urls[kind], i, options.pair, pool) for i in range(count)]
    for client in (client for clients in servers.clients.values() for client in clients):
        client(WARM_UP_PROMPT, 2)
    return servers


@dataclass(frozen=True)
class Text:
    """An answer, its client and the expected tokens."""

    kind: str
    client: int
    answer: Answer
    expected: Sequence[int]
    measured_tokens: float  # after the warm-up


def share_between(begin: float, end: float, start: float, stop: float) -> float:
    """Return the share of the time from `start` to `stop` that is between `begin` and `end`."""
    return max(0.0, min(stop, end) - max(start, begin)) / (stop - start)


Prompts = Sequence[tuple[str, list[int]]]  # prompt, expected tokens


def decode_between(
    begin: float, end: float, kind: str, number: int, client: Client, prompts: Prompts, most: int, texts: list[Text]
) -> None:
    """Decode one prompt after another until `end`; tokens before `begin` are not measured."""
    index = number
    while (start := time.monotonic()) < end:
        prompt, expected = prompts[index % len(prompts)]
        index += 7
        try:
            answer = client(prompt, most)
        except ERRORS as error:
            print(f"{kind}: {error}", file=sys.stderr)
            answer = Answer([], problem="failed")
        measured = len(answer.tokens) * share_between(begin, end, start, time.monotonic())
        texts.append(Text(kind, number, answer, expected, measured))


def load(servers: Servers, prompts: Prompts, long: Prompts, options: argparse.Namespace) -> list[Text]:
    """Run all clients for `options.seconds` after a warm-up, with faults; return their texts."""
    texts: list[Text] = []
    begin = time.monotonic() + WARM_UP_S
    end = begin + options.seconds
    threads = []
    for kind, clients in servers.clients.items():
        for number, client in enumerate(clients):
            is_long = options.long_prompt and number == len(clients) - 1
            name, own = (f"{kind}, long prompt", long) if is_long else (kind, prompts)
            arguments = (begin, end, name, number, client, own, options.max_tokens, texts)
            threads.append(threading.Thread(target=decode_between, args=arguments))
            threads[-1].start()
    faults, following = 0, time.monotonic() + options.every
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(SAMPLE_S, options.every))
        servers.sample()
        if options.fault and following <= time.monotonic() < end:
            hit = servers.services[faults % max(1, len(servers.services) - 1)]  # the last one is sampled
            print(f"{options.fault}: {hit.url}", file=sys.stderr)
            hit.process.send_signal(FAULTS[options.fault])
            time.sleep(REPLACE_S)
            hit.close()
            hit.start()
            faults, following = faults + 1, time.monotonic() + options.every
    return texts


def jain_index(shares: Sequence[float]) -> float:
    """Return the fairness index of Jain et al. (1984): 1 for equal shares, 1/n if one of n gets everything."""
    squares = len(shares) * sum(share * share for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0


def figures(texts: Sequence[Text], seconds: float) -> dict[str, float]:
    """Return the figures of the texts of a kind of clients, measured for `seconds`."""
    first = [text.answer.first_s for text in texts if text.answer.first_s is not None] or [0.0]
    gaps = [gap for text in texts for gap in text.answer.gaps_s]
    rates: dict[int, float] = defaultdict(float)
    for text in texts:
        rates[text.client] += text.measured_tokens / seconds
    problems = [text.answer.problem for text in texts]
    return {
        "texts": len(texts),
        "lost": problems.count("lost"),
        "different": sum(not text.answer.problem and text.answer.tokens != [*text.expected] for text in texts),
        "failed": problems.count("failed"),
        "first_p50_s": percentile(first, 0.5),
        "first_p95_s": percentile(first, 0.95),
        "tokens_per_second": sum(rates.values()),
        "fairness": jain_index([*rates.values()]),
        "switches": len(gaps),
        "gap_p50_s": percentile(gaps or [0.0], 0.5),
        "gap_p95_s": percentile(gaps or [0.0], 0.95),
    }


def study(options: argparse.Namespace) -> None:
    if not (options.visitors or options.edges or options.completions):
        raise UserError("no clients: give --visitors, --edges or --completions")
    if options.fault and options.services < 2:
        raise UserError("a fault needs several services: give --services 2 or more")
    pool = ModelPool()
    ar = Recipe(pair=options.pair, method="ar", temperature=0.0, top_p=1.0, max_tokens=options.max_tokens)
    chosen = [prompt.text for prompt in load_prompts()[::PROMPT_STEP]]
    repeated = "\n\n".join(chosen)
    long_text = (repeated * (1 + options.long_prompt // len(repeated)))[: options.long_prompt]
    prompts = [(text, traced(ar, text, pool).tokens) for text in chosen]
    long = [(long_text, traced(ar, long_text, pool).tokens)] if options.long_prompt else []
    pool.clear()
    texts: dict[tuple[str, int], list[Text]] = defaultdict(list)
    with ExitStack() as opened:
        by_batch = {batch: opened_servers(options, batch, pool, opened) for batch in options.batch}
        begin = time.monotonic()
        for window in range(options.windows):
            for batch in options.batch[:: -1 if window % 2 else 1]:
                for text in load(by_batch[batch], prompts, long, options):
                    texts[text.kind, batch].append(text)
    minutes = (time.monotonic() - begin) / 60
    seconds = options.windows * options.seconds
    rows = [{"clients": kind, "batch": batch} | figures(found, seconds) for (kind, batch), found in texts.items()]
    publish(options, "load", COLUMNS, rows)
    processes = [
        {
            "process": f"{name}, {batch} texts per pass",
            "minutes": minutes,
            "half": sizes[len(sizes) // 2],
            "last": sizes[-1],
        }
        for batch in options.batch
        for name, sizes in by_batch[batch].megabytes.items()
    ]
    publish(options, "load-memory", MEMORY_COLUMNS, processes)


OPTIONS = {
    "pair": "bundled",
    **{kind: {"type": int, "default": 0, "metavar": "N"} for kind in CLIENTS},
    "services": {"type": int, "default": 1, "metavar": "N"},
    "method": {"default": "nasd", "help": "method of completions (default: nasd)"},
    "batch": {"type": int, "nargs": "+", "default": [64], "help": "texts per pass (default: 64)"},
    "windows": {"type": int, "default": 1, "help": "alternating windows per value of --batch"},
    "seconds": {"type": float, "default": 60.0, "help": "duration of a window (default: 60)"},
    "max_tokens": 48,
    "long_prompt": {"type": int, "default": 0, "metavar": "N", "help": "characters of a client of each kind"},
    "fault": {"choices": FAULTS, "help": "fault of services, one after another"},
    "every": {"type": float, "default": 60.0, "help": "seconds between faults (default: 60)"},
}
main = study_command(__file__, __doc__, {}, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
