"""Edge and cloud in one process, through the real encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.tiny_models import Explorer, committed, run
from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import match
from specdemo.core.sampling import SamplingParams, SharedNoise
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.remote.client import RemoteVerifier
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext
from specdemo.remote.link import MeteredNetwork
from specdemo.remote.protocol import ENCODINGS, VerifyConfig, VerifyRequest, WireMessage
from specdemo.remote.transport import ContextGone, RequestSuperseded


class Table:
    """A cache that needs none."""

    kv_bytes = reserved_bytes = 100

    def __init__(self) -> None:
        self.score = TARGET.score


def contexts(**options: Any) -> Contexts:
    return Contexts(Table, vocab_size=VOCAB, context=64, **options)


class Direct:
    """`Http` without a network: messages become bytes and are read again, then the cloud answers at once."""

    url = "direct"

    def __init__(self, cloud: Contexts, kind: str = "application/msgpack") -> None:
        self.cloud, self.wire, self.encoding = cloud, MeteredNetwork(), ENCODINGS[kind]
        self.sent: list[VerifyRequest] = []
        self.answered: list[WireMessage] = []

    def call(
        self, method: str, path: str, message: WireMessage | None, answer: type[WireMessage], timeout: float
    ) -> Any:
        if message is None:
            return answer(forgotten=self.cloud.forget(path.rpartition("/")[2]))
        body = self.encoding.dump(message)
        self.wire.tally.up += len(body)
        self.sent.append(self.encoding.load(VerifyRequest, body))
        try:
            body = self.encoding.dump(self.cloud.answer(self.sent[-1]))
        except UnknownContext as error:
            raise ContextGone(str(error)) from error
        except StaleRequest as error:
            raise RequestSuperseded(str(error)) from error
        self.wire.tally.down += len(body)
        self.answered.append(self.encoding.load(answer, body))
        return self.answered[-1]

    def close(self) -> None: ...


class Once:
    """A source that explores, and says the same again when it is asked the same again: as noise keyed by place does."""

    def __init__(self, explorer: Explorer, place: int, said: dict[Any, Any]) -> None:
        self.explorer, self.place, self.said, self.asked = explorer, place, said, 0

    def _once(self, what: Callable[[], Any]) -> Any:
        key = (self.place, self.asked)
        self.asked += 1
        if key not in self.said:
            self.said[key] = what()
        return self.said[key]

    def test(self, probability: float) -> tuple[bool, float]:
        return self._once(lambda: self.explorer.test(probability))

    def sample(self, probs: torch.Tensor, position: int = 0) -> int:
        return self._once(lambda: self.explorer.sample(probs))


def settings(sampling: SamplingParams, rule: str = "rejection", seed: int = 0, adjust: bool = True) -> VerifyConfig:
    return VerifyConfig(
        temp=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        rep_penalty=sampling.repetition_penalty,
        bad_words=[list(word) for word in sampling.bad_words],
        seed=seed,
        rule=rule,
        adjust=adjust,
    )


COUPLED = settings(SamplingParams(), "coupled", seed=7)
LONG = 40


def texts(http: Direct, seed: int = 7, max_tokens: int = LONG, **options: Any) -> Any:
    """The steps of a coupled text at temperature 1 with the other model's drafts."""
    drafter = ModelDrafter(SMALL.score, SamplingParams(), SharedNoise(seed), VOCAB)
    chosen = settings(SamplingParams(), "coupled", seed)
    verifier = RemoteVerifier(http, chosen, pause=lambda seconds: None, **options)
    return run(PROMPT, verifier, drafter, Fixed(3), max_tokens)


def plain(seed: int = 7, max_tokens: int = LONG) -> list[int]:
    """What plain local decoding writes with the same noise."""
    return committed(
        run(
            PROMPT,
            ModelVerifier(TARGET.score, SamplingParams(), match, SharedNoise(seed), SharedNoise(seed)),
            EmptyDrafter(),
            Fixed(1),
            max_tokens,
        )
    )
