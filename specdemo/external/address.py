"""Addresses of servers of other engines, and their key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdemo.core.errors import UserError, check_name
from specdemo.remote.access import is_service_address, may_receive_secret

KEY = "SPECDEMO_ENGINE_KEY"  # environment variable; command lines and traces are public
SERVERS = "SPECDEMO_ENGINES"  # environment variable: addresses of servers
ENGINES = ("llama.cpp", "vllm", "sglang")


@dataclass(frozen=True)
class EngineAddress:
    """Engine and URL of a server."""

    engine: str
    url: str

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Read `ENGINE=URL`. Raises `UserError`."""
        engine, separator, url = text.partition("=")
        if not separator:
            raise UserError(f"{text[:100]!r} is no server of an engine: write {ENGINES[0]}=http://host:port")
        check_name("engine", engine, ENGINES)
        if not is_service_address(url):
            raise UserError(f"{url[:100]!r} is no address of a server: use http://host:port")
        return cls(engine, url.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.engine} at {urlsplit(self.url).netloc}"


def key_for(address: EngineAddress, environment: Mapping[str, str]) -> str | None:
    """Return the key for this machine and the https addresses in `SPECDEMO_ENGINES`."""
    servers = environment.get(SERVERS, "").replace(",", " ").split()
    configured = [server.partition("=")[2] for server in servers]
    return environment.get(KEY) if may_receive_secret(address.url, configured) else None
