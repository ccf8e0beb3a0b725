"""Run of another engine as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from specdemo.core.errors import UserError, plain_text
from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Step
from specdemo.external.client import EngineClient
from specdemo.external.dialects import EndReason, GenerationRequest
from specdemo.external.reported import StepCounts, reported_step
from specdemo.models.tokenizer import TextStream, check_ids, stop_texts


@dataclass(frozen=True)
class ExternalRun:
    """A request to a server, and the tokenizer of the served target."""

    client: EngineClient
    request: GenerationRequest
    tokenizer: Any
    stop_texts: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def events(self, recipe: Mapping[str, Any], prompt: str, environment: Mapping[str, Any]) -> Iterator[Event]:
        """Yield header, steps and end. Raises `UserError` before the header."""
        model = self.client.model()
        self.client.check_tokenizer(model, self._encode)
        yield Header(
            recipe=recipe,
            prompt=prompt,
            prompt_tokens=tuple(self.request.prompt),
            vocab_size=len(self.tokenizer),
            exact=False,
            environment={
                **environment,
                "engine": f"{self.client.address.engine} server: {plain_text(PurePath(model).name)}",
            },
        )
        metrics, reason = Metrics(), "stop"
        received = self.client.events(self.request, model)
        try:
            for event, ended in self._texts(self.client.dialect.steps(received, self._encode)):
                metrics, reason = event.metrics, ended or reason
                yield event
            yield End(reason, None, metrics)
        except UserError as error:
            yield End("error", str(error), metrics)
        except ValueError as error:
            cause = plain_text(str(error))
            yield End("error", f"{self.client.address} sent an event that this program cannot read: {cause}", metrics)

    def _texts(self, steps: Iterator[Step | EndReason]) -> Iterator[tuple[StepEvent, EndReason | None]]:
        """Yield the steps with their texts, the last one with the reason of the end."""
        stream = TextStream(self.tokenizer, self.request.prompt)
        stops = stop_texts(self.tokenizer, self.stop_texts)
        metrics = Metrics()
        for step, following in pairwise(steps):
            assert isinstance(step, Step)  # the reason is the last item
            reason = None if isinstance(following, Step) else following
            check_ids(list(step.tokens), len(self.tokenizer))
            tokens = step.tokens[: self.request.max_tokens - metrics.tokens]
            if metrics.tokens + len(tokens) == self.request.max_tokens:
                reason = reason or "length"
            if stopped := next((n for n, token in enumerate(tokens, 1) if token in self.stop_tokens), None):
                tokens, reason = tokens[:stopped], "stop"
            pieces = [stream.push(token) + stops.mark(token) for token in tokens]
            if reason:
                pieces[-1] += stream.flush()
            pieces = stops.feed(pieces, bool(reason))
            if stops.reached:
                reason = "stop"
            counts = StepCounts(step.accepted, step.draft.size) if step.verified else None
            step = reported_step(step.i, step.t, tokens[: len(pieces)], counts)
            metrics = metrics.plus(step)
            yield StepEvent(step, tuple(pieces), tuple(pieces[: len(step.draft)]), metrics=metrics), reason
            if reason:
                return

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
