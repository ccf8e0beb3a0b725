"""Schema of all options, rules about several options, and derived values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import new_class
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError
from specdemo.core.options import Option, OptionSet, option, options
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.core.rules import DEFAULT_RULE, RULES, Rule, check_rule, rule_names
from specdemo.drafters import METHODS, option_classes
from specdemo.models.spec import COPY_FORMS, DTYPES, QUANTIZATIONS, SAME, ModelSpec, smaller_copy
from specdemo.models.zoo import CHAT_PAIR, MODELS, PAIRS, REVISIONS, named_models
from specdemo.remote.config import COLDEST, CloudConfig

_SIZES = {"low": 1, "high": 1 << 20}


def _has_threshold(rule: Rule) -> bool:
    return rule.threshold is not None


@options()
class RunOptions(OptionSet):
    """Options of every run; methods add further options."""

    pair: str | None = option(
        None,
        "Drafter and target",
        f"a ready pair (default: {CHAT_PAIR}, with a method: bundled)",
        choices=PAIRS,
        basic=True,
    )  # neither pair nor models select the bundled pair
    target: str | None = option(
        None,
        "Target",
        "target model: Hugging Face id, local directory or GGUF file",
        group="Models and devices",
        metavar="M",
    )
    drafter: str | None = option(
        None,
        "Drafter",
        "draft model: Hugging Face id, local directory or GGUF file; same: the target, quantised",
        group="Models and devices",
        metavar="M",
        applies="second_model",
    )
    method: str = option("draft", "Method", "decoding method", choices=METHODS, basic=True)
    gamma: int = option(
        4,
        "Draft length γ",
        "longest draft of the first step, and of the others unless the policy changes it",
        low=1,
        high=64,
        slider=(1, 16, 1),
        hint=" (method ar decodes without drafts)",
        basic=True,
        limit="max_gamma",
        applies="uses_policy",
    )
    policy: str = option(
        "fixed",
        "Draft-length policy",
        "draft-length policy",
        choices=POLICIES,
        group="Draft length",
        applies="uses_policy",
    )
    gamma_min: int | None = option(
        None,
        "Shortest draft (0: default of the policy)",
        "shortest draft of policies other than fixed",
        low=0,
        high=64,
        group="Draft length",
        limit="max_gamma",
        applies="uses_policy",
    )
    gamma_max: int | None = option(
        None,
        "Longest draft (0: default of the policy)",
        "longest draft of policies other than fixed",
        low=1,
        high=64,
        group="Draft length",
        limit="max_gamma",
        applies="uses_policy",
    )
    egag_ema_beta: float = option(
        0.5,
        "EGAG: weight of past entropy",
        "weight of past entropy in policy egag; 0 uses the current entropy",
        low=0,
        high=0.99,
        slider=(0, 0.95, 0.05),
        group="Draft length",
        applies="uses_policy",
        policies=("egag",),
    )
    first_target: bool = option(
        True,
        "First token from the target alone",
        "process the prompt and choose the first token without a draft",
        group="Draft length",
        applies="drafts",
    )
    rule: str = option(
        DEFAULT_RULE, "Acceptance rule", "acceptance rule", choices=RULES, group="Rule", applies="drafts"
    )
    temperature: float = option(
        0.5,
        "Temperature",
        "0 is greedy",
        low=0,
        high=100,
        slider=(0, 2, 0.05),
        hint=" (0 is greedy)",
        basic=True,
        applies="samples",
    )  # the bundled pair writes best with this top-p
    top_k: int = option(
        0,
        "Top-k (0: off)",
        "sample from the K most probable tokens; 0 is off",
        low=0,
        high=1 << 20,
        slider=(0, 100, 1),
        group="Sampling",
    )
    top_p: float = option(
        0.95,
        "Top-p",
        "sample from the smallest set of tokens with this probability",
        low=0.001,
        high=1,
        slider=(0.05, 1, 0.05),
        group="Sampling",
        applies="samples",
    )
    repetition_penalty: float = option(
        1.0,
        "Repetition penalty (1: off)",
        "divides logits of earlier tokens; 1 is off",
        low=0.01,
        high=100,
        step=0.05,
        hint=" (1 is off)",
        group="Sampling",
    )
    bad_words: tuple[str, ...] = option(
        (),
        "Banned words",
        "text never to produce, in any tokenisation; may be repeated",
        flag="--bad-word",
        metavar="TEXT",
        group="Sampling",
    )
    seed: int = option(
        0,
        "Seed",
        "seed of all random streams",
        low=-(1 << 63),
        high=(1 << 63) - 1,
        group="Sampling",
        applies="samples",
    )
    max_tokens: int = option(
        256,
        "Max new tokens",
        "longest output, in tokens",
        **_SIZES,
        slider=(1, 1024, 1),
        basic=True,
        limit="max_tokens",
    )
    top: int = option(
        0,
        "Recorded tokens per distribution (0: none)",
        "write the N most probable tokens of every distribution into the trace",
        low=0,
        high=64,
        slider=(0, 16, 1),
        group="Recording",
        metavar="N",
        applies="samples",
    )
    dtype: str = option(
        "auto",
        "Data type",
        "data type of weights and activations",
        choices=DTYPES,
        group="Models and devices",
        host=True,
    )
    universal: bool = option(
        False,
        "Re-encode drafts of another vocabulary",
        "re-encode the text of a drafter of another vocabulary",
        group="Models and devices",
        applies="second_model",
    )
    quantization: str = option("none", "Quantisation of the target", choices=QUANTIZATIONS, group="Models and devices")
    drafter_quantization: str = option(
        "none",
        "Quantisation of the drafter",
        "quantisation of the drafter (same: int8 unless set)",
        choices=QUANTIZATIONS,
        noun="quantization",
        group="Models and devices",
        applies="second_model",
    )
    device: str = option(
        "auto",
        "Device",
        "device: auto, cpu, cuda, cuda:N, mps, or spread over all",
        group="Models and devices",
        host=True,
    )
    drafter_device: str | None = option(
        None,
        "Device of the drafter",
        "device of the drafter (default: that of the target)",
        group="Models and devices",
        host=True,
        metavar="DEVICE",
        applies="second_model",
    )
    threshold: float | None = option(
        None,
        "Threshold (0: default of the rule)",
        f"threshold of rules {' and '.join(rule_names(_has_threshold).rsplit(', ', 1))}",
        above=0,
        high=1,
        step=0.05,
        group="Rule",
        lossy=True,
        applies="drafts",
    )
    chat: bool = option(
        False, "Apply the chat template", "send the prompt as a user message in the model's chat template", group="Chat"
    )
    skip_sample_adjustment: bool = option(
        False,
        "Sample corrections from p",
        "sample corrections from p, not from the residual",
        group="Rule",
        lossy=True,
        applies="drafts",
    )
    cloud: CloudConfig | None = None  # the target runs in this process if absent

    def __post_init__(self) -> None:
        if self.drafter == SAME and self.drafter_quantization == "none":
            object.__setattr__(self, "drafter_quantization", COPY_FORMS[0])


def _models_fit(chosen: Recipe) -> None:
    other = None if chosen.drafter == SAME else chosen.drafter
    if chosen.pair and (chosen.target or other):
        raise UserError("give either a pair or a target and a drafter, not both")
    if other and not chosen.target:
        raise UserError("a drafter needs a target: give both")
    if METHODS[chosen.method].second_model and chosen.drafter_spec is None:
        remedy = "add it (same: a quantised copy)" if chosen.target else "choose pair bundled"
        raise UserError(f"method {chosen.method} needs a drafter: {remedy}, or choose method nasd, self or ar")
    if chosen.encoder:
        refuse_with_encoder(chosen.method)  # raise before gigabytes are downloaded


def _gamma_bounds_fit(chosen: Recipe) -> None:
    for name in ("gamma_min", "gamma_max"):
        if getattr(chosen, name) is not None and not POLICIES[chosen.policy].bounded:
            raise UserError(f"{name} has no effect with policy {chosen.policy}: set gamma, or choose policy dynamic")
    if chosen.gamma_bounds[0] > chosen.gamma_bounds[1]:
        raise UserError("gamma_min {} is above gamma_max {}: exchange them".format(*chosen.gamma_bounds))


def _rule_fits(chosen: Recipe) -> None:
    if chosen.threshold is not None and RULES[chosen.rule].threshold is None:
        raise UserError(f"rule {chosen.rule} has no threshold: choose {rule_names(_has_threshold)}")
    check_rule(chosen.rule, adjust=not chosen.skip_sample_adjustment, forest=METHODS[chosen.method].shape == "forest")


def _sampling_fits(chosen: Recipe) -> None:
    if 0 < chosen.temperature < COLDEST:
        raise UserError(f"temperature must be 0 or at least {COLDEST}, not {chosen.temperature} (0 is greedy)")
    if not all(chosen.bad_words):
        raise UserError("bad_words contains an empty text: remove it")
    if len(chosen.bad_words) > 64 or any(len(word) > 300 for word in chosen.bad_words):
        raise UserError("bad_words has more than 64 texts or 300 characters in a text: shorten the list")


def _cloud_fits_method(chosen: Recipe) -> None:
    if chosen.cloud is None:
        return
    method, cloud = METHODS[chosen.method], chosen.cloud
    if method.local_target:
        raise UserError(f"method {method.name} needs a local target: choose another method, or mode off")
    alone = cloud.mode == "edge_only" or cloud.on_loss == "edge"
    if alone and chosen.models[1] is None:
        raise UserError("the edge has no model to continue alone: give a drafter")
    if alone and cloud.mode == "speculative" and not method.second_model:
        names = ", ".join(one.name for one in METHODS.values() if one.second_model)
        raise UserError(f"method {method.name} has no model that could continue alone: choose {names}")
    if cloud.gates and not method.gates:
        names = ", ".join(one.name for one in METHODS.values() if one.gates)
        raise UserError(f"gates need the distributions of a draft model: choose method {names}, not {method.name}")
    if cloud.gates and chosen.universal:
        raise UserError("gates need drafts in the target's vocabulary: disable universal, or remove the gates")
    if cloud.provisional and not method.drafts:
        raise UserError(f"method {method.name} has no drafts to commit after the deadline: choose another method")


_MODEL_OPTIONS = {name for name, one in RunOptions.OPTIONS.items() if one.group == "Models and devices"} - {"device"}


def runs_chat_pair(values: Mapping[str, Any]) -> bool:
    return not values.keys() & {"pair", "method", "cloud", *_MODEL_OPTIONS}


CHECKS = (_models_fit, _gamma_bounds_fit, _rule_fits, _sampling_fits, _cloud_fits_method)


if TYPE_CHECKING:  # a test verifies that both branches have the same classes
    from specdemo.drafters.beam import BeamOptions
    from specdemo.drafters.lookahead import LookaheadOptions
    from specdemo.drafters.method import StoreOptions
    from specdemo.drafters.ngram import NGramOptions
    from specdemo.drafters.self_speculation import SelfOptions
    from specdemo.drafters.tree import TreeOptions

    class MethodOptions(BeamOptions, LookaheadOptions, SelfOptions, TreeOptions, StoreOptions, NGramOptions):
        """Options of all methods."""
else:
    MethodOptions = new_class("MethodOptions", tuple(reversed(option_classes())))


@options(checks=CHECKS)
class Recipe(MethodOptions, RunOptions):
    """All options of a run. Raises `UserError` for invalid values."""

    @property
    def gamma_bounds(self) -> tuple[int, int]:
        return self.draft_lengths.least, self.draft_lengths.most

    @property
    def draft_lengths(self) -> DraftLengths:
        return POLICIES[self.policy].lengths(self.gamma, self.gamma_min, self.gamma_max, self.egag_ema_beta)

    @property
    def models(self) -> tuple[str, str | None]:
        return named_models(self.pair, self.target or None, self.drafter)

    @property
    def encoder(self) -> bool:
        """Return True if the target is listed as an encoder-decoder model."""
        return self.models[0] in MODELS and MODELS[self.models[0]].encoder

    @property
    def target_spec(self) -> ModelSpec:
        return self._spec(self.models[0], self.quantization, self.device)

    @property
    def drafter_spec(self) -> ModelSpec | None:
        """Specification of the drafter, `None` if the method needs none."""
        return self._second_spec if METHODS[self.method].second_model else None

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """Specification of each model, by role."""
        drafter = self.drafter_spec
        return {"target": self.target_spec, **({} if drafter is None else {"drafter": drafter})}

    @property
    def _second_spec(self) -> ModelSpec | None:
        name, device = self.models[1], self.drafter_device or self.device
        if self.drafter == SAME:
            return smaller_copy(self.target_spec, self.drafter_quantization, device)
        return None if name is None else self._spec(name, self.drafter_quantization, device)

    def _spec(self, name: str, quantization: str, device: str) -> ModelSpec:
        return ModelSpec(name, self.dtype, quantization, device, REVISIONS.get(name))

    @property
    def needs_local_service(self) -> bool:
        return self.cloud is not None and not self.cloud.alone and not self.cloud.remote

    @property
    def running(self) -> Recipe:
        """Executed recipe: AR decoding if edge or cloud decodes alone."""
        if self.cloud is None or self.cloud.mode == "speculative":
            return self
        if self.cloud.mode == "cloud_only":
            return replace(self, method="ar")
        edge = self._second_spec
        assert edge is not None
        alone = replace(self, pair=None, target=edge.name, drafter=None, method="ar", cloud=None)
        return replace(alone, quantization=edge.quantization, device=edge.device)

    @property
    def exact(self) -> bool:
        """Return True if the text follows the target's distribution."""
        from specdemo.core.sampling import SamplingParams

        method, rule = METHODS[self.method], RULES[self.rule]
        if self.cloud is not None:
            sampled = method.sampled and self.temperature > 0 and rule.adjusts
            if self.cloud.mode != "speculative" or not self.cloud.exact(sampled):
                return self.cloud.exact(sampled)
        if not method.drafts:
            return method.exact
        corrected = not self.skip_sample_adjustment or self.temperature == 0
        return method.exact and rule.exact(SamplingParams(temperature=self.temperature)) and corrected


def refuse_with_encoder(name: str) -> None:
    """Raise `UserError` for a method that a target with an encoder cannot run."""
    method = METHODS[name]
    if method.shape == "forest":
        raise UserError(
            f"method {name} verifies several continuations at once, and a model with an encoder takes one: "
            "choose method draft, nasd, suffix or ar"
        )
    if method.decoder_only:
        raise UserError(f"the target has an encoder, and method {name} is for decoders: choose method nasd")


def methods_with(declared: Option) -> list[str]:
    """Return the methods for which an option has an effect."""
    if declared.name in RunOptions.OPTIONS:
        return [name for name, method in METHODS.items() if getattr(method, declared.applies or "name")]
    return [name for name, method in METHODS.items() if declared.name in method.option_names]


_SHARED = ("gamma", "policy", "rule")  # scripts give them with every method


def refuse_ineffective(chosen: Recipe, given: Mapping[str, Any]) -> None:
    """Raise `UserError` for given options without effect, except those of the models and the `_SHARED` ones."""
    for name, declared in Recipe.OPTIONS.items():
        exempt = name in _SHARED or declared.group == "Models and devices" or declared.applies == "samples"
        if name not in given or exempt:
            continue
        methods = methods_with(declared)
        if chosen.method not in methods:
            raise UserError(f"{name} has no effect with method {chosen.method}: choose {', '.join(methods)}")
        if declared.policies and chosen.policy not in declared.policies:
            raise UserError(f"{name} has no effect with policy {chosen.policy}: choose {', '.join(declared.policies)}")


@dataclass(frozen=True)
class Preset:
    """Named values of options."""

    title: str
    values: Mapping[str, Any]


PRESETS = {
    "sources": Preset(
        "the practice guide's defaults: T = 1, top-p 0.9, penalty 1.1, dynamic γ from 6",
        {
            "temperature": 1.0,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "gamma": 6,
            "policy": "dynamic",
            "egag_ema_beta": 0.0,
        },
    ),
}
