"""A target that is not here: finding the service, seeing that it fits, and the judge that asks it."""

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
from specdemo.remote.client import ConnectionLost, Deadlines, RemoteVerifier
from specdemo.remote.cloud_only import CloudText
from specdemo.remote.config import ENCODINGS, CloudConfig
from specdemo.remote.link import LinkEmulation
from specdemo.remote.protocol import ServiceInfo, VerifyConfig
from specdemo.remote.transport import HttpClient, NoResponse
from specdemo.worker import interruptible

TOKEN = "SPECDEMO_TOKEN"  # of the environment, at both ends: what stands on a command line others can read


@dataclass(frozen=True)
class RemoteModel:
    """The target as an edge has it: its tokenizer, what is known of it, and the wire. `close` it."""

    http: HttpClient
    about: ServiceInfo
    tokenizer: Any
    cloud: CloudConfig

    @cached_property
    def stop(self) -> frozenset[int]:
        """Every id that ends a text."""
        return frozenset(self.about.stop)

    encoder = False  # such a target is not served: its prompt would have to travel apart

    @property
    def bit_equal(self) -> bool:
        """Whether several rows of the target give what one does."""
        return self.about.bit_equal

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return self.about.vocab_size

    @property
    def environment(self) -> dict[str, Any]:
        """What a trace's header says of the machine at the other end."""
        about = self.about
        return {
            "device": f"{about.device} at {self.cloud.remote}",
            "dtype": about.dtype,
            "threads": about.threads,
            "engine": about.engine,
            "target_bytes": about.weight_bytes,
        }

    def close(self) -> None:
        """Hang up."""
        self.http.close()


def connect(
    cloud: CloudConfig, target: ModelSpec, seed: int, clock: Callable[[], float] = time.monotonic
) -> RemoteModel:
    """Reach the service, whose target should be `target`. Raises `UserError` where it does not fit."""
    link = LinkEmulation(
        cloud.rtt_ms / 1000, cloud.jitter_ms / 1000, cloud.loss, cloud.up_mbit * 1e6, cloud.down_mbit * 1e6, seed
    )
    if not cloud.remote:
        raise UserError("no service is named: say where it is, as http://host:port")
    tokenizer = read_tokenizer(target)
    http = HttpClient(cloud.remote, kind=ENCODINGS[cloud.encoding], token=os.environ.get(TOKEN), link=link)
    began, patience = clock(), max(1.0, cloud.deadline_ms / 1000)
    while True:
        try:
            about = interruptible(lambda: http.call("GET", "/v1/target", None, ServiceInfo, patience))
            break
        except NoResponse as silence:
            if clock() - began > min(3.0, cloud.lost_after_s) or not cloud.loss:
                raise ConnectionLost(
                    f"there is no service at {cloud.remote} ({silence}): start one with serve"
                ) from silence
    if about.tokenizer != fingerprint(tokenizer):
        raise UserError(
            f"the service's target, {about.name}, has another tokenizer than {target.title}: name the same target at "
            "both ends"
        )
    return RemoteModel(http, about, tokenizer, cloud)


def remote_verifier(
    distant: RemoteModel, settings: VerifyConfig, *, plain: bool, max_tokens: int, edge: Verifier | None, **shown: int
) -> RemoteVerifier | CloudText:
    """The judge for a run: `plain` has the cloud decode by itself; `edge` goes on where the cloud is lost."""
    cloud = distant.cloud
    patience = Deadlines(cloud.deadline_ms / 1000, cloud.lost_after_s, not cloud.provisional)
    if plain:
        return CloudText(distant.http, settings, max_tokens, patience)
    return RemoteVerifier(distant.http, settings, rows=cloud.q_rows, patience=patience, edge=edge, **shown)
