"""Options of edge-cloud decoding, by name. The authentication token is an environment variable."""

from __future__ import annotations

from specdemo.core.options import OptionRule, OptionSet, option, options
from specdemo.remote.access import is_service_address

MAX_REPLICAS = 16
MAX_LOCAL = 4
COLDEST = 0.001  # lowest temperature above 0: smaller divisors overflow the logits
MODES = {
    "speculative": "the edge drafts, the cloud verifies",
    "cloud_only": "the cloud decodes alone and streams tokens",
    "edge_only": "the drafter decodes alone: its text, not the target's",
}
ENCODINGS = {"json": "application/json", "msgpack": "application/msgpack"}
Q_ROWS = {
    "float32": "the draft distribution of the rejected token: exact",
    "float16": "the same in half the bytes: lossy by rounding",
    "scalar": "never: the residual removes the drafted token only, lossy for sampled drafts",
}
ON_LOSS = {"end": "the run ends with an error", "edge": "the drafter continues alone: lossy"}
SIGNALS = {
    "nll": "-log q of the drafted token, nats",
    "entropy": "of the draft distribution, bits",
    "margin": "between its two most probable tokens",
    "variance": "of the drafted token's probability under dropout",
}
ALWAYS = {
    "numbers": "digits: numbers, dates, amounts",
    "amounts": "English numbers in words (package text2num)",
    "months": "English months",
    "names": "capitalised words, unless the library's caller recognises names",
    "rare": "words with a small count in a frequency list, by default the files of Python's library",
}


_REMOVED = {
    "jitter_ms": "emulate it with tc netem delay",
    "up_mbit": "emulate it with tc netem rate",
    "down_mbit": "emulate it with tc netem rate",
}


_RULES = (
    OptionRule(
        ("remote",),
        lambda chosen, name: not all(map(is_service_address, chosen.addresses)),
        "remote {value!r:.300} is no address of a service",
        "give http://host:port",
    ),
    OptionRule(
        ("remote",),
        lambda chosen, name: len(chosen.addresses) > MAX_REPLICAS or len(set(chosen.addresses)) < len(chosen.addresses),
        f"remote must be at most {MAX_REPLICAS} different addresses",
        "separate them by spaces",
    ),
)
GATE_EFFECTS = (
    *(
        OptionRule(
            (f"gate_{signal}",),
            lambda chosen, name: name.removeprefix("gate_") not in chosen.gates,
            f"{{name}} has no effect without gate {signal}",
            f"add {signal} to gates",
        )
        for signal in SIGNALS
    ),
    OptionRule(
        ("gate_ratio",),
        lambda chosen, name: not chosen.thresholds,
        "gate_ratio has no effect without gates by signals",
        f"add one of {', '.join(SIGNALS)}",
    ),
    OptionRule(
        ("word_frequencies", "gate_rare"),
        lambda chosen, name: "rare" not in chosen.gates,
        "{name} has no effect without gate rare",
        "add rare to gates",
    ),
)


@options("Edge and cloud", rules=_RULES, effects=GATE_EFFECTS, removed=_REMOVED)
class CloudConfig(OptionSet):
    """Connection to a remote target."""

    remote: str = option(
        "",
        "Service",
        "the target is a service (see serve) at this address, or at several with spaces; if empty on the page, "
        "a local service",
        metavar="URL",
    )
    replicas: int = option(
        1,
        "Local services",
        "processes of the local service: if one ends, another continues",
        bounds=(1, MAX_LOCAL),
        slider=(1, MAX_LOCAL, 1),
        terminal=False,
    )
    mode: str = option("speculative", "Mode", "roles of edge and cloud", choices=MODES)
    encoding: str = option("json", "Encoding", "encoding of messages", choices=ENCODINGS)
    q_rows: str = option(
        "float32", "Rows of q", "precision of draft distributions", choices=Q_ROWS, noun="kind of q rows"
    )
    deadline_ms: float = option(400.0, "Deadline of a step, ms", bounds=(1, 600_000), step=50)
    provisional: bool = option(False, "After the deadline, commit the first draft token", lossy=True)
    lost_after_s: float = option(
        30.0, "Connection lost after, s", "seconds without progress until the connection is lost", bounds=(0, 86_400)
    )
    on_loss: str = option(
        "end", "After a lost connection", choices=ON_LOSS, noun="way to continue after a lost connection"
    )
    rtt_ms: float = option(
        0.0, "Round trip, ms", "emulated round trip in addition to the real link, ms", bounds=(0, 60_000), step=5
    )
    loss: float = option(0.0, "Share of lost messages", "emulated share of lost messages", bounds=(0, 0.9), step=0.01)
    gates: tuple[str, ...] = option(
        (),
        "Gates",
        "verify only drafts that are hard by these signals or rules",
        choices=SIGNALS | ALWAYS,
        noun="gate",
        flag="--gate",
        metavar="G",
        lossy=True,
    )
    # The NLL threshold is the 80th percentile of the bundled drafter's drafts.
    gate_nll: float = option(
        1.6, "NLL, hard above, nats", "tokens above this NLL are hard, nats", bounds=(0, 1000), step=0.1
    )
    gate_entropy: float = option(
        2.5, "Entropy, hard above, bits", "tokens above this entropy are hard, bits", bounds=(0, 64), step=0.1
    )
    gate_margin: float = option(
        0.2, "Margin, hard below", "tokens below this margin are hard", bounds=(0, 1), step=0.05
    )
    gate_variance: float = option(
        0.01, "Variance, hard above", "tokens above this variance are hard", bounds=(0, 1), step=0.005
    )
    gate_ratio: float = option(
        0.3, "Accepted share of hard tokens", "share of hard tokens without verification", bounds=(0, 1), step=0.05
    )

    gate_rare: int = option(
        3, "Count, rare below", "words with a smaller count are rare", bounds=(0, 1_000_000_000), metavar="N"
    )
    word_frequencies: str = option(
        "",
        "Frequency list",
        "file with lines of a word and its count, for gate rare (default: files of Python's library per word)",
        metavar="FILE",
        host=True,
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address.rstrip("/") for address in self.remote.split(" ") if address)

    @property
    def edge_only(self) -> bool:
        return self.mode == "edge_only"

    @property
    def emulated(self) -> bool:
        return self.rtt_ms > 0 or self.loss > 0

    @property
    def thresholds(self) -> dict[str, float]:
        return {name: getattr(self, f"gate_{name}") for name in self.gates if name in SIGNALS}

    @property
    def always(self) -> tuple[str, ...]:
        return tuple(name for name in self.gates if name in ALWAYS)

    def exact(self, sampled: bool) -> bool:
        """Return True if the link preserves the target's distribution, given an exact acceptance rule.

        `sampled`: drafts are sampled and corrections need the draft distribution.
        """
        if self.mode != "speculative":
            return self.mode == "cloud_only"
        complete = self.q_rows == "float32" or not sampled
        return complete and not self.provisional and not self.gates and self.on_loss == "end"
