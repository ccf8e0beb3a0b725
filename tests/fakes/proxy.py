"""Reverse proxy that serves a page below a path."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from fakes.relay import relay


@dataclass(frozen=True)
class Proxy:
    """Configuration of a proxy. Requests outside `path` reach a page that does not exist."""

    path: str = "/demo"
    strips: bool = True
    passes_host: bool = True
    forwards: bool = False  # sends the headers X-Forwarded

    def request(self, data: bytes, own: str, upstream: str) -> bytes:
        """Return the data of a client as sent to the page; only the head of a request is changed."""
        head, blank, body = data.decode("latin-1").partition("\r\n\r\n")
        line, *headers = head.split("\r\n")
        if not line.endswith(" HTTP/1.1"):
            return data
        method, target, version = line.split(" ")
        if not f"{target}/".startswith(f"{self.path}/"):
            target = "/outside"
        elif self.strips:
            target = target.removeprefix(self.path) or "/"
        if not self.passes_host:
            headers = [header for header in headers if not header.lower().startswith("host:")]
            headers.append(f"Host: {upstream}")
        if self.forwards:
            values = {"Host": own, "Proto": "http", "Prefix": self.path, "For": "192.0.2.7"}
            headers += [f"X-Forwarded-{name}: {value}" for name, value in values.items()]
        return ("\r\n".join([f"{method} {target} {version}", *headers]) + blank + body).encode("latin-1")


@contextmanager
def proxied(url: str, proxy: Proxy) -> Iterator[str]:
    """Yield the address of the page `url` behind the proxy, with a final slash."""

    def change(direction: str, _: int, data: bytes) -> bytes:
        own = urlsplit(opened.url).netloc
        return proxy.request(data, own, urlsplit(url).netloc) if direction == "request" else data

    with relay(url, change) as opened:
        opened.counting = True
        yield f"{opened.url}{proxy.path}/"
