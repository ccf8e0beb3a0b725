"""The models that are loaded, each once whoever uses it, as many as memory holds.

Used by one thread only, the one that owns the device.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from specdemo.core.errors import UserError
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.hub import Hub
from specdemo.models.load import LoadedModel, load
from specdemo.models.load_errors import format_bytes
from specdemo.models.memory import is_out_of_memory, release_memory, share_one_heap
from specdemo.models.memory_plan import MemoryPlan, check_memory, missing_bytes, plan_spec, smaller
from specdemo.models.spec import ModelSpec
from specdemo.worker import BackgroundTask, TaskProgress

IDLE_S = 30 * 60.0  # after which a model that nobody uses may go


class ModelPool:
    """Loaded models by what they were loaded from. `budget`: bytes that their weights may take together, at most."""

    def __init__(
        self,
        budget: int | None = None,
        idle_s: float = IDLE_S,
        hub: Hub | None = None,
        clock: Callable[[], float] = time.monotonic,
        warm: bool = True,
    ) -> None:
        """Not `warm`: models are not run when they are loaded, for their device is not there yet."""
        share_one_heap()
        self.idle_s, self._warm = idle_s, warm
        self._budget, self._hub, self._clock = budget, hub or Hub(), clock
        self._models: OrderedDict[ModelSpec, LoadedModel] = OrderedDict()  # the one longest unused first
        self._used: dict[ModelSpec, float] = {}

    def __contains__(self, spec: ModelSpec) -> bool:
        return spec.resolved() in self._models

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        return sum(loaded.weight_bytes for loaded in self._models.values())

    def take(self, spec: ModelSpec) -> LoadedModel:
        """The model, loaded if it is not there. Raises `UserError` where it cannot be."""
        for _ in self.bring([spec]):
            pass
        return self._touch(spec.resolved())

    def bring(self, specs: Sequence[ModelSpec], context: int = 0) -> Iterator[TaskProgress]:
        """Load those that are not there, with news of it; of the others, those longest unused make room.

        `context`: tokens that keys and values must have room for. May be closed, which gives the loading up. Raises
        `UserError` where one cannot be loaded, or where memory does not suffice for all.
        """
        specs = list(dict.fromkeys(spec.resolved() for spec in specs))
        plans = []
        for spec in specs:
            if spec not in self._models:
                planning = BackgroundTask(partial(plan_spec, spec, context, self._hub))
                yield from planning.progress()
                plans.append(planning.result)
        for i, one in enumerate(plans):
            spec = one.spec
            self._make_room(plans[i:], specs)  # before anything large comes over the network
            fetching = BackgroundTask(partial(self._hub.weights, spec.name, spec.revision))
            yield from fetching.progress()
            if spec in self._models:  # somebody else brought it meanwhile
                continue
            self._make_room(plans[i:], specs)
            self._models[spec] = yield from self._load(spec)
            self._touch(spec)

    def drop(self, spec: ModelSpec) -> None:
        """Unload one, if it is there; it goes for good when its last user has ended."""
        if self._models.pop(spec.resolved(), None):
            self._used.pop(spec.resolved())
            release_memory()

    def clear(self) -> None:
        """Unload everything."""
        self._models.clear()
        self._used.clear()
        release_memory()

    def recover(self) -> None:
        """After memory ran out: let go of the buffers that loaded models keep for their next request."""
        for loaded in self._models.values():
            if isinstance(loaded.model, LlamaWeights):
                loaded.model.idle.clear()
        release_memory()

    @property
    def due_s(self) -> float | None:
        """Seconds until a model has been unused for `idle_s`, if nobody uses it; None where none will go."""
        if not self._used or not math.isfinite(self.idle_s):
            return None
        return max(0.0, min(self._used.values()) + self.idle_s - self._clock())

    def tidy(self) -> int:
        """Unload what nobody has used for `idle_s` seconds; how many went."""
        idle = [spec for spec, last in self._used.items() if self._clock() - last >= self.idle_s]
        for spec in idle:
            self.drop(spec)
        return len(idle)

    def _load(self, spec: ModelSpec) -> Generator[TaskProgress, None, LoadedModel]:
        loading = BackgroundTask(partial(load, spec, self._hub, warm=self._warm), parked=True)
        try:
            yield from loading.progress()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            out = True
        else:
            out = False
        if out:  # not in the handler, where the traceback still holds what was loaded
            del loading
            release_memory()
            raise UserError(
                f"memory ran out while {spec.title} was loaded: quantise it, choose a smaller pair, or end what else "
                "takes memory"
            )
        return loading.result

    def _touch(self, spec: ModelSpec) -> LoadedModel:
        self._models.move_to_end(spec)
        self._used[spec] = self._clock()
        return self._models[spec]

    def _make_room(self, plans: Sequence[MemoryPlan], wanted: Sequence[ModelSpec]) -> None:
        """Unload the longest unused of the others until `plans` fit; `UserError` with numbers if they never do."""
        plans = [one for one in plans if one.spec not in self._models]
        weights = sum(one.weights for one in plans)
        while missing_bytes(plans) or (self._budget is not None and self.weight_bytes + weights > self._budget):
            other = next((spec for spec in self._models if spec not in wanted), None)
            if other is None:
                break
            self.drop(other)
        if missing_bytes(plans):
            heavy = max(plans, key=lambda one: one.total)
            check_memory(plans, [plan_spec(spec, heavy.context, self._hub) for spec in smaller(heavy.spec)])
        if self._budget is not None and self.weight_bytes + weights > self._budget:
            raise UserError(
                f"{' and '.join(one.spec.title for one in plans)} need {format_bytes(weights)} for weights and models may take "
                f"{format_bytes(self._budget)} here: choose a smaller pair"
            )
