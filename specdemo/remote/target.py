"""Remote target: description, connection, and the verifiers of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specdemo.core.decode import Verifier
from specdemo.core.errors import UserError
from specdemo.core.rules import DEFAULT_RULE, RULES
from specdemo.core.sampling import Noise, fitted
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier, Target, VerifierInputs, configured_rule
from specdemo.models.batch_invariance import COMPARED_ROWS
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.hub import Hub
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.tokenizer import has_entry
from specdemo.models.zoo import fingerprint
from specdemo.remote.access import SERVICES, TOKEN, token_for
from specdemo.remote.client import RemoteSession, RemoteVerifier, StreamingVerifier
from specdemo.remote.config import ENCODINGS, CloudConfig
from specdemo.remote.connection import Connection, ConnectionLost, Deadlines
from specdemo.remote.gates import PASSES, EdgeVerifier, GatedVerifier, RecordingPolicy, mc_dropout
from specdemo.remote.link import HttpClient, MeteredNetwork, Retry
from specdemo.remote.protocol import MAX_TEXT, ServiceInfo, VerifyConfig
from specdemo.remote.word_rules import IsName, word_rules
from specdemo.worker import interruptible

_WITHHELD = f" ({TOKEN} is sent only to this machine and to https addresses in {SERVICES}: add the address there)"
MAX_PADDING = 2  # vocabulary of a model per token of its tokenizer; padding is below 2%


@dataclass(eq=False)
class RemoteModel:
    """`Target` behind a service: tokenizer, description and connection. Its verifiers run at the edge."""

    connection: Connection
    info: ServiceInfo
    tokenizer: Any
    cloud: CloudConfig
    session: RemoteSession
    lost: bool = False
    is_name: IsName | None = None  # see gate `names`

    encoder = False  # unsupported by the service
    opening = ()
    device = None
    pass_costs = None

    def __post_init__(self) -> None:
        self.name = self.info.name
        self.vocab_size = self.info.vocab_size
        self.stop = frozenset(self.info.stop)
        self.context = self.info.context
        self.chains_only = self.info.chains_only
        self.weight_bytes = self.info.weight_bytes

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

    def bit_equal(self, longest_draft: int | None, length: int) -> bool:
        """See `Target.bit_equal`. The description of a service has no compared length of the text."""
        return self.info.bit_equal and longest_draft is not None and longest_draft < COMPARED_ROWS

    def open_cache(self, open: Callable[..., Any], taps: tuple[int, ...]) -> None:
        """Return None: the cache is in the service."""

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Return a verifier at the edge, gated if the options have gates."""
        if inputs.logprobs is not None:
            raise UserError("log-probabilities need a local target: omit logprobs, or choose mode off")
        verifier = self._client(inputs)
        inputs.on_close(verifier.close)
        if not self.cloud.gates:
            return verifier
        recorder, variance = inputs.policy, None
        assert isinstance(recorder, RecordingPolicy)
        if "variance" in self.cloud.gates:
            model = inputs.draft_caches[0].model
            variance = mc_dropout([inputs.open(with_dropout(model, seed)).score for seed in range(PASSES)])
        always = word_rules(self.tokenizer, self.cloud, self.is_name) if self.cloud.always else None
        thresholds, max_hard = self.cloud.thresholds, self.cloud.gate_ratio
        return GatedVerifier(verifier, recorder, thresholds, max_hard, always=always, variance=variance)

    def close(self) -> None:
        self.connection.close()

    def _client(self, inputs: VerifierInputs) -> RemoteVerifier | StreamingVerifier:
        cloud, options = self.cloud, inputs.options
        config, known = _verify_config(inputs), partial(has_entry, self.tokenizer)
        deadlines = Deadlines(cloud.deadline_ms / 1000, cloud.lost_after_s, not cloud.provisional)
        if cloud.mode == "cloud_only":
            return StreamingVerifier(self.connection, config, options.max_tokens, deadlines, self.vocab_size, known)
        return RemoteVerifier(
            self.connection,
            config,
            rows=cloud.q_rows,
            candidates=inputs.candidates,
            top=options.top,
            deadlines=deadlines,
            edge=self._edge_verifier(inputs) if cloud.on_loss == "edge" else None,
            session=self.session,
            is_lost=self.lost,
            vocab_size=self.vocab_size,
            has_entry=known,
        )

    def _edge_verifier(self, inputs: VerifierInputs) -> EdgeVerifier | None:
        if not inputs.draft_caches:
            return None
        cache, options = inputs.draft_caches[0], inputs.options

        def score(tokens: Sequence[int], draft: Draft) -> Tensor:
            return fitted(cache.score(tokens, draft), self.vocab_size)

        accept, correct = Noise(options.seed, "edge accept"), Noise(options.seed, "edge")
        rule = configured_rule(DEFAULT_RULE)
        return EdgeVerifier(
            ModelVerifier(score, inputs.sampling, rule, accept, correct, inputs.candidates, options.top)
        )


def _verify_config(inputs: VerifierInputs) -> VerifyConfig:
    options = inputs.options
    return VerifyConfig(
        **inputs.sampling.numbers,
        bad_texts=list(options.bad_words),
        seed=options.seed,
        rule=options.rule,
        threshold=RULES[options.rule].threshold if options.threshold is None else options.threshold,
        adjust=not options.skip_sample_adjustment,
    )


def connect(
    cloud: CloudConfig,
    target: ModelSpec,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
    *,
    edge: Target | None = None,
    hub: Hub | None = None,
    session: RemoteSession | None = None,
) -> RemoteModel:
    """Connect to the services; raise `UserError` if none responds or one has another tokenizer or model."""
    if not cloud.remote:
        raise UserError("the service address is missing: set it to http://host:port")
    tokenizer = interruptible(partial(read_tokenizer, target, hub))
    session = session or RemoteSession()
    connection = _connection(cloud, seed, clock, session.id)
    try:
        info = _service_info(connection, cloud, edge is not None)
        if info is not None:
            _check_info(info, target, tokenizer)
            return RemoteModel(connection, info, tokenizer, cloud, session)
        assert edge is not None
        info = _info_without_service(target, tokenizer, edge)
        return RemoteModel(connection, info, tokenizer, cloud, session, lost=True)
    except BaseException:
        connection.close()
        raise


def _connection(cloud: CloudConfig, seed: int, clock: Callable[[], float], session: str) -> Connection:
    """Return the connection to all addresses; each gets the token by its own rule."""
    network = MeteredNetwork(cloud.rtt_ms / 1000, cloud.loss, seed)
    make = partial(HttpClient, content_type=ENCODINGS[cloud.encoding], session=session, network=network)
    clients: list[HttpClient] = []
    for address in cloud.addresses:
        token = token_for(address, os.environ)
        is_withheld = token is None and bool(os.environ.get(TOKEN))
        clients.append(make(address, token=token, refusal=_WITHHELD if is_withheld else ""))
    return Connection(clients, session, clock)


def _service_info(connection: Connection, cloud: CloudConfig, has_edge: bool) -> ServiceInfo | None:
    """Return the description, or None if the edge decodes alone."""
    timeout = max(1.0, cloud.deadline_ms / 1000)
    try:
        return connection.run(partial(connection.describe, timeout, cloud.lost_after_s))
    except Retry as failure:
        if has_edge and cloud.on_loss == "edge":
            return None
        raise ConnectionLost(f"there is no service at {cloud.remote} ({failure}): start one with serve") from failure


def _check_info(info: ServiceInfo, target: ModelSpec, tokenizer: Any) -> None:
    if info.tokenizer != fingerprint(tokenizer) or info.vocab_size > MAX_PADDING * len(tokenizer):
        raise UserError(
            f"the service's target {info.name} ({info.vocab_size:,} token ids) and {target.title} have different "
            "tokenizers: use the same target at both ends"
        )


def _info_without_service(target: ModelSpec, tokenizer: Any, edge: Target) -> ServiceInfo:
    return ServiceInfo(
        name=Path(target.name).name,
        vocab_size=max(edge.vocab_size, len(tokenizer)),
        context=MAX_TEXT,
        stop=sorted(edge.stop),
        tokenizer=fingerprint(tokenizer),
        engine="none",
        dtype=target.dtype,
        device="no device",
        threads=0,
        weight_bytes=0,
        bit_equal=False,
    )
