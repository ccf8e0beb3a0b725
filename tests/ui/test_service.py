"""Models in the page's service: unloading on request and after idle time."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.form_fields import form_fields, form_markup

from specdemo.core.errors import UserError
from specdemo.core.events import End, Event
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS
from specdemo.plan import plan_run
from specdemo.recipe import Recipe
from specdemo.ui.lane import PLAIN, SPEC, lanes_of
from specdemo.ui.limits import PUBLIC, HostLimits, read_limits
from specdemo.ui.page import build
from specdemo.ui.service import PROBE, WARM_UP_TOKENS, Service

pytestmark = pytest.mark.slow


class Watched(ModelPool):
    """Model pool that signals each tidy-up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tidied, self.gone = threading.Event(), 0

    def unload_idle(self) -> int:
        self.gone = super().unload_idle()
        self.tidied.set()
        return self.gone


def engine(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
    pool.get(plan_run(recipe).target)
    yield End("stop")


def test_a_comparison_begins_with_a_warm_up_and_the_speculative_lane() -> None:
    decoded: list[tuple[str, str, int]] = []

    def recorded(recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        decoded.append((prompt, recipe.method, recipe.max_tokens))
        yield End("stop")

    service = Service(ModelPool(), recorded)
    try:
        lanes = lanes_of(Recipe(max_tokens=50), compare=True)
        stream = service.start([*lanes.items()], "text", warm_up=True)
        assert stream.wait(60)
        ends = [lane for lane, event in stream.items if isinstance(event, End)]
    finally:
        service.worker.close()
    assert ends == [SPEC, PLAIN]
    assert decoded[:2] == [(PROBE, method, WARM_UP_TOKENS) for method in ("draft", "ar")]
    assert decoded[2:] == [("text", method, 50) for method in ("draft", "ar")]


def test_visitors_can_neither_unload_shared_models_nor_choose_services() -> None:
    for limits, offered in (
        (read_limits({"SPECDEMO_PUBLIC": "1", "SPECDEMO_QUEUE": "4"}), False),
        (HostLimits(), True),
    ):
        page = build(limits=limits, examples=None)
        page.worker.close()
        assert ('id="unload"' in form_markup(page.blocks)) == offered
        fields = form_fields(page.blocks).keys()
        assert "quantization" in fields and ({"mode", "remote", "rtt_ms"} <= fields) == offered
    pool = ModelPool()
    service = Service(pool, engine, PUBLIC)
    try:
        pool.get(ModelSpec(PAIRS["bundled"].drafter, device="cpu"))
        with pytest.raises(UserError, match="all visitors share the models"):
            asyncio.run(service.unload())
        assert pool.weight_bytes
    finally:
        service.worker.close()


def test_idle_models_are_unloaded_automatically() -> None:
    pool = Watched(idle_s=0.05)
    service = Service(pool, engine)
    try:
        recipe = Recipe(target=PAIRS["bundled"].drafter, method="ar", device="cpu")
        stream = service.start([("spec", recipe)], "def")
        assert stream.wait(60) and stream.error is None
        assert pool.tidied.wait(60) and pool.gone == 1
    finally:
        service.worker.close()
