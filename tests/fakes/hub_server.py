"""Fake Hugging Face hub: the HTTP API that `huggingface_hub` uses, served from directories, with faults on demand.

Implemented: model info, the tree of a commit, files under /resolve/ (small files directly, safetensors through
a redirect to another path, like the real hub with its CDN), ranges, ETags, X- headers. Each model is a directory
under the root: `root/tiny/target` is `tiny/target`, and its commit is a hash of its files.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fakes.http_server import Handler, http_server

BRANCH = "main"


@dataclass
class Faults:
    """Active faults, until they are reset."""

    status: int = 200  # of every answer about a model
    code: str = ""  # its X-Error-Code
    cut_after: int | None = None  # bytes of a weights file after which the connection closes,
    cuts: int = 0  # as many times
    corrupt: bool = False  # one byte of each weights file is changed
    held_after: int | None = None  # bytes of a weights file after which the server blocks until `go_on` is set,
    held: threading.Event = field(default_factory=threading.Event)  # which it reports here
    go_on: threading.Event = field(default_factory=threading.Event)


@dataclass
class StandIn:
    """Server, its faults, and a log of the requests: method, path, and range (or None)."""

    root: Path
    endpoint: str = ""
    faults: Faults = field(default_factory=Faults)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    trusted: set[str] = field(default_factory=set)  # Authorization headers that the hub received,
    leaked: set[str] = field(default_factory=set)  # and those received by its CDN, another host

    @property
    def cdn(self) -> str:
        """Address of the weights: the same server under another name, so that clients treat it as another host."""
        return self.endpoint.replace("127.0.0.1", "localhost") + "/cdn"

    def commit(self, name: str) -> str:
        """40 hexadecimal digits, different for other files."""
        digest = hashlib.sha1(name.encode())
        for path in sorted((self.root / name).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def gets(self, part: str) -> list[str | None]:
        """Ranges of all downloads with `part` in the address."""
        return [span for method, path, span in self.asked if method == "GET" and part in path]


@contextmanager
def serving(root: Path) -> Iterator[StandIn]:
    hub = StandIn(root)

    class Served(_Handler):
        stand_in = hub

    with http_server(Served) as hub.endpoint:
        try:
            yield hub
        finally:
            hub.faults.go_on.set()


class _Handler(Handler):
    stand_in: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub, path = self.stand_in, unquote(urlsplit(self.path).path).strip("/")
        hub.asked.append((self.command, path, self.headers.get("Range")))
        if token := self.headers.get("Authorization"):
            (hub.leaked if path.startswith("cdn/") else hub.trusted).add(token)
        match path.split("/"):
            case ["api", "models", owner, name, *rest]:
                self._about(f"{owner}/{name}", rest)
            case ["cdn", owner, name, *inner]:
                self._file(f"{owner}/{name}", "/".join(inner), from_cdn=True)
            case [owner, name, "resolve", revision, *inner] if inner:
                self._file(f"{owner}/{name}", "/".join(inner), revision)
            case _:
                self._send(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _known(self, name: str, revision: str = BRANCH) -> bool:
        hub = self.stand_in
        if hub.faults.status != 200:
            self._send(hub.faults.status, {"X-Error-Code": hub.faults.code})
        elif not (hub.root / name).is_dir():
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (BRANCH, hub.commit(name)):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _about(self, name: str, rest: list[str]) -> None:
        """Answer /, /revision/REVISION and /tree/REVISION."""
        what, revision = (rest or ["info", BRANCH])[:2]
        if not self._known(name, revision):
            return
        folder = self.stand_in.root / name
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        if what == "tree":
            body: object = [{"type": "file", "path": inner, **_oids(path)} for inner, path in files.items()]
        else:
            siblings = [{"rfilename": inner} for inner in files]
            body = {"id": name, "sha": self.stand_in.commit(name), "siblings": siblings, "tags": [], "private": False}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, name: str, inner: str, revision: str = BRANCH, from_cdn: bool = False) -> None:
        if not self._known(name, revision):
            return
        commit = {"X-Repo-Commit": self.stand_in.commit(name)}
        path = self.stand_in.root / name / inner
        if not path.is_file():
            self._send(404, {**commit, "X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        etag = f'"{_etag(path)}"'
        if path.suffix == ".safetensors" and not from_cdn:
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
            self._send(302, {**commit, **linked, "Location": f"{self.stand_in.cdn}/{name}/{inner}"})
            return
        headers = {**commit, "ETag": etag, "Accept-Ranges": "bytes"}
        first, last, status = 0, len(data) - 1, 200
        if span := self.headers.get("Range"):
            begin, _, end = span.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end), last) if end else last, 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(status, headers, data[first : last + 1], weights=from_cdn)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", weights: bool = False) -> None:
        faults = self.stand_in.faults
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if weights and faults.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if weights and faults.cut_after is not None and faults.cuts:
            faults.cuts -= 1
            self.wfile.write(body[: faults.cut_after])
            self.close_connection = True
            return
        if weights and faults.held_after is not None:
            self.wfile.write(body[: faults.held_after])
            self.wfile.flush()
            faults.held.set()
            faults.go_on.wait()
            body = body[faults.held_after :]
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has disconnected


def _etag(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _oids(path: Path) -> dict[str, object]:
    size, digest = path.stat().st_size, _etag(path)
    large = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if path.suffix == ".safetensors" else {}
    return {"size": size, "oid": digest[:40], **large}
