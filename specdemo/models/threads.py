"""Control of thread numbers: all for passes, a single thread for sampling, which is faster than waking others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number for operations of this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_initializer() -> Callable[[], None]:
    """Return a function that sets the current number of threads in a new thread."""
    return partial(torch.set_num_threads, torch.get_num_threads())
