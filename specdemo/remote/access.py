"""Access control of page and service: host names, origins, token, list of routes."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdemo.core.errors import UserError

TOKEN = "SPECDEMO_TOKEN"  # environment variable; command lines are public
SERVICES = "SPECDEMO_REMOTE"  # environment variable: addresses of services
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class RouteInfo:
    methods: str
    path: str
    purpose: str
    limits: str = ""


def route_table(routes: Iterable[RouteInfo]) -> str:
    rows = [f"| `{route.methods} {route.path}` | {route.purpose} | {route.limits} |" for route in routes]
    return "\n".join(["| route | purpose | limits |", "|---|---|---|", *rows])


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_known_host(host: str, names: Collection[str]) -> bool:
    """Return True for IP addresses (DNS rebinding needs a name), localhost, and `names`."""
    name = _endpoint(f"//{host}")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return is_loopback(name) or any(
            name == known or (known.startswith("*.") and name.endswith(known[1:])) for known in names
        )
    return True


def is_foreign(headers: Mapping[str, str], names: Collection[str] = ()) -> bool:
    """Return True if a browser sent the request for another site."""
    if "sec-fetch-site" in headers:  # absent on plain http
        return headers["sec-fetch-site"] not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return False
    name, port = _endpoint(origin)
    return not name or ((name, port) != _endpoint(f"//{headers.get('host', '')}", port) and name not in names)


def _endpoint(url: str, default_port: int | None = None) -> tuple[str, int | None]:
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme, default_port)
    except ValueError:
        return "", None


def read_token(environment: Mapping[str, str]) -> str | None:
    token = environment.get(TOKEN)
    if token is not None and not token.strip():
        raise UserError(f"{TOKEN} is empty: set it to a secret, or unset it to serve without authentication")
    return token


def token_for(url: str, environment: Mapping[str, str]) -> str | None:
    """Return the token for this machine and https addresses in `SPECDEMO_REMOTE`."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return environment.get(TOKEN)
    configured = {_endpoint(address) for address in environment.get(SERVICES, "").replace(",", " ").split()}
    return environment.get(TOKEN) if parts.scheme == "https" and _endpoint(url) in configured else None
