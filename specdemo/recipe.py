"""Schema of all options of a run, and the plan of a recipe: what its values decode with, and what they guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import new_class
from typing import TYPE_CHECKING, Any, Literal

from specdemo.core.options import OptionSet, option, options
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.core.rules import DEFAULT_RULE, RULES, check_rule, rule_names
from specdemo.drafters import METHODS, option_classes
from specdemo.drafters.method import Method
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
from specdemo.option_rules import CONFLICTS, EFFECTS, draft_lengths, refuse_with_encoder
from specdemo.remote.config import CloudConfig

Role = Literal["target", "drafter"]

_model_option = partial(option, group="Models and devices")
_drafter_option = partial(_model_option, applies="uses_model")
_length_option = partial(option, group="Draft length", applies="uses_policy")
_bound_option = partial(_length_option, limit="max_gamma")
_rule_option = partial(option, group="When a guess is kept", applies="drafts")
_sampling_option = partial(option, group="Sampling")
_RULES_WITH_THRESHOLD = rule_names(lambda rule: rule.threshold is not None)
_RULES_WITH_SHARED_NOISE = rule_names(lambda rule: rule.shares_noise)


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
        "Add-on that guesses (head)",
        "drafting head for the target: Hugging Face id or local directory",
        metavar="M",
        applies="uses_head",
    )
    method: str = option("draft", "Method", "decoding method", choices=METHODS, basic=True)
    gamma: int = option(
        4,
        "Guesses at a time",
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
        f"acceptance rule; method ar takes {_RULES_WITH_SHARED_NOISE} only, as the baseline of its runs",
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
    min_p: float = _sampling_option(
        0.0,
        "Min-p (0: off)",
        "sample from tokens with at least this share of the largest probability; 0 is off",
        bounds=(0, 1),
        slider=(0, 1, 0.05),
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
        group="What is recorded",
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
        f"threshold of rules {' and '.join(_RULES_WITH_THRESHOLD.rsplit(', ', 1))}",
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
        group="What is recorded",
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
    if name != "method"
    and declared.applies in ("", "samples")
    and declared.group not in ("What is recorded", "Other engines")
}


if TYPE_CHECKING:  # a test verifies that both branches have the same classes
    from specdemo.drafters.autoregressive import BeamOptions
    from specdemo.drafters.chain import SelfOptions
    from specdemo.drafters.lookahead import LookaheadOptions
    from specdemo.drafters.method import StoreOptions
    from specdemo.drafters.ngram import CorpusOptions, NGramOptions
    from specdemo.drafters.tree import TreeOptions

    class MethodOptions(
        BeamOptions, CorpusOptions, LookaheadOptions, SelfOptions, TreeOptions, StoreOptions, NGramOptions
    ):
        """Options of all methods."""
else:
    MethodOptions = new_class("MethodOptions", tuple(reversed(option_classes())))


def _check(chosen: Recipe) -> None:
    """Raise `UserError` for values that are refused by themselves, and for methods without use for the models."""
    if chosen.encoder:
        refuse_with_encoder(chosen)  # before gigabytes are downloaded
    if METHODS[chosen.method].uses_model and chosen.head_name is None:
        chosen.spec("drafter")
    forest = METHODS[chosen.method].shape == "forest"
    check_rule(chosen.rule, adjust=not chosen.skip_sample_adjustment, forest=forest)
    parse_options(chosen.template_options)
    if chosen.external is not None:
        EngineAddress.parse(chosen.external)


@options(rules=CONFLICTS, effects=EFFECTS, check=_check)
class Recipe(MethodOptions, RunOptions):
    """All options of a run, of the bundled pair by default; `plan_run` derives what they run.

    Raises `UserError` for invalid values, and for named options without effect unless copied by `dataclasses.replace`.
    """

    def at(self, now: datetime) -> Recipe:
        """Return the recipe with this time for its template."""
        return replace(self, template_options=at_time(self.template_options, now)) if self.chat else self

    @property
    def models(self) -> tuple[str, str | None]:
        """Names of target and drafter."""
        return named_models(self.pair, self.target or None, self.drafter)

    @property
    def encoder(self) -> bool:
        """Return True if the target is listed as an encoder-decoder model."""
        return self.models[0] in MODELS and MODELS[self.models[0]].encoder

    @property
    def head_name(self) -> str | None:
        """Name of the head, `None` without a head."""
        offered = PAIRS[self.pair].head if self.pair and not self.drafter and self.cloud is None else None
        return (self.head or offered) if METHODS[self.method].uses_head else None

    def spec(self, role: Role) -> ModelSpec | None:
        """Return the specification of a named model, which the method need not use."""
        target, drafter = self.models
        if role == "target":
            return self._spec(target, self.quantization, self.device)
        device = self.drafter_device or self.device
        if self.drafter == SAME:
            return smaller_copy(self._spec(target, self.quantization, self.device), self.drafter_quantization, device)
        return None if drafter is None else self._spec(drafter, self.drafter_quantization, device)

    def _spec(self, name: str, quantization: str, device: str) -> ModelSpec:
        activations = self.activations if is_gguf(name) else "16"
        return ModelSpec(name, self.dtype, quantization, device, REVISIONS.get(name), activations)


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


@dataclass(frozen=True)
class RunPlan:
    """Executed method, models, connection and draft lengths of a recipe."""

    recipe: Recipe
    method: Method  # ar if edge or cloud decodes alone
    target: ModelSpec  # model of the text: that of the edge if it decodes alone
    drafter: ModelSpec | None
    head: HeadSpec | None
    cloud: CloudConfig | None  # service of the target; None if the target is in this process
    server: EngineAddress | None  # server of another engine, which decodes
    lengths: DraftLengths

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Models in this process, by role."""
        models = {} if self.cloud is not None else {"target": self.target}
        return models if self.drafter is None else {**models, "drafter": self.drafter}

    @property
    def edge_alone(self) -> bool:
        """True if the draft model decodes in place of the target."""
        return self.recipe.cloud is not None and self.recipe.cloud.edge_only

    @property
    def needs_local_service(self) -> bool:
        return self.cloud is not None and not self.cloud.remote

    @property
    def baseline(self) -> bool:
        """True for AR decoding by this program."""
        return self.recipe.method == "ar" and self.server is None

    @property
    def exact(self) -> bool:
        """True if the text follows the target's distribution; unknown of other engines, so False."""
        recipe, cloud = self.recipe, self.recipe.cloud
        if self.server is not None:
            return False
        if cloud is not None and (cloud.mode != "speculative" or not cloud.exact(self._sends_rows)):
            return cloud.exact(self._sends_rows)
        if not self.method.drafts:
            return self.method.exact
        from specdemo.core.sampling import SamplingParams

        corrected = not recipe.skip_sample_adjustment or recipe.temperature == 0
        return self.method.exact and RULES[recipe.rule].exact(SamplingParams(recipe.temperature)) and corrected

    @property
    def fixed_text(self) -> bool:
        """True if the text does not depend on draft lengths."""
        recipe = self.recipe
        return self.exact and (recipe.temperature == 0 or RULES[recipe.rule].shares_noise)

    @property
    def longest_chain(self) -> int | None:
        """Return the largest length of chains that are cached and drafted as a whole, before a policy may cut them."""
        whole = self.recipe.policy == "fixed" or (self.recipe.policy == "path" and not self.lengths.least)
        return self.lengths.most if whole and self.recipe.use_cache and self.method.shape == "chain" else None

    @property
    def _sends_rows(self) -> bool:
        """True if drafts are sampled and corrections need their distributions."""
        recipe = self.recipe
        drafting = recipe.temperature if recipe.drafter_temperature is None else recipe.drafter_temperature
        sampled = METHODS[recipe.method].sampled and min(recipe.temperature, drafting) > 0
        return sampled and RULES[recipe.rule].needs_rows


def plan_run(recipe: Recipe) -> RunPlan:
    """Derive the plan of a recipe. Raises `UserError` if a pair is not installed."""
    cloud = recipe.cloud
    alone = cloud is not None and cloud.mode != "speculative"
    method = METHODS["ar" if alone else recipe.method]
    target = recipe.spec("target")
    if cloud is not None and cloud.edge_only:
        target = recipe.spec("drafter")
        cloud = None
    assert target is not None  # a rule of recipes
    head = HeadSpec(recipe.head_name, target) if method.uses_head and recipe.head_name is not None else None
    return RunPlan(
        recipe=recipe,
        method=method,
        target=target,
        drafter=recipe.spec("drafter") if method.uses_model and head is None else None,
        head=head,
        cloud=cloud,
        server=None if recipe.external is None else EngineAddress.parse(recipe.external),
        lengths=draft_lengths(recipe),
    )
