"""Connection to a target in the cloud, and its verifier."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import fingerprint
from specdemo.remote.client import ConnectionLost, Deadlines, RemoteVerifier, StreamingVerifier
from specdemo.remote.config import ENCODINGS, CloudConfig
from specdemo.remote.http_client import HttpClient, NoResponse
from specdemo.remote.link import LinkEmulation
from specdemo.remote.protocol import ServiceInfo, VerifyConfig
from specdemo.worker import interruptible

TOKEN = "SPECDEMO_TOKEN"  # environment variable; command lines are public


@dataclass(frozen=True)
class RemoteModel:
    """Remote target: tokenizer, description and connection."""

    http: HttpClient
    info: ServiceInfo
    tokenizer: Any
    cloud: CloudConfig

    encoder = False  # unsupported by the service

    @cached_property
    def stop(self) -> frozenset[int]:
        return frozenset(self.info.stop)

    @property
    def bit_equal(self) -> bool:
        return self.info.bit_equal

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def environment(self) -> dict[str, Any]:
        info = self.info
        return {
            "device": f"{info.device} at {self.cloud.remote}",
            "dtype": info.dtype,
            "threads": info.threads,
            "engine": info.engine,
            "target_bytes": info.weight_bytes,
        }

    def close(self) -> None:
        self.http.close()


def connect(
    cloud: CloudConfig, target: ModelSpec, seed: int, clock: Callable[[], float] = time.monotonic
) -> RemoteModel:
    """Connect to the service; raise `UserError` if it is unreachable or has another tokenizer."""
    link = LinkEmulation(
        cloud.rtt_ms / 1000, cloud.jitter_ms / 1000, cloud.loss, cloud.up_mbit * 1e6, cloud.down_mbit * 1e6, seed
    )
    if not cloud.remote:
        raise UserError("the service address is missing: set it to http://host:port")
    tokenizer = read_tokenizer(target)
    http = HttpClient(cloud.remote, content_type=ENCODINGS[cloud.encoding], token=os.environ.get(TOKEN), link=link)
    start, timeout = clock(), max(1.0, cloud.deadline_ms / 1000)
    while True:
        try:
            info = interruptible(lambda: http.call("GET", "/v1/target", None, ServiceInfo, timeout))
            break
        except NoResponse as failure:
            if clock() - start > min(3.0, cloud.lost_after_s) or not cloud.loss:
                raise ConnectionLost(
                    f"there is no service at {cloud.remote} ({failure}): start one with serve"
                ) from failure
    if info.tokenizer != fingerprint(tokenizer):
        raise UserError(
            f"the service's target {info.name} and {target.title} have different tokenizers: use the same target at "
            "both ends"
        )
    return RemoteModel(http, info, tokenizer, cloud)


def remote_verifier(
    model: RemoteModel, config: VerifyConfig, *, max_tokens: int, edge: Verifier | None, **display: int
) -> RemoteVerifier | StreamingVerifier:
    cloud = model.cloud
    deadlines = Deadlines(cloud.deadline_ms / 1000, cloud.lost_after_s, not cloud.provisional)
    if cloud.mode == "cloud_only":
        return StreamingVerifier(model.http, config, max_tokens, deadlines)
    return RemoteVerifier(model.http, config, rows=cloud.q_rows, deadlines=deadlines, edge=edge, **display)
