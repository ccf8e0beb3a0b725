"""Responses that contradict themselves or the tokenizer end a run with a sentence, never as exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from fakes.enumeration import DRAFTERS, PROMPT, STOP, VOCAB
from fakes.hostile_service import bundled_info, hostile_service
from fakes.remote import COUPLED, LONG, DirectClient, contexts, decode_coupled, verify_config
from fakes.tiny_models import Explorer, run
from fakes.trace_records import header

from specdemo.cli import main
from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.explain import exact_label
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.tokenizer import has_entry
from specdemo.models.zoo import PAIRS
from specdemo.remote.client import Deadlines, RemoteVerifier, StreamingVerifier
from specdemo.remote.protocol import ServiceIdentity, VerifyMetrics, VerifyResponse
from specdemo.ui.labels import guarantee
from specdemo.ui.lane import Lane

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


FIELDS: dict[str, Callable[[random.Random, int], Any]] = {
    "accepted_len": lambda rng, n: rng.randrange(n + 2),
    "correction": lambda rng, n: rng.choice([None, 1]),
    "bonus": lambda rng, n: rng.choice([None, 1]),
    "accepted": lambda rng, n: rng.choice([None, [rng.randrange(n + 1) for _ in range(rng.randrange(n + 2))]]),
    "tested": lambda rng, n: rng.choice([None, [rng.randrange(n + 1) for _ in range(rng.randrange(n + 2))]]),
    "p": lambda rng, n: [rng.random() for _ in range(n + rng.randrange(-1, 2))],
    "draws": lambda rng, n: rng.choice([None, [rng.random() for _ in range(rng.randrange(n + 2))]]),
    "choices": lambda rng, n: [[rng.randrange(VOCAB)] * rng.randrange(3) for _ in range(n + rng.randrange(3))],
    "bounds": lambda rng, n: rng.choice([None, [rng.choice([None, 0.5])] * rng.randrange(n + 2)]),
    "ranks": lambda rng, n: rng.choice([None, [1] * rng.randrange(n + 2)]),
    "metrics": lambda rng, n: VerifyMetrics.model_construct(cloud_s=rng.choice([-1.0, 0.0, 1e300])),
}


@pytest.mark.parametrize("drafter", ["model", "siblings", "guesses"])
def test_arbitrary_responses_give_steps_or_sentences(drafter: str) -> None:
    """Metrics can be computed of accepted responses."""
    accepted = refused = 0
    for seed in range(150):
        rng = random.Random(seed)

        def change(response: VerifyResponse, rng: random.Random = rng) -> dict[str, Any]:
            names = rng.sample(list(FIELDS), rng.randrange(1, 4))
            return {name: FIELDS[name](rng, len(response.p)) for name in names}

        try:
            verifier = RemoteVerifier(Changed(change), verify_config(SamplingParams(), seed=1), top=2, vocab_size=VOCAB)
            explorer = Explorer()
            explorer.choose = lambda chances, rng=rng: rng.choices(range(len(chances)), chances)[0]
            steps = run(PROMPT, verifier, DRAFTERS[drafter](SamplingParams(), explorer), Fixed(2), 6, STOP)
        except UserError:
            refused += 1
            continue
        accepted += 1
        Metrics.of(steps).as_dict()
    assert accepted > 5 and refused > 50


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


def test_ids_of_the_tokenizer_have_entries() -> None:
    tokenizer = read_tokenizer(ModelSpec(PAIRS["bundled"].target, device="cpu"))
    assert all(has_entry(tokenizer, token) for token in (0, 5, len(tokenizer) - 1))
    assert not has_entry(tokenizer, len(tokenizer))


def test_labels_name_the_service() -> None:
    cloud = {"remote": "http://cloud:8300", "mode": "speculative"}
    assert exact_label({"method": "ar"}, {}) == exact_label({"cloud": None}, {}) == "exact"
    assert exact_label({"cloud": {**cloud, "mode": "edge_only"}}, {}) == "exact"
    lane = Lane()
    line = header()
    line["recipe"] |= {"cloud": cloud}
    lane.add(trace.from_json({**line, "bit_equal": True}, Metrics()))
    badge, why = guarantee(lane)
    assert badge == "exact, verified by the service at http://cloud:8300" and "claim of the service" in why
