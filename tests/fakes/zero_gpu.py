"""Fakes for `spaces.GPU`: a no-op, like the real decorator outside ZeroGPU, and a forking one, like the real one there.

The forking fake pickles arguments and items, reports errors of the child by class name only, checks the stop flag
after each item, and raises if the process died (source of `spaces` 0.51).
"""

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
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
            def child(asked: bytes, door: Any, stop: Any) -> None:
                steps = task(*pickle.loads(asked))
                while True:
                    try:
                        item = next(steps)
                    except StopIteration:
                        break
                    except Exception as error:
                        door.send(("error", pickle.dumps(type(error).__name__)))
                        return
                    if stop.is_set():
                        steps.close()
                        break
                    door.send(("item", pickle.dumps(item)))
                door.send(("end", b""))

            def call(*arguments: Any) -> Iterator[Any]:
                self.durations.append(duration(*arguments))
                ours, theirs = context.Pipe(duplex=False)
                stop = context.Event()
                process = context.Process(target=child, args=(pickle.dumps(arguments), theirs, stop), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                kind = "item"
                try:
                    while True:
                        try:
                            kind, data = ours.recv()
                        except EOFError:
                            kind = "end"
                            raise LenderError("GPU task aborted") from None
                        if kind == "error":
                            raise LenderError(pickle.loads(data))
                        if kind == "end":
                            return
                        yield pickle.loads(data)
                finally:
                    stop.set()
                    while kind == "item":  # it may be in the middle of sending
                        kind = ours.recv()[0] if ours.poll(30) else "end"
                    process.join(60)

            return call

        return decorate
