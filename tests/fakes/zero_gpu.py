"""Fakes for `spaces.GPU`: a no-op, like the real decorator outside ZeroGPU, and a forking one, like the real one there.

The forking fake pickles arguments and items, reports errors of the child by class name only, checks the stop flag
after each item, and raises if the process died (source of `spaces` 0.51).
"""

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any


class LenderError(Exception):
    """Error with its text in `message`, like gradio's errors."""

    def __init__(self, message: str) -> None:
        super().__init__(repr(message))
        self.message = message


def untouched(task: Callable | None = None, *, duration: Any = None) -> Callable:
    return task if task is not None else lambda function: function


class Forking:
    """Decorator with a log: requested durations, processes and their exit codes."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.processes: list[Any] = []

    def __call__(self, *, duration: Callable[..., float]) -> Callable:
        context = multiprocessing.get_context("fork")

        def decorate(task: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
            def child(arguments: bytes, outgoing: Any, stop: Any) -> None:
                last = ("end", None)
                try:
                    with closing(task(*pickle.loads(arguments))) as steps:
                        for item in steps:
                            if stop.is_set():
                                break
                            outgoing.send(("item", item))
                except Exception as error:
                    last = ("error", type(error).__name__)
                outgoing.send(last)

            def call(*arguments: Any) -> Iterator[Any]:
                self.durations.append(duration(*arguments))
                incoming, outgoing = context.Pipe(duplex=False)
                stop = context.Event()
                process = context.Process(target=child, args=(pickle.dumps(arguments), outgoing, stop), daemon=True)
                process.start()
                outgoing.close()
                self.processes.append(process)
                kind = "item"
                try:
                    while True:
                        try:
                            kind, value = incoming.recv()
                        except EOFError:
                            kind, value = "error", "GPU task aborted"
                        if kind == "error":
                            raise LenderError(value)
                        if kind == "end":
                            return
                        yield value
                finally:
                    stop.set()
                    while kind == "item":  # it may be in the middle of sending
                        kind = incoming.recv()[0] if incoming.poll(30) else "end"
                    process.join(60)

            return call

        return decorate
