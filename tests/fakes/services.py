"""Services in threads and processes, with the completions of a pair, and arbitrary requests to them."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from hypothesis import strategies as st

from fakes.forked_process import ForkedProcess, terminal
from specdemo.completions.routes import add_completions
from specdemo.completions.service import CompletionService
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.remote import server
from specdemo.remote.access import bind
from specdemo.remote.admission import ServiceOptions


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


def completion_app(recipe: Recipe, template: str = "", **options: Any) -> tuple[FastAPI, CompletionService]:
    """Return the application and the completions; `template` is the chat template of the target."""
    pool = ModelPool()
    target = pool.get(plan_run(recipe).target)
    if template:
        target.tokenizer.chat_template = template
    app = server.serve_model(target, ServiceOptions(local=True, **options))
    completions = CompletionService(pool, recipe, seed=lambda: 5)
    add_completions(app, completions)
    return app, completions


@contextmanager
def running_service(recipe: Recipe, template: str = "", **options: Any) -> Iterator[tuple[str, CompletionService]]:
    app, completions = completion_app(recipe, template, **options)
    with listening(app) as address:
        yield "http://{}:{}".format(*address), completions


COMMAND = ("serve", "--pair", "bundled", "--device", "cpu")


class ServiceProcess:
    """The service of the bundled pair in a process of its own, with a fixed address."""

    def __init__(self, *options: str, **environment: str) -> None:
        self._options, self._environment, self.port = options, environment, 0
        self.start()

    def start(self) -> None:
        """Start the process, again at the same port."""
        flags = ("--port", str(self.port), *self._options)
        self.process = ForkedProcess(terminal, *COMMAND, *flags, **self._environment)
        self.url = self.process.stdout.readline().removeprefix("listening on ").strip()
        self.port = urlsplit(self.url).port or 0

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        code = self.process.wait()
        self.process.close()
        return code

    def restart(self) -> None:
        self.end()
        self.start()

    def close(self) -> None:
        self.process.close()


completions = st.fixed_dictionaries(
    {"model": st.sampled_from(("default", "other"))},
    optional={
        "prompt": st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(("system", "user", "tool")), "content": st.text(max_size=9)}
            ),
            max_size=3,
        ),
        "max_tokens": st.integers(-1, 3),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 5),
        "seed": st.integers(),
        "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "logprobs": st.booleans() | st.integers(0, 20),
        "top_logprobs": st.integers(0, 20),
        "prediction": st.just({"type": "content", "content": "x"}),
        "speculation": st.booleans(),
        "return_token_ids": st.booleans(),
        "n": st.sampled_from((1, 2)),
    },
)
