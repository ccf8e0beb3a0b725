"""Bodies of requests, limited in size and time, for service and page."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from specdemo.remote.admission import ServiceError
from specdemo.remote.connections import ConnectionLimits

TIMEOUT_S = ConnectionLimits.seconds


async def read_body(receive: Receive, max_bytes: int, announced: int = 0) -> bytes:
    """Read a body of `announced` bytes (0: unknown). Raises `ServiceError`."""
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while more and max(len(body), announced) <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise client_gone()
                body.extend(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        sentence = f"the body did not arrive within {TIMEOUT_S:g} seconds: send it again"
        raise ServiceError(408, "slow", sentence) from None
    if max(len(body), announced) > max_bytes:
        raise ServiceError(413, "too_large", f"the body has more than {max_bytes:,} bytes: split the request")
    return bytes(body)


def client_gone() -> ServiceError:
    return ServiceError(400, "gone", "the client disconnected")
