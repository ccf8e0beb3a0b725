"""All choices of a run over the wire, by name. Knows names and numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdemo.core.errors import UserError, check_name

COLDEST = 0.001  # of temperatures above 0: logits over less overflow
MODES = {
    "speculative": "the edge drafts, the cloud verifies",
    "cloud_only": "the cloud decodes by itself and streams its tokens",
    "edge_only": "the drafter decodes by itself; its text, not the target's",
}
ENCODINGS = {"json": "application/json", "msgpack": "application/msgpack"}
Q_ROWS = {
    "float32": "the drafter's law where a sampled draft was rejected, as it is: exact",
    "float16": "the same in half the bytes: lossy by its rounding",
    "scalar": "never: the practice guide's residual, lossy for sampled drafts, whose other mass it leaves in",
}
ON_LOSS = {"end": "the run ends and says so", "edge": "the drafter goes on alone: lossy from there"}
SIGNALS = {
    "nll": "-log q of the drafted token, nats",
    "entropy": "of the drafter's law, bits",
    "margin": "between its two likeliest tokens",
    "variance": "of the drafted token's probability under dropout",
}
ALWAYS = {
    "numbers": "digits: numbers, dates, amounts",
    "names": "capitalised words",
    "rare": "words that few files of Python's library have",
}


@dataclass(frozen=True)
class CloudConfig:
    """How the target is reached. Construction refuses what cannot be meant; the token is the environment's affair."""

    remote: str  # http(s)://host:port; empty: one of its own on this machine, which whoever runs this has to start
    mode: str = "speculative"
    encoding: str = "json"
    q_rows: str = "float32"
    deadline_ms: float = 400.0  # of a round
    provisional: bool = False  # past the deadline commit the draft's first token; else wait
    lost_after_s: float = 30.0  # without any answer
    on_loss: str = "end"
    rtt_ms: float = 0.0  # emulated, on top of the link that there is
    jitter_ms: float = 0.0
    loss: float = 0.0  # of messages, each way
    up_mbit: float = 0.0  # per second; 0: no limit
    down_mbit: float = 0.0
    gates: tuple[str, ...] = ()  # signals and rules that call for the cloud; none: always ask it
    gate_nll: float = 1.6  # hard above; the 80th percentile of what the bundled drafter drafts
    gate_entropy: float = 2.5
    gate_margin: float = 0.2  # hard below
    gate_variance: float = 0.01
    gate_ratio: float = 0.3  # of a draft may be hard before the cloud is asked

    def __post_init__(self) -> None:
        if self.remote and not self.remote.startswith(("http://", "https://")):
            raise UserError(f"{self.remote!r} is no address of a service: give http://host:port")
        check_name("mode", self.mode, MODES)
        check_name("encoding", self.encoding, ENCODINGS)
        check_name("kind of q rows", self.q_rows, Q_ROWS)
        check_name("way to go on when the cloud is lost", self.on_loss, ON_LOSS)
        for gate in self.gates:
            check_name("gate", gate, SIGNALS | ALWAYS)
        for name, least, most in (
            ("deadline_ms", 1, 600_000),
            ("lost_after_s", 0, 86_400),
            ("rtt_ms", 0, 60_000),
            ("jitter_ms", 0, 60_000),
            ("loss", 0, 0.9),
            ("up_mbit", 0, 1e6),
            ("down_mbit", 0, 1e6),
            ("gate_nll", 0, 1e3),
            ("gate_entropy", 0, 64),
            ("gate_margin", 0, 1),
            ("gate_variance", 0, 1),
            ("gate_ratio", 0, 1),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise UserError(f"{name} must be from {least} to {most}, not {value}")

    @property
    def alone(self) -> bool:
        """Whether no service takes part."""
        return self.mode == "edge_only"

    @property
    def emulated(self) -> bool:
        """Whether the link is made worse than it is."""
        return any((self.rtt_ms, self.jitter_ms, self.loss, self.up_mbit, self.down_mbit))

    @property
    def thresholds(self) -> dict[str, float]:
        """Of the signals that are watched."""
        return {name: getattr(self, f"gate_{name}") for name in self.gates if name in SIGNALS}

    @property
    def always(self) -> tuple[str, ...]:
        """The rules that always call for the cloud."""
        return tuple(name for name in self.gates if name in ALWAYS)

    def exact(self, sampled: bool) -> bool:
        """Whether the text keeps the target's law, whatever the wire does, given a rule that does.

        `sampled`: corrections need the law that drafts were drawn from.
        """
        if self.mode != "speculative":
            return self.mode == "cloud_only"
        whole = self.q_rows == "float32" or not sampled
        return whole and not self.provisional and not self.gates and self.on_loss == "end"
