"""Schema of all options, rules about several options, and derived values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import new_class
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError
from specdemo.core.options import OptionSet, option, options
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.core.rules import DEFAULT_RULE, RULES, Rule, check_rule, rule_names
from specdemo.drafters import METHODS, option_classes
from specdemo.external.address import ENGINES, EngineAddress
from specdemo.models.chat_template import at_time, parse_options
from specdemo.models.spec import (
    ACTIVATION_BITS,
    COPY_FORMS,
    DTYPES,
    QUANTIZATIONS,
    REMOVED_QUANTIZATIONS,
    SAME,
    HeadSpec,
    ModelSpec,
    is_gguf,
    smaller_copy,
)
from specdemo.models.zoo import CHAT_PAIR, MODELS, PAIRS, REVISIONS, named_models
from specdemo.option_effects import refuse_ineffective
from specdemo.remote.config import COLDEST, CloudConfig

_model_option = partial(option, group="Models and devices")
_drafter_option = partial(_model_option, applies="uses_model")
_length_option = partial(option, group="Draft length", applies="uses_policy")
_bound_option = partial(_length_option, limit="max_gamma")
_rule_option = partial(option, group="Rule", applies="drafts")
_sampling_option = partial(option, group="Sampling")


def _has_threshold(rule: Rule) -> bool:
    return rule.threshold is not None


def _shares_noise(rule: Rule) -> bool:
    return rule.shares_noise


@options()
class RunOptions(OptionSet):
    """Options of every run; methods add further options."""

    pair: str | None = option(
        None,
        "Drafter and target",
        f"a ready pair (default of run, chat and serve: {CHAT_PAIR} if installed, otherwise bundled; of other "
        "commands: bundled)",
        choices=PAIRS,
        basic=True,
    )
    target: str | None = _model_option(
        None, "Target", "target model: Hugging Face id, local directory or GGUF file", metavar="M"
    )
    drafter: str | None = _drafter_option(
        None,
        "Drafter",
        "draft model: Hugging Face id, local directory or GGUF file; same: the target, quantised",
        metavar="M",
    )
    head: str | None = _model_option(
        None,
        "Head",
        "drafting head for the target: Hugging Face id or local directory",
        metavar="M",
        applies="uses_head",
    )
    method: str = option("draft", "Method", "decoding method", choices=METHODS, basic=True)
    gamma: int = option(
        4,
        "Draft length γ",
        "longest draft of the first step, and of the others unless the policy changes it",
        bounds=(1, 64),
        slider=(1, 64, 1),
        hint=" (method ar decodes without drafts)",
        basic=True,
        limit="max_gamma",
        applies="uses_policy",
    )
    policy: str = _length_option("fixed", "Draft-length policy", choices=POLICIES)
    gamma_min: int | None = _bound_option(
        None,
        "Shortest draft (0: default of the policy)",
        "shortest draft of policies other than fixed; 0: default",
        bounds=(0, 64),
    )
    gamma_max: int | None = _bound_option(
        None, "Longest draft (0: default of the policy)", "longest draft of policies other than fixed", bounds=(1, 64)
    )
    egag_ema_beta: float = _length_option(
        0.5,
        "EGAG: weight of past entropy",
        "weight of past entropy in policy egag; 0 uses the current entropy",
        bounds=(0, 0.99),
        slider=(0, 0.95, 0.05),
        policies=("egag",),
    )
    first_target: bool = option(
        True,
        "First token from the target alone",
        "process the prompt and choose the first token without a draft",
        group="Draft length",
        applies="drafts",
    )
    rule: str = _rule_option(
        DEFAULT_RULE,
        "Acceptance rule",
        f"acceptance rule; method ar takes {rule_names(_shares_noise)} only, as the baseline of its runs",
        choices=RULES,
    )
    temperature: float = option(
        0.5,
        "Temperature",
        "0 is greedy",
        bounds=(0, 100),
        slider=(0, 2, 0.05),
        hint=" (0 is greedy)",
        basic=True,
        applies="samples",
    )  # the bundled pair writes best with this top-p
    top_k: int = _sampling_option(
        0, "Top-k (0: off)", "sample from the K most probable tokens; 0 is off", bounds=(0, 1 << 20), slider=(0, 100, 1)
    )
    top_p: float = _sampling_option(
        0.95,
        "Top-p",
        "sample from the smallest set of tokens with this probability",
        bounds=(0.001, 1),
        slider=(0.05, 1, 0.05),
        applies="samples",
    )
    drafter_temperature: float | None = _sampling_option(
        None,
        "Temperature of the drafter (0: the same)",
        "temperature of the drafts; exact, but fewer are accepted (default: that of the target)",
        bounds=(0, 100),
        step=0.05,
        applies="sampled",
    )
    drafter_top_p: float | None = _sampling_option(
        None,
        "Top-p of the drafter (0: the same)",
        "top-p of the drafts; exact, but fewer are accepted (default: that of the target)",
        bounds=(0.001, 1),
        step=0.05,
        applies="sampled",
    )
    repetition_penalty: float = _sampling_option(
        1.0,
        "Repetition penalty (1: off)",
        "divides logits of earlier tokens; 1 is off",
        bounds=(0.01, 100),
        step=0.05,
        hint=" (1 is off)",
    )
    bad_words: tuple[str, ...] = _sampling_option(
        (),
        "Banned words",
        "text never to produce, in any tokenisation; may be repeated",
        flag="--bad-word",
        metavar="TEXT",
    )
    stop_texts: tuple[str, ...] = _sampling_option(
        (),
        "Stop texts",
        "end the text before this text; its tokens remain in the trace; may be repeated",
        flag="--stop",
        metavar="TEXT",
    )
    stop_tokens: tuple[int, ...] = _sampling_option(
        (),
        "Stop tokens",
        "id of a token that ends the text, in addition to those of the model; may be repeated",
        flag="--stop-token",
        metavar="ID",
    )
    seed: int = _sampling_option(
        0, "Seed", "seed of all random streams", bounds=(-(1 << 63), (1 << 63) - 1), applies="samples"
    )
    max_tokens: int = option(
        256,
        "Max new tokens",
        "longest output, in tokens",
        bounds=(1, 1 << 20),
        slider=(1, 1024, 1),
        basic=True,
        limit="max_tokens",
    )
    top: int = option(
        0,
        "Recorded tokens per distribution (0: none)",
        "write the N most probable tokens of every distribution into the trace",
        bounds=(0, 64),
        slider=(0, 16, 1),
        group="Recording",
        metavar="N",
        applies="samples",
    )
    dtype: str = _model_option("auto", "Data type", "data type of weights and activations", choices=DTYPES, host=True)
    universal: bool = _drafter_option(
        False,
        "Re-encode drafts of another vocabulary",
        "re-encode the text of a drafter of another vocabulary",
        applies="may_reencode",
    )
    quantization: str = _model_option(
        "none", "Quantisation of the target", choices=QUANTIZATIONS, removed=REMOVED_QUANTIZATIONS
    )
    drafter_quantization: str = _drafter_option(
        "none",
        "Quantisation of the drafter",
        "quantisation of the drafter (same: int8 unless set)",
        choices=QUANTIZATIONS,
        removed=REMOVED_QUANTIZATIONS,
        noun="quantization",
    )
    activations: str = _model_option(
        "auto",
        "Activations of GGUF files",
        "bits of the inputs of quantised weights of GGUF files",
        choices=ACTIVATION_BITS,
        host=True,
    )
    device: str = _model_option("auto", "Device", "device: auto, cpu, cuda, cuda:N, mps, or spread over all", host=True)
    drafter_device: str | None = _drafter_option(
        None,
        "Device of the drafter",
        "device of the drafter (default: that of the target)",
        host=True,
        metavar="DEVICE",
    )
    threshold: float | None = _rule_option(
        None,
        "Threshold (0: default of the rule)",
        f"threshold of rules {' and '.join(rule_names(_has_threshold).rsplit(', ', 1))}",
        bounds=(0.001, 1),
        step=0.05,
        lossy=True,
    )
    chat: bool = option(
        False, "Apply the chat template", "send the prompt as a user message in the model's chat template", group="Chat"
    )
    template_options: tuple[str, ...] = option(
        (),
        "Options of the chat template",
        "variable of the chat template, such as enable_thinking=false; may be repeated",
        group="Chat",
        flag="--template-option",
        metavar="NAME=VALUE",
    )
    skip_sample_adjustment: bool = _rule_option(
        False, "Sample corrections from p", "sample corrections from p, not from the residual", lossy=True
    )
    use_cache: bool = option(
        True,
        "KV cache",
        "without it every pass computes the complete text, for comparison; AR baselines have a cache",
        group="Recording",
        host=True,
    )
    external: str | None = option(
        None,
        "Server of another engine",
        f"decode with another engine that serves the target: ENGINE=URL, such as {ENGINES[0]}=http://127.0.0.1:8080",
        group="Other engines",
        metavar="SERVER",
    )
    cloud: CloudConfig | None = None  # the target runs in this process if absent

    def __post_init__(self) -> None:
        if self.drafter == SAME and self.drafter_quantization == "none":
            object.__setattr__(self, "drafter_quantization", COPY_FORMS[0])


TEXT_OPTIONS = {  # they decide an exact text
    name: declared
    for name, declared in RunOptions.OPTIONS.items()
    if name != "method" and declared.applies in ("", "samples") and declared.group not in ("Recording", "Other engines")
}


def _models_fit(chosen: Recipe) -> None:
    other = None if chosen.drafter == SAME else chosen.drafter
    if chosen.pair and (chosen.target or other):
        raise UserError("give either a pair or a target and a drafter, not both")
    if other and not chosen.target:
        raise UserError("a drafter needs a target: give both")
    method = METHODS[chosen.method]
    if method.drafter == "head" and chosen.head_spec is None:
        raise UserError(f"method {method.name} needs a head: set head to a directory or Hugging Face id")
    drafting = chosen.drafter_spec or chosen.head_spec
    if method.uses_model and drafting is None and not method.optional_model:
        if chosen.target or chosen.pair is None:
            remedy = ": add it (same: a quantised copy), or choose method nasd, self or ar"
        else:
            own = PAIRS[chosen.pair].method
            remedy = f", and pair {chosen.pair} has none: choose its method {own}, or pair bundled"
        raise UserError(f"method {chosen.method} needs a drafter{remedy}")
    if chosen.encoder and chosen.head_spec is not None and not method.decoder_only:
        raise UserError("the target has an encoder, and heads are for decoders: choose method nasd, or omit head")
    if chosen.encoder:
        refuse_with_encoder(chosen.method)  # raise before gigabytes are downloaded


def _activations_fit(chosen: Recipe) -> None:
    if chosen.activations == "8" and not any(is_gguf(name or "") for name in chosen.models):
        raise UserError(f"activations 8 needs a GGUF file: choose pair {CHAT_PAIR}, or auto")


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
    for name in ("temperature", "drafter_temperature"):
        if 0 < (value := getattr(chosen, name) or 0.0) < COLDEST:
            raise UserError(f"{name} must be 0 or at least {COLDEST}, not {value} (0 is greedy)")
    for name in ("drafter_temperature", "drafter_top_p"):
        if chosen.universal and getattr(chosen, name) is not None:
            raise UserError(f"{name} has no effect with universal, whose drafts are certain: omit one of them")
    for name in ("bad_words", "stop_texts"):
        texts = getattr(chosen, name)
        if not all(texts):
            raise UserError(f"{name} contains an empty text: remove it")
        if len(texts) > 64 or any(len(text) > 300 for text in texts):
            raise UserError(f"{name} has more than 64 texts or 300 characters in a text: shorten the list")
    if len(chosen.stop_tokens) > 64:
        raise UserError("stop_tokens has more than 64 ids: shorten the list")


def _template_options_fit(chosen: Recipe) -> None:
    parse_options(chosen.template_options)


def _cloud_fits_method(chosen: Recipe) -> None:
    if chosen.cloud is None:
        return
    method, cloud = METHODS[chosen.method], chosen.cloud
    if not chosen.use_cache:
        raise UserError("use_cache can be disabled for a local target only: enable it, or choose mode off")
    if chosen.head_spec is not None:
        raise UserError("heads need a local target: choose method nasd or draft, or mode off")
    if method.local_target:
        raise UserError(f"method {method.name} needs a local target: choose another method, or mode off")
    alone = cloud.mode == "edge_only" or cloud.on_loss == "edge"
    if alone and chosen.models[1] is None:
        raise UserError("the edge has no model to continue alone: give a drafter")
    if alone and cloud.mode == "speculative" and not method.uses_model:
        names = ", ".join(other.name for other in METHODS.values() if other.uses_model)
        raise UserError(f"method {method.name} has no model that could continue alone: choose {names}")
    if cloud.gates and not method.gates:
        names = ", ".join(other.name for other in METHODS.values() if other.gates)
        raise UserError(f"gates need the distributions of a draft model: choose method {names}, not {method.name}")
    if cloud.gates and chosen.universal:
        raise UserError("gates need drafts in the target's vocabulary: disable universal, or remove the gates")
    if cloud.provisional and not method.drafts:
        raise UserError(f"method {method.name} has no drafts to commit after the deadline: choose another method")


def _external_fits(chosen: Recipe) -> None:
    if chosen.external is None:
        return
    server = EngineAddress.parse(chosen.external)
    if chosen.cloud is not None:
        raise UserError(f"{server} decodes alone: omit external, or choose mode off")
    if chosen.bad_words:
        raise UserError(f"bad_words needs a target on this machine, not {server}: omit one of them")


if TYPE_CHECKING:  # a test verifies that both branches have the same classes
    from specdemo.drafters.beam import BeamOptions
    from specdemo.drafters.corpus import CorpusOptions
    from specdemo.drafters.lookahead import LookaheadOptions
    from specdemo.drafters.method import StoreOptions
    from specdemo.drafters.ngram import NGramOptions
    from specdemo.drafters.self_speculation import SelfOptions
    from specdemo.drafters.tree import TreeOptions

    class MethodOptions(
        BeamOptions, CorpusOptions, LookaheadOptions, SelfOptions, TreeOptions, StoreOptions, NGramOptions
    ):
        """Options of all methods."""
else:
    MethodOptions = new_class("MethodOptions", tuple(reversed(option_classes())))


@options(
    checks=(
        *(_models_fit, _activations_fit, _gamma_bounds_fit, _rule_fits),
        *(_sampling_fits, _template_options_fit, _cloud_fits_method, _external_fits),
    ),
    check_named=refuse_ineffective,
)
class Recipe(MethodOptions, RunOptions):
    """All options of a run, of the bundled pair by default.

    Raises `UserError` for invalid values, and for named options without effect unless copied by `dataclasses.replace`.
    """

    def at(self, now: datetime) -> Recipe:
        """Return the recipe with this time for its template."""
        return replace(self, template_options=at_time(self.template_options, now)) if self.chat else self

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
        """Specification of the draft model, `None` if the method needs none."""
        return self.second_spec if METHODS[self.method].uses_model and self.head_spec is None else None

    @property
    def head_spec(self) -> HeadSpec | None:
        """Specification of the head, `None` if the method uses none."""
        offered = PAIRS[self.pair].head if self.pair and not self.drafter and self.cloud is None else None
        name = (self.head or offered) if METHODS[self.method].uses_head else None
        return None if name is None else HeadSpec(name, self.target_spec)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """Specification of each model, by role."""
        drafter = self.drafter_spec
        return {"target": self.target_spec, **({} if drafter is None else {"drafter": drafter})}

    @property
    def second_spec(self) -> ModelSpec | None:
        name, device = self.models[1], self.drafter_device or self.device
        if self.drafter == SAME:
            return smaller_copy(self.target_spec, self.drafter_quantization, device)
        return None if name is None else self._spec(name, self.drafter_quantization, device)

    def _spec(self, name: str, quantization: str, device: str) -> ModelSpec:
        activations = self.activations if is_gguf(name) else "16"
        return ModelSpec(name, self.dtype, quantization, device, REVISIONS.get(name), activations)

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
        edge = self.second_spec
        assert edge is not None
        alone = replace(
            self, pair=None, target=edge.name, drafter=None, method="ar", cloud=None, activations=edge.activations
        )
        return replace(alone, quantization=edge.quantization, device=edge.device)

    @property
    def server(self) -> EngineAddress | None:
        """Address of the other engine, if one decodes."""
        return None if self.external is None else EngineAddress.parse(self.external)

    @property
    def is_baseline(self) -> bool:
        """Return True for AR decoding by this program."""
        return self.method == "ar" and self.external is None

    @property
    def exact(self) -> bool:
        """Return True if the text follows the target's distribution; unknown of other engines, so False."""
        from specdemo.core.sampling import SamplingParams

        if self.external is not None:
            return False
        method, rule = METHODS[self.method], RULES[self.rule]
        if self.cloud is not None:
            drafting = self.temperature if self.drafter_temperature is None else self.drafter_temperature
            sampled = method.sampled and min(self.temperature, drafting) > 0 and rule.needs_rows
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


@dataclass(frozen=True)
class Preset:
    """Named values of options; `link`: with a remote target."""

    title: str
    values: Mapping[str, Any]
    link: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` with those of the preset that they lack."""
        cloud = values.get("cloud")
        drafting = METHODS.get(values.get("method", "draft"))
        if cloud is None or cloud.mode != "speculative" or not (drafting and drafting.drafts):
            return {**self.values, **values}
        return {**self.values, **values, "cloud": replace(cloud, **self.link)}


PRESETS = {
    "sources": Preset(
        "the practice guide's defaults: T = 1, top-p 0.9, penalty 1.1, dynamic γ from 6, with --remote --provisional",
        {
            "temperature": 1.0,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "gamma": 6,
            "policy": "dynamic",
            "egag_ema_beta": 0.0,
        },
        {"provisional": True},  # deadline_ms has the default 400 of the guide
    )
}
