"""Run of another engine as events."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from specdemo.core.errors import UserError, plain_text
from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Step
from specdemo.external.client import EngineClient
from specdemo.external.dialect import EndReason
from specdemo.external.reported import StepCounts, reported_step
from specdemo.external.schema import GenerationRequest
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
        try:
            with closing(self.client.events(self.request, model)) as received:
                for event, ended in self._texts(self.client.dialect.steps(received, self._encode)):
                    metrics, reason = event.metrics, ended or reason
                    yield event
            yield End(reason, None, metrics)
        except UserError as error:
            yield End("error", str(error), metrics)
        except ValueError as error:
            cause = plain_text(str(error))
            yield End("error", f"{self.client.address} sent an event that this program cannot read: {cause}", metrics)

    def _texts(self, steps: Generator[Step, None, EndReason]) -> Iterator[tuple[StepEvent, EndReason | None]]:
        """Yield the steps with their texts, the last one with the reason of the end."""
        stream = TextStream(self.tokenizer, self.request.prompt)
        stops = stop_texts(self.tokenizer, self.stop_texts)
        metrics = Metrics()
        for step, reason in _with_reason(steps):
            check_ids(list(step.tokens), len(self.tokenizer))
            stopped = next((n for n, token in enumerate(step.tokens, 1) if token in self.stop_tokens), None)
            most = self.request.max_tokens - metrics.tokens
            step = _cut(step, min(stopped or most, most))
            reason = reason or ("length" if len(step.tokens) == most else None)
            pieces = [stream.push(token) + stops.mark(token) for token in step.tokens]
            ended = bool(reason or stopped)
            if ended:
                pieces[-1] += stream.rest()
            pieces = stops.feed(pieces, ended)
            step = _cut(step, len(pieces))
            metrics = metrics.plus(step)
            event = StepEvent(step, tuple(pieces), tuple(pieces[: len(step.draft)]), metrics=metrics)
            if stopped or stops.reached:
                reason = "stop"
            yield event, reason
            if reason:
                return

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def _cut(step: Step, keep: int) -> Step:
    counts = StepCounts(step.accepted, step.draft.size) if step.verified else None
    return reported_step(step.i, step.t, step.tokens[:keep], counts)


def _with_reason(steps: Generator[Step, None, EndReason]) -> Iterator[tuple[Step, EndReason | None]]:
    before: Step | None = None
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            if before is not None:
                yield before, end.value
            return
        except ValueError:
            if before is not None:
                yield before, None
            raise
        if before is not None:
            yield before, None
        before = step
