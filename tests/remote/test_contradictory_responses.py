"""Responses that contradict themselves or the tokenizer end a run with a sentence, never as exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from fakes.enumeration import DRAFTERS, PROMPT, VOCAB
from fakes.hostile_service import bundled_info, hostile_service
from fakes.remote import COUPLED, LONG, DirectClient, contexts, decode_coupled, verify_config
from fakes.tiny_models import Explorer, run

from specdemo.cli import main
from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.remote.client import Deadlines, RemoteVerifier, StreamingVerifier
from specdemo.remote.protocol import ServiceIdentity, VerifyResponse

pytestmark = pytest.mark.slow


class Changed(DirectClient):
    """Service whose responses to drafts are changed."""

    def __init__(self, change: Callable[[VerifyResponse], dict[str, Any]]) -> None:
        super().__init__(contexts())
        self.change = change

    def call(self, method: str, path: str, message: Any, response_type: Any, timeout: float) -> Any:
        response = super().call(method, path, message, response_type, timeout)
        if not isinstance(response, VerifyResponse) or not message.draft_tokens or response.wanted:
            return response
        changed = response.model_copy(update=self.change(response))
        return self.codec.load(response_type, self.codec.dump(changed))


def all_accepted(response: VerifyResponse) -> dict[str, Any]:
    """Accept the complete draft, with the draws of the tested nodes."""
    return {"accepted_len": len(response.p), "correction": None, "bonus": 1, "draws": [0.5] * (len(response.p) - 1)}


@pytest.mark.parametrize(
    "change",
    [
        all_accepted,
        lambda response: {"draws": [], "accepted_len": 0, "correction": 1, "bonus": None},
        lambda response: {"correction": 1, "bonus": 2},
        lambda response: {"correction": response.bonus, "bonus": response.correction},
        lambda response: {"correction": None, "bonus": None},
        lambda response: {"accepted": [0, 0], "tested": [0], "accepted_len": 2},
        lambda response: {"accepted": [], "accepted_len": 1, "tested": []},
        lambda response: {"accepted": [0], "accepted_len": 1, "tested": [0, 0]},
    ],
)
def test_contradictions_get_a_sentence(change: Callable[[VerifyResponse], dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="does not fit the draft"):
        decode_coupled(Changed(change))


@pytest.mark.parametrize("rule", RULES)
def test_responses_of_the_service_are_consistent(rule: str) -> None:
    verifier = RemoteVerifier(DirectClient(contexts()), verify_config(SamplingParams(), rule, 3), top=2)
    explorer, rng = Explorer(), random.Random(5)
    explorer.choose = lambda chances: rng.choices(range(len(chances)), chances)[0]
    steps = run(PROMPT, verifier, DRAFTERS["model"](SamplingParams(), explorer), Fixed(3), LONG)
    assert sum(len(step.verdict.accepted) for step in steps) > 0


# --- ids without an entry of the tokenizer -------------------------------------------------------------------------


def verdict(request: dict[str, Any], token: int) -> dict[str, Any]:
    n = len(request.get("draft_tokens", ()))
    fields = {"epoch": request.get("epoch", 0), "round": request["round"], "accepted_len": 0, "p": [0.5] * n}
    return {**fields, "correction" if n else "bonus": token, "choices": [[token]] * (n + 1)}


@pytest.mark.parametrize("padded", [False, True])
def test_a_committed_id_without_an_entry_ends_the_run(padded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The vocabulary of a service may be padded, but no text contains the padding."""
    size = bundled_info()["vocab_size"]
    token = 2 * size - 1 if padded else 5
    with hostile_service(lambda request: (200, verdict(request, token)), vocab_size=2 * size) as url:
        command = ["run", "def f():", "--pair", "bundled", "--remote", url, "--max-tokens", "3", "--method", "nasd"]
        code = main(command)
    out, err = capsys.readouterr()
    if padded:
        assert code == 1 and f"committed token {token:,}" in err and "exact" not in out + err
    else:
        assert code == 0 and f"exact, verified by the service at {url}" in out


def test_streams_and_accepted_drafts_are_checked() -> None:
    class Stream:
        url, network, identity = "stream", DirectClient(contexts()).network, ServiceIdentity()

        def tokens(self, *_: Any) -> Any:
            yield from (1, 3)

        def close(self) -> None: ...

    verifier = StreamingVerifier(Stream(), COUPLED, 4, Deadlines(), VOCAB, lambda token: token != 3)
    assert verifier.verify([1], Draft()).token == 1
    with pytest.raises(UserError, match="committed token 3"):
        verifier.verify([1, 1], Draft())

    def accepting(response: VerifyResponse) -> dict[str, Any]:
        return {"accepted_len": 1, "correction": None, "bonus": 1, "draws": None}

    known = RemoteVerifier(Changed(accepting), COUPLED, has_entry=lambda token: token != 2)
    first = known.verify([1], Draft()).token
    with pytest.raises(UserError, match="committed token 2"):
        known.verify([1, first], Draft.chain((2,)))
