"""The models that are loaded, each once whoever uses it, as many as memory holds.

Used by one thread only, the one that owns the device.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from specdemo.core.errors import Refused
from specdemo.models.engines.llama_weights import Lean
from specdemo.models.hub import Hub
from specdemo.models.load import Loaded, load
from specdemo.models.load_errors import size
from specdemo.models.memory import give_back, ran_out, share_one_heap
from specdemo.models.memory_plan import Plan, lacking, plan, refuse_lacking, smaller
from specdemo.models.spec import Spec
from specdemo.worker import Errand, News

IDLE_S = 30 * 60.0  # after which a model that nobody uses may go


class Shelf:
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
        self._models: OrderedDict[Spec, Loaded] = OrderedDict()  # the one longest unused first
        self._used: dict[Spec, float] = {}

    def __contains__(self, spec: Spec) -> bool:
        return spec.resolved() in self._models

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        return sum(loaded.weight_bytes for loaded in self._models.values())

    def take(self, spec: Spec) -> Loaded:
        """The model, loaded if it is not there. Raises `Refused` where it cannot be."""
        for _ in self.bring([spec]):
            pass
        return self._touch(spec.resolved())

    def bring(self, specs: Sequence[Spec], context: int = 0) -> Iterator[News]:
        """Load those that are not there, with news of it; of the others, those longest unused make room.

        `context`: tokens that keys and values must have room for. May be closed, which gives the loading up. Raises
        `Refused` where one cannot be loaded, or where memory does not suffice for all.
        """
        specs = list(dict.fromkeys(spec.resolved() for spec in specs))
        plans = []
        for spec in specs:
            if spec not in self._models:
                planning = Errand(partial(plan, spec, context, self._hub))
                yield from planning.progress()
                plans.append(planning.result)
        for i, one in enumerate(plans):
            spec = one.spec
            self._make_room(plans[i:], specs)  # before anything large comes over the network
            fetching = Errand(partial(self._hub.weights, spec.name, spec.revision))
            yield from fetching.progress()
            if spec in self._models:  # somebody else brought it meanwhile
                continue
            self._make_room(plans[i:], specs)
            self._models[spec] = yield from self._load(spec)
            self._touch(spec)

    def drop(self, spec: Spec) -> None:
        """Unload one, if it is there; it goes for good when its last user has ended."""
        if self._models.pop(spec.resolved(), None):
            self._used.pop(spec.resolved())
            give_back()

    def clear(self) -> None:
        """Unload everything."""
        self._models.clear()
        self._used.clear()
        give_back()

    def recover(self) -> None:
        """After memory ran out: let go of the buffers that loaded models keep for their next request."""
        for loaded in self._models.values():
            if isinstance(loaded.model, Lean):
                loaded.model.idle.clear()
        give_back()

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

    def _load(self, spec: Spec) -> Generator[News, None, Loaded]:
        loading = Errand(partial(load, spec, self._hub, warm=self._warm), parked=True)
        try:
            yield from loading.progress()
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            out = True
        else:
            out = False
        if out:  # not in the handler, where the traceback still holds what was loaded
            del loading
            give_back()
            raise Refused(
                f"memory ran out while {spec.title} was loaded: quantise it, choose a smaller pair, or end what else "
                "takes memory"
            )
        return loading.result

    def _touch(self, spec: Spec) -> Loaded:
        self._models.move_to_end(spec)
        self._used[spec] = self._clock()
        return self._models[spec]

    def _make_room(self, plans: Sequence[Plan], wanted: Sequence[Spec]) -> None:
        """Unload the longest unused of the others until `plans` fit; `Refused` with numbers if they never do."""
        plans = [one for one in plans if one.spec not in self._models]
        weights = sum(one.weights for one in plans)
        while lacking(plans) or (self._budget is not None and self.weight_bytes + weights > self._budget):
            other = next((spec for spec in self._models if spec not in wanted), None)
            if other is None:
                break
            self.drop(other)
        if lacking(plans):
            heavy = max(plans, key=lambda one: one.total)
            refuse_lacking(plans, [plan(spec, heavy.context, self._hub) for spec in smaller(heavy.spec)])
        if self._budget is not None and self.weight_bytes + weights > self._budget:
            raise Refused(
                f"{' and '.join(one.spec.title for one in plans)} need {size(weights)} for weights and models may take "
                f"{size(self._budget)} here: choose a smaller pair"
            )
