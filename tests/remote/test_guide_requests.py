"""Requests with the practice guide's fields only (section 5.1), as its loop (section 6.1) sends them."""

from typing import Any

from fakes.enumeration import PROMPT, ROUNDING, TARGET, VOCAB, distance, true_distribution
from fakes.remote import INFO, RepeatableNoise, contexts, response_of
from fakes.tiny_models import Explorer
from starlette.testclient import TestClient

from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.remote.protocol import VerifyConfig, VerifyRequest
from specdemo.remote.server import create_app
from specdemo.worker import Worker

FIELDS = {"ctx_id", "draft_tokens", "q_token_probs", "hard_mask", "k", "sampling_cfg"}
GREEDY = {"temp": 0.0, "top_p": 0.9, "rep_penalty": 1.1}
SAMPLED = {"temp": 1.0}
TEXT = list(PROMPT)


def service(**options: Any) -> TestClient:
    return TestClient(create_app(INFO, contexts(**options), Worker()))


def message(drafted: list[int], q: list[float] | None = None, config: Any = GREEDY, **more: Any) -> dict[str, Any]:
    """Return a message of the guide; `more`: `tokens` of the first message."""
    return {
        "ctx_id": "guide",
        "draft_tokens": drafted,
        "q_token_probs": q or [1.0] * len(drafted),
        "hard_mask": [0] * len(drafted),
        "k": len(drafted),
        "sampling_cfg": config,
        **more,
    }


def post(cloud: TestClient, body: dict[str, Any], key: str | None = None) -> Any:
    return cloud.post("/v1/rounds", json=body, headers={} if key is None else {"Idempotency-Key": key})


def greedy_text(length: int) -> list[int]:
    text, sampling = list(TEXT), SamplingParams(temperature=0, repetition_penalty=1.1)
    for _ in range(length):
        text.append(int(sampling(TARGET.score(text, Draft()), [text]).argmax()))
    return text[len(TEXT) :]


def test_the_guide_s_loop_writes_the_greedy_text() -> None:
    """Every second draft is right."""
    cloud, text, accepted, step = service(), [], 0, 0
    expected = greedy_text(14)
    while len(text) < 12:
        draft = [(step + i) % VOCAB for i in range(2)] if step % 2 else expected[len(text) :][:2]
        sent = message(draft, **({} if step else {"tokens": TEXT}))
        assert sent.keys() == (FIELDS if step else FIELDS | {"tokens"})
        answer = post(cloud, sent).json()
        assert "bonus" not in answer and 0 <= answer["metrics"]["la_over_k"] <= 1
        text += draft[: answer["accepted_len"]]
        text += [] if answer["correction"] is None else [answer["correction"]]
        accepted, step = accepted + answer["accepted_len"], step + 1
    assert text == expected[: len(text)] and accepted > 6


def test_the_guide_s_loop_samples_from_the_target() -> None:
    """All outcomes of point-mass drafts: the missing bonus token does not change the distribution."""
    explorer = Explorer()

    def once() -> tuple[int, ...]:
        values: dict[Any, Any] = {}
        cloud = contexts(noise_sources=lambda config, position: (RepeatableNoise(explorer, position, values),) * 2)
        text: list[int] = []
        while len(text) < 2:
            draft, first = [len(text) + 1], {} if text else {"tokens": TEXT}
            config = VerifyConfig(temperature=1.0)
            request = VerifyRequest(context_id="a", draft_tokens=draft, token_probs=[1.0], k=1, config=config, **first)
            response = response_of(cloud, request)
            assert response.accepted_len or response.correction is not None
            text += draft if response.accepted_len else [response.correction]
        return tuple(text)

    assert distance(explorer.distribution(once), true_distribution(SamplingParams(), 2, ())) < ROUNDING


def test_correction_is_null_after_a_fully_accepted_draft() -> None:
    cloud, expected = service(), greedy_text(3)
    body = post(cloud, message(expected[:2], tokens=TEXT)).json()
    assert body["accepted_len"] == 2 and body["correction"] is None and "bonus" not in body
    assert b'"correction":null' in post(cloud, message(expected[2:])).content
    body = post(cloud, {**message(expected[:2], tokens=TEXT), "ctx_id": "n", "round": 0, "base": 0}).json()
    assert body["correction"] is None and body["bonus"] == expected[2]


def test_equal_requests_are_steps_unless_their_key_is_equal() -> None:
    cloud = service()
    assert post(cloud, message([1], tokens=TEXT), "a").json()["round"] == 0
    steps = [post(cloud, message([1]), key).json()["round"] for key in ("b", "b", "c", None, None)]
    assert steps == [1, 1, 2, 3, 4]
    late = post(cloud, message([1]), "b")
    assert late.status_code == 409 and "send a new key for each step" in late.json()["error"]
    assert post(cloud, message([1]), "d").json()["round"] == 5
    other = post(cloud, message([2]), "d")
    assert other.status_code == 422 and "different request" in other.json()["error"]


def test_a_first_message_opens_its_context_again_and_an_evicted_context_ends_with_404() -> None:
    cloud = service(max_contexts=1)
    answers = [post(cloud, message([1, 2], [0.5, 0.5], SAMPLED, tokens=TEXT)).json() for _ in range(2)]
    first, second = ({**answer, "epoch": 0, "metrics": None} for answer in answers)
    assert first == second
    assert post(cloud, {**message([1], tokens=TEXT), "ctx_id": "other"}).status_code == 200
    gone = post(cloud, message([1]))
    assert gone.status_code == 404 and "was evicted: send its complete text as tokens" in gone.json()["error"]


def test_other_requests_without_round_get_a_sentence() -> None:
    cloud = service()
    for changes, words in (
        ({"base": 4}, "need round"),
        ({"round": 0}, "round needs base"),
        ({"draft_tokens": [], "k": 0, "q_token_probs": [], "hard_mask": []}, "draft_tokens is empty"),
        ({"sampling_cfg": None}, "requires sampling_cfg"),
    ):
        response = post(cloud, {**message([1], tokens=TEXT), **changes})
        assert response.status_code == 422 and words in response.json()["error"]


LOSSY: list[tuple[dict[str, Any], bool]] = [
    ({}, True),  # a sampled draft with scalar q
    ({"q_token_probs": [1.0, 1.0]}, False),  # point masses
    ({"q_token_probs": None}, False),
    ({"rows": []}, False),  # the service requests the rows
    ({"sampling_cfg": {"temp": 0.0}}, False),
    ({"sampling_cfg": {"rule": "match"}}, False),
    ({"sampling_cfg": {"rule": "ratio", "threshold": 1.0}}, True),
    ({"sampling_cfg": {"adjust": False}, "rows": []}, True),
]


def test_lossy_verdicts_are_marked() -> None:
    cloud = service()
    for changes, lossy in LOSSY:
        sent = [message(draft, [0.5] * 2, SAMPLED, tokens=TEXT) for draft in ([0, 0], [1, 2], [3, 3])]
        bodies = [post(cloud, {**body, **changes}).json() for body in sent]
        decided = [body for body in bodies if "wants" not in body]
        assert decided and all(body.get("lossy", False) == lossy for body in decided), changes
