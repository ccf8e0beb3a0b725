"""Private sessions: names are replaced by digests of name and cookie, without cookies of name and address."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.requests import HTTPConnection
from starlette.types import Scope

from specdemo.remote.admission import ServiceError, network_of

COOKIE = "specdemo-visitor"
FIELD = "session_hash"
_NAME = re.compile(r"[A-Za-z0-9_-]{8,64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{22,64}")


def address_of(connection: Any) -> str:
    """Return the client address of a request of Starlette or Gradio; with a proxy, `FORWARDED_ALLOW_IPS` selects it."""
    return connection.client.host if connection.client else ""


def hide_in_address(scope: Scope) -> None:
    """Replace the name in the query. Raises `ServiceError`."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if any(name == FIELD for name, _ in query):
        hidden = [(name, _private(scope, value) if name == FIELD else value) for name, value in query]
        scope["query_string"] = urlencode(hidden).encode()


def hide_in_body(scope: Scope, body: dict[str, Any]) -> dict[str, Any]:
    """Replace the name in a JSON object. Raises `ServiceError`."""
    name = body.get(FIELD)
    return body if name is None else {**body, FIELD: _private(scope, name)}


def new_cookie(scope: Scope, framed: bool) -> str | None:
    """Return the cookie of a new browser. `framed`: other sites may frame the page, over https or from localhost.

    Without a path it belongs to the folder of the page, also where a proxy serves other pages above it.
    """
    if _secret(scope) is not None:
        return None
    attributes = "HttpOnly; SameSite=Lax"
    if framed:
        attributes = "HttpOnly; Secure; SameSite=None; Partitioned"
    elif scope["scheme"] == "https":
        attributes += "; Secure"
    return f"{COOKIE}={secrets.token_urlsafe(24)}; {attributes}"


def _private(scope: Scope, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        sentence = f"the {FIELD} must have 8 to 64 letters, digits, - or _: reload the page"
        raise ServiceError(400, "invalid", sentence)
    secret = _secret(scope)
    owner = f"address {network_of(address_of(HTTPConnection(scope)))}" if secret is None else f"cookie {secret}"
    return hashlib.sha256(f"{owner} {name}".encode()).hexdigest()


def _secret(scope: Scope) -> str | None:
    value = HTTPConnection(scope).cookies.get(COOKIE, "")
    return value if _SECRET.fullmatch(value) else None
