"""Identity of a service: a text is never continued by another model, and a change of rounding is noted."""

from __future__ import annotations

import pytest
from fakes.remote import COUPLED, DRAFTED, decode_coupled, decode_locally
from fakes.table_service import MODEL, NUMERICS, table_service
from fakes.tiny_models import committed

from specdemo.core.errors import UserError
from specdemo.core.explain import exact_label
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft
from specdemo.remote.client import StreamingVerifier
from specdemo.remote.link import HttpClient
from specdemo.remote.protocol import ServiceIdentity, ServiceInfo, VerifyRequest, VerifyResponse

EXPECTED = ServiceIdentity(model=MODEL, numerics=NUMERICS, replica="first")


def opening() -> VerifyRequest:
    return VerifyRequest.model_validate({**DRAFTED, "q_token_probs": None}, by_alias=True)


def client(url: str, identity: ServiceIdentity = EXPECTED) -> HttpClient:
    http = HttpClient(url)
    http.identity = identity
    return http


def test_a_service_states_its_identity_where_a_context_opens() -> None:
    with table_service() as url:
        http = HttpClient(url)
        assert http.call("GET", "/v1/target", None, ServiceInfo, 60).identity == EXPECTED
        assert http.identity == ServiceIdentity()
        http.call("POST", "/v1/rounds", opening(), VerifyResponse, 60)
        assert http.identity == EXPECTED


@pytest.mark.parametrize("stated", ["c" * 32, ""])
def test_another_model_ends_the_run(stated: str) -> None:
    """The service was replaced after its description was read."""
    with table_service(model=stated, replica="second") as url:
        with pytest.raises(UserError, match=f"replica second at {url} serves .* replica first: start"):
            decode_coupled(client(url))
        with pytest.raises(UserError, match="replica second"):
            StreamingVerifier(client(url), COUPLED, 4).verify([2, 0], Draft())


def test_a_change_of_rounding_is_noted_in_its_step() -> None:
    with table_service(numerics="d" * 32) as url:
        steps = decode_coupled(client(url))
        first, second = (StreamingVerifier(client(url), COUPLED, 4).verify([2, 0], Draft()) for _ in range(2))
    assert committed(steps) == decode_locally()
    noted = [step.verdict.remote.get("numerics") for step in steps]
    assert noted == [1.0] + [None] * (len(steps) - 1)
    assert first.remote["numerics"] == second.remote["numerics"] == 1.0
    label = {"cloud": {"remote": "http://a", "mode": "speculative"}}
    assert exact_label(label, Metrics.of(steps).remote) == "exact, text may differ"
    assert exact_label(label, {}) == "exact, verified by the service at http://a"


def test_services_without_digests_serve_alone() -> None:
    with table_service(model="", numerics="", replica="") as url:
        assert committed(decode_coupled(client(url, ServiceIdentity()))) == decode_locally()


@pytest.mark.parametrize(("name", "value"), [("model", "x" * 32), ("numerics", "a" * 33), ("replica", "y" * 200)])
def test_invalid_identities_are_refused(name: str, value: str) -> None:
    with table_service(**{name: value}) as url, pytest.raises(UserError, match="is not a specdemo service"):
        client(url).call("POST", "/v1/rounds", opening(), VerifyResponse, 60)
