"""All choices of one run in a frozen dataclass, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdemo.core.errors import UserError, check_name
from specdemo.core.policies import POLICIES
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.models.spec import DTYPES, QUANTIZATIONS, ModelSpec
from specdemo.models.zoo import MODELS, PAIRS, REVISIONS
from specdemo.remote.config import COLDEST, CloudConfig

METHODS = {
    "draft": "a smaller model drafts, the target verifies",
    "nasd": "n-grams of the prompt and the output draft (NASD; NAPD with filler top-k 1)",
    "suffix": "what followed the text's longest repeated ending drafts",
    "hybrid": "the suffix where the text repeats itself, the smaller model elsewhere",
    "tree": "a smaller model drafts a tree of its likeliest continuations",
    "self": "the target drafts for itself with layers left out",
    "lookahead": "the target guesses ahead of itself in the pass that verifies",
    "lookup": "prompt lookup as in transformers, for comparison",
    "ar": "plain autoregressive decoding: the baseline",
    "beam": "beam search: the most probable text it can find",
}
SAMPLED = ("draft", "self", "hybrid", "tree")  # methods that draw their drafts above temperature 0
FORESTS = ("tree", "lookahead", "beam")  # methods whose passes hold more than one continuation at once
WITH_DRAFTER = ("draft", "hybrid", "tree")  # methods that need a second model
NGRAM_LEVELS = {"multi": "back off to shorter contexts", "one": "contexts of one length only"}


@dataclass(frozen=True)
class Recipe:
    """What to run. Construction refuses what cannot be meant."""

    pair: str | None = None  # with neither pair nor models, the bundled one
    target: str | None = None
    drafter: str | None = None
    method: str = "draft"
    gamma: int = 4
    policy: str = "fixed"
    gamma_min: int | None = None  # a policy's bounds; None: its own
    gamma_max: int | None = None
    rule: str = "rejection"
    temperature: float = 0.5  # with top-p, where the bundled pair writes best
    top_k: int = 0
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    bad_words: tuple[str, ...] = ()
    seed: int = 0
    max_tokens: int = 256
    top: int = 0  # tokens of every law that the trace holds, with its entropy
    dtype: str = "auto"
    universal: bool = False  # a drafter of another vocabulary is allowed: its text is re-encoded
    quantization: str = "none"
    drafter_quantization: str = "none"
    device: str = "auto"
    drafter_device: str | None = None  # None: the target's
    ngram: int = 4
    ngram_levels: str = "multi"
    filler_top_k: int = 3
    ngram_keep: bool = False  # what is learnt from a text serves the next one too
    tree_nodes: int = 12
    tree_width: int = 3  # children per node
    lookahead_window: int = 5  # places ahead that are guessed at
    lookahead_n: int = 4  # tokens of an n-gram
    lookahead_guesses: int = 5  # n-grams drafted per round
    num_beams: int = 4
    length_penalty: float = 1.0  # above 0 favours longer texts, below 0 shorter ones
    min_length: int = 0  # tokens before which no beam may end
    exit_layer: int | None = None  # self-speculation keeps this many layers; None: half of them
    skip_layers: tuple[int, ...] = ()  # or all but these
    threshold: float | None = None  # of a rule that has one; None: its usual one
    chat: bool = False  # the prompt is said by a user, in the model's own chat template
    skip_sample_adjustment: bool = False  # draw corrections from p: lossy
    cloud: CloudConfig | None = None  # where the target is, if it is not here

    def __post_init__(self) -> None:
        if self.pair and (self.target or self.drafter):
            raise UserError("give either a pair or a target and a drafter, not both")
        if self.drafter and not self.target:
            raise UserError("a drafter needs a target: give both")
        if self.pair:
            check_name("pair", self.pair, PAIRS)
        check_name("method", self.method, METHODS)
        check_name("policy", self.policy, POLICIES)
        check_name("rule", self.rule, RULES)
        check_name("dtype", self.dtype, DTYPES)
        check_name("quantization", self.quantization, QUANTIZATIONS)
        check_name("quantization", self.drafter_quantization, QUANTIZATIONS)
        check_name("n-gram storage", self.ngram_levels, NGRAM_LEVELS)
        for name, least, most in (
            ("gamma", 1, 64),
            ("gamma_min", 0, 64),
            ("gamma_max", 1, 64),
            ("max_tokens", 1, 1 << 20),
            ("temperature", 0, 100),
            ("top_k", 0, 1 << 20),
            ("top", 0, 64),
            ("ngram", 2, 16),
            ("filler_top_k", 1, 64),
            ("exit_layer", 1, 1 << 10),
            ("tree_nodes", 1, 256),
            ("lookahead_window", 1, 32),
            ("lookahead_n", 2, 16),
            ("lookahead_guesses", 1, 32),
            ("tree_width", 1, 64),
            ("num_beams", 1, 64),
            ("length_penalty", -16, 16),
            ("min_length", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # which no NaN is
                raise UserError(f"{name} must be from {least} to {most}, not {value}{self._way_out(name)}")
        if self.gamma_bounds[0] > self.gamma_bounds[1]:
            raise UserError("gamma_min {} is above gamma_max {}: exchange them".format(*self.gamma_bounds))
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty must be above 0 (1 is none), not {self.repetition_penalty}")
        if self.method in WITH_DRAFTER and self.models[1] is None:
            raise UserError(f"method {self.method} needs a drafter: give one, or choose method nasd, self or ar")
        if self.encoder:
            refuse_with_encoder(self.method)  # before gigabytes come
        if self.exit_layer is not None and self.skip_layers:
            raise UserError("give either exit_layer or skip_layers, not both")
        if self.threshold is not None:
            if RULES[self.rule].threshold is None:
                having = ", ".join(name for name, rule in RULES.items() if rule.threshold is not None)
                raise UserError(f"rule {self.rule} has no threshold: rules that have one are {having}")
            if not 0 < self.threshold <= 1:
                raise UserError(f"threshold must be above 0 and at most 1, not {self.threshold}")
        if self.skip_sample_adjustment and not RULES[self.rule].adjusts:
            raise UserError(f"rule {self.rule} has no sample adjustment to skip: choose rule rejection")
        self._check_cloud()

    def _check_cloud(self) -> None:
        if self.cloud is None:
            return
        if self.method in ("self", "beam"):
            raise UserError(f"method {self.method} needs the target itself at hand: choose another, or no cloud")
        if 0 < self.temperature < COLDEST or not 0.01 <= self.repetition_penalty <= 100:
            raise UserError(
                f"over the wire a temperature is 0 or from {COLDEST}, a repetition penalty from 0.01 to 100"
            )
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UserError("over the wire a seed has 64 bits: choose a smaller one")
        alone = self.cloud.mode == "edge_only" or self.cloud.on_loss == "edge"
        if alone and self.models[1] is None:
            raise UserError("the edge has no model to go on with alone: give a drafter")
        if alone and self.cloud.mode == "speculative" and self.method not in WITH_DRAFTER:
            raise UserError(
                f"method {self.method} has no model that could go on alone: choose {', '.join(WITH_DRAFTER)}"
            )
        if self.cloud.gates and self.method != "draft":
            raise UserError(
                f"gates read the law of a drafter that drafts chains: choose method draft, not {self.method}"
            )
        if self.cloud.provisional and self.method == "ar":
            raise UserError("method ar drafts nothing that could be committed provisionally: choose another, or wait")

    @staticmethod
    def _way_out(name: str) -> str:
        return {"gamma": " (method ar decodes without drafts)", "temperature": " (0 is greedy)"}.get(name, "")

    @property
    def gamma_bounds(self) -> tuple[int, int]:
        """The shortest and the longest draft of a policy that varies gamma."""
        own = POLICIES[self.policy]
        return (
            own.least if self.gamma_min is None else self.gamma_min,
            own.most if self.gamma_max is None else self.gamma_max,
        )

    @property
    def models(self) -> tuple[str, str | None]:
        """Names of target and drafter."""
        if self.target:
            return self.target, self.drafter
        pair = PAIRS[self.pair or "bundled"]
        return pair.target, pair.drafter

    @property
    def encoder(self) -> bool:
        """Whether the target is known, without a look at it, to read its prompt in an encoder."""
        return self.models[0] in MODELS and MODELS[self.models[0]].encoder

    @property
    def target_spec(self) -> ModelSpec:
        """How to load the target."""
        return self._spec(self.models[0], self.quantization, self.device)

    @property
    def drafter_spec(self) -> ModelSpec | None:
        """How to load the drafter; None where the method needs none."""
        name = self.models[1]
        if self.method not in WITH_DRAFTER or name is None:
            return None
        return self._spec(name, self.drafter_quantization, self.drafter_device or self.device)

    def _spec(self, name: str, quantization: str, device: str) -> ModelSpec:
        return ModelSpec(name, self.dtype, quantization, device, REVISIONS.get(name))

    @property
    def needs_local_service(self) -> bool:
        """Whether the target is a service for which no address is given."""
        return self.cloud is not None and not self.cloud.alone and not self.cloud.remote

    @property
    def candidates(self) -> int:
        """First choices of the target that a verdict must hold: what the drafter learns from."""
        return self.filler_top_k if self.method == "nasd" else 1

    @property
    def running(self) -> Recipe:
        """What is carried out where one end works by itself: plain decoding there."""
        if self.cloud is None or self.cloud.mode == "speculative":
            return self
        if self.cloud.mode == "cloud_only":
            return replace(self, method="ar")
        return replace(self, pair=None, target=self.models[1], drafter=None, method="ar", cloud=None)

    @property
    def exact(self) -> bool:
        """Whether the text keeps the target's own law."""
        if self.cloud is not None:
            sampled = self.method in SAMPLED and self.temperature > 0 and RULES[self.rule].adjusts
            if self.cloud.mode != "speculative" or not self.cloud.exact(sampled):
                return self.cloud.exact(sampled)
        if self.method in ("ar", "beam"):
            return self.method == "ar"  # a search looks for one text; it draws none
        corrected = not self.skip_sample_adjustment or self.temperature == 0
        return RULES[self.rule].exact(SamplingParams(temperature=self.temperature)) and corrected


def refuse_with_encoder(method: str) -> None:
    """Raise `UserError` for a method that a target with an encoder cannot run."""
    if method in FORESTS:
        raise UserError(
            f"method {method} shows the target several texts at once, and a model with an encoder takes one: "
            "choose method draft, nasd, suffix or ar"
        )
    if method == "self":
        raise UserError("the target has an encoder, and self-speculation is for decoders: choose method nasd")
