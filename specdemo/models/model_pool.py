"""Pool of loaded models, bounded by memory. Used only by the job that holds the device."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from specdemo.background import BackgroundTask
from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress
from specdemo.core.formats import format_bytes
from specdemo.models.cached_head import Head
from specdemo.models.chat_caches import ChatCaches
from specdemo.models.heads import head_files, load_head, tap_count
from specdemo.models.hub import Hub
from specdemo.models.load import LoadedModel, load
from specdemo.models.memory import TEXT_BYTES, free_bytes, is_out_of_memory, release_memory
from specdemo.models.memory_plan import ALL_DEVICES, MemoryPlan, check_memory, missing_bytes, plan_spec
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.worker import wait_for

IDLE_S = 30 * 60.0

Loaded = TypeVar("Loaded")


class ModelPool:
    """Loaded models in LRU order."""

    def __init__(
        self,
        idle_s: float = IDLE_S,
        hub: Hub | None = None,
        clock: Callable[[], float] = time.monotonic,
        warm: bool = True,
    ) -> None:
        """`warm`: run each model once after loading, which needs the device."""
        self.idle_s, self._warm = idle_s, warm
        self.hub = hub or Hub()
        self._clock = clock
        self._models: OrderedDict[ModelSpec, LoadedModel] = OrderedDict()
        self._used: dict[ModelSpec, float] = {}
        self._loading: Future[None] | None = None  # of another run
        self._heads: dict[HeadSpec, Head] = {}
        self.chats = ChatCaches(
            lambda model: any(loaded.model is model for loaded in self._models.values()),
            lambda device: free_bytes(device) // 2,
        )

    def __contains__(self, spec: ModelSpec) -> bool:
        return spec.resolved() in self._models

    @property
    def heads(self) -> tuple[HeadSpec, ...]:
        return tuple(self._heads)

    @property
    def weight_bytes(self) -> int:
        heads = sum(head.weight_bytes for head in self._heads.values())
        return heads + sum(loaded.weight_bytes for loaded in self._models.values())

    def get(self, spec: ModelSpec) -> LoadedModel:
        for _ in self.ensure_loaded([spec]):
            pass
        return self._touch(spec.resolved())

    def ensure_loaded(
        self, specs: Sequence[ModelSpec], context: int = 0, head: HeadSpec | None = None
    ) -> Generator[Loading, None, None]:
        """Load missing models, yielding progress; unload least recently used models if memory is short.

        `context`: tokens of the KV cache, with the hidden states that `head` receives. Closing the iterator cancels
        loading. Raises `UserError` if loading fails or memory is insufficient.
        """
        specs = list(dict.fromkeys(spec.resolved() for spec in specs))
        plans = []
        for spec in specs:
            if spec not in self._models:
                text = f"reading the configuration of {spec.title}"
                planning = BackgroundTask(partial(self._plan, spec, context, head), text=text)
                yield from planning.progress()
                plans.append(planning.result)
        for i, plan in enumerate(plans):
            yield from self._ensure_one_loaded(plan.spec, partial(self._free_memory, plans[i:], specs))

    def _plan(self, spec: ModelSpec, context: int, head: HeadSpec | None, report: ReportProgress) -> MemoryPlan:
        tapped = head is not None and head.resolved().target == spec
        taps = tap_count(head.name, self.hub, report) if head and tapped else 0
        return plan_spec(spec, context, self.hub, report, taps)

    def ensure_head_loaded(self, spec: HeadSpec) -> Generator[Loading, None, None]:
        """Load the head of a loaded target, yielding progress. Raises `UserError` like `ensure_loaded`."""
        spec = spec.resolved()
        if spec in self._heads:
            return
        target = self._models[spec.target]
        searching = BackgroundTask(partial(head_files, spec.name, self.hub), text=f"looking for {spec.title}")
        yield from searching.progress()
        _, size = searching.result
        if (missing := size - free_bytes(target.device)) > 0:
            self._free_chats(missing, target.device.type)
        if (free := free_bytes(target.device)) < size:
            raise UserError(
                f"{spec.title} needs {format_bytes(size)} and {format_bytes(free)} are free: choose a smaller head"
            )
        work = partial(load_head, spec, target, replace(self.hub, offline=True))
        self.add_head(spec, (yield from self._load(spec.title, work)))

    def add_head(self, spec: HeadSpec, head: Head) -> None:
        """Add the head of a resolved spec."""
        self._heads[spec] = head

    def get_head(self, spec: HeadSpec) -> Head:
        for _ in self.ensure_head_loaded(spec):
            pass
        return self._heads[spec.resolved()]

    def _ensure_one_loaded(self, spec: ModelSpec, free_memory: Callable[[], None]) -> Iterator[Loading]:
        yield from self._wait_for_loading(spec)
        if spec not in self._models:
            free_memory()
            text = f"looking for the weights of {spec.title}"
            yield from BackgroundTask(partial(self.hub.weights, spec.name, spec.revision), text=text).progress()
            yield from self._wait_for_loading(spec)
        if spec in self._models:
            return
        loading: Future[None] = Future()
        self._loading = loading
        try:
            free_memory()
            downloaded = replace(self.hub, offline=True)  # a cooperative task cannot be stopped
            self._models[spec] = yield from self._load(spec.title, partial(load, spec, downloaded, warm=self._warm))
            self._touch(spec)
        finally:
            self._loading = None
            loading.set_result(None)

    def _wait_for_loading(self, spec: ModelSpec) -> Iterator[Loading]:
        """Wait for another run, which may load the same model; plans assume the free memory."""
        while (loading := self._loading) is not None:
            yield Loading(f"waiting to load {spec.title} after another run")
            wait_for(loading)

    def add(self, loaded: LoadedModel) -> None:
        spec = loaded.spec.resolved()
        self._models[spec] = loaded
        self._touch(spec)

    def unload(self, spec: ModelSpec) -> None:
        if self._models.pop(spec.resolved(), None):
            self._used.pop(spec.resolved())
            self._heads = {head: loaded for head, loaded in self._heads.items() if head.target != spec.resolved()}
            self.chats.drop_unloaded()
            release_memory()

    def clear(self) -> None:
        self._models.clear()
        self._used.clear()
        self._heads.clear()
        self.chats.clear()
        release_memory()

    def recover(self) -> None:
        self.chats.clear()
        for loaded in self._models.values():
            loaded.release()
        release_memory()

    @property
    def seconds_to_unload(self) -> float | None:
        if not self._used or not math.isfinite(self.idle_s):
            return None
        return max(0.0, min(self._used.values()) + self.idle_s - self._clock())

    def unload_idle(self) -> int:
        idle = [spec for spec, last in self._used.items() if self._clock() - last >= self.idle_s]
        for spec in idle:
            self.unload(spec)
        return len(idle)

    def _load(self, title: str, work: Callable[[ReportProgress], Loaded]) -> Generator[Loading, None, Loaded]:
        loading = BackgroundTask(work, cooperative=True, text=f"loading {title}")
        try:
            yield from loading.progress()
            return loading.result
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        del loading, work  # outside the handler: its traceback references tensors
        release_memory()
        raise UserError(
            f"memory ran out while {title} was loaded: quantise it, choose a smaller pair, or close other programs"
        )

    def _touch(self, spec: ModelSpec) -> LoadedModel:
        self._models.move_to_end(spec)
        self._used[spec] = self._clock()
        return self._models[spec]

    def free_memory_for_text(self, devices: Iterable[torch.device]) -> None:
        """Close the oldest conversations while less memory is free than a text may take."""
        for device in devices:
            if (missing := TEXT_BYTES - free_bytes(device)) > 0:
                self._free_chats(missing, device.type)

    def _free_chats(self, count: int, kind: str = "") -> bool:
        closed = self.chats.free(count, kind)
        if closed:
            for loaded in self._models.values():
                loaded.release()
            release_memory()
        return closed

    def _free_memory(self, plans: Sequence[MemoryPlan], wanted: Sequence[ModelSpec]) -> None:
        plans = [plan for plan in plans if plan.spec not in self._models]
        while missing := missing_bytes(plans):
            kinds = {name: name.removeprefix(ALL_DEVICES).partition(":")[0] for name in missing}
            if any(self._free_chats(count - free, kinds[name]) for name, (count, free) in missing.items()):
                continue
            unused = next((spec for spec in self._models if spec not in wanted), None)
            if unused is None:
                break
            self.unload(unused)
        check_memory(plans)
