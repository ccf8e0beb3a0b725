"""Access to page and service: listening socket, host names, origins, token, list of routes."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from specdemo.core.errors import UserError

TOKEN = "SPECDEMO_TOKEN"  # environment variable; command lines are public
SERVICES = "SPECDEMO_REMOTE"  # environment variable: addresses of services
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([a-z0-9_.-]+))(?::([0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class RouteInfo:
    """A route of page or service, as documented."""

    methods: str
    path: str
    purpose: str
    limits: str = ""


def parse_ip(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    ip = parse_ip(name)
    return name == "localhost" or name.endswith(".localhost") or (ip is not None and ip.is_loopback)


def is_known_host(host: str, names: Collection[str]) -> bool:
    """Return True for IP addresses (DNS rebinding needs a name), localhost, and `names`."""
    name = _name_and_port(host)[0]
    return (
        parse_ip(name) is not None
        or is_loopback(name)
        or any(name == known or (known.startswith("*.") and name.endswith(known[1:])) for known in names)
    )


def is_service_address(url: str) -> bool:
    """Return True for `http://host:port` and https, optionally with a path."""
    name, port = _endpoint(url)
    labels = name.split(".")
    path = url.partition("://")[2].partition("/")[2]
    valid = bool(port) and (parse_ip(name) is not None or all(0 < len(label) < 64 for label in labels))
    return valid and re.fullmatch(r"[A-Za-z0-9._~/-]*", path) is not None


def is_origin(url: str) -> bool:
    """Return True for `https://host`, also with http or a port."""
    scheme, _, host = url.partition("://")
    return scheme in _PORTS and bool(_name_and_port(host)[0])


def is_foreign(headers: Mapping[str, str], names: Collection[str] = ()) -> bool:
    """Return True if a browser sent the request for another site."""
    site = headers.get("sec-fetch-site", "none")  # absent on plain http
    if site != "none":
        return site != "same-origin"
    if (origin := headers.get("origin")) is None:
        return False
    scheme, _, host = origin.partition("://")
    name, port = _name_and_port(host, _PORTS.get(scheme))
    same = (name, port) == _name_and_port(headers.get("host", ""), port)
    return scheme not in _PORTS or not name or not (same or name in names)


def _name_and_port(host: str, default_port: int | None = None) -> tuple[str, int | None]:
    """Parse a `Host` header strictly; the name is empty for other text."""
    match = _HOST.fullmatch(host.lower())
    if match is None or int(match[3] or 0) > 65_535:
        return "", None
    if match[1] is not None and parse_ip(match[1]) is None:
        return "", None
    return match[1] or match[2].rstrip("."), int(match[3]) if match[3] else default_port


def _endpoint(url: str) -> tuple[str, int | None]:
    """Parse name and port of an http or https address strictly; the name is empty for other text."""
    scheme, _, rest = url.partition("://")
    return _name_and_port(rest.partition("/")[0], _PORTS[scheme]) if scheme in _PORTS else ("", None)


def read_token(environment: Mapping[str, str]) -> str | None:
    token = environment.get(TOKEN)
    if token is not None and not token.strip():
        raise UserError(f"{TOKEN} is empty: set it to a secret, or unset it to serve without authentication")
    return token


def token_for(url: str, environment: Mapping[str, str]) -> str | None:
    """Return the token for this machine and https addresses in `SPECDEMO_REMOTE`."""
    configured = environment.get(SERVICES, "").replace(",", " ").split()
    tokens = environment.get(TOKEN, "").split()  # a service may have several
    return tokens[0] if tokens and may_receive_secret(url, configured) else None


def may_receive_secret(url: str, configured: Iterable[str]) -> bool:
    """Return True for this machine, and for https addresses in `configured`."""
    endpoint = _endpoint(url)
    if is_loopback(endpoint[0]):
        return True
    return bool(endpoint[0]) and url.startswith("https://") and endpoint in map(_endpoint, configured)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 selects a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # lets asyncio disable Nagle
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host") from error
    return listener
