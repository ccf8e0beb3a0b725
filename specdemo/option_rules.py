"""Rules between options: combinations that are refused, and options without effect.

Options without effect are refused if they are named for a run, and dropped from links and stored settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.options import Option, OptionRule, problems, refuse
from specdemo.core.policies import POLICIES, DraftLengths
from specdemo.core.rules import RULES
from specdemo.drafters import METHODS
from specdemo.drafters.method import Method
from specdemo.models.spec import SAME, is_gguf
from specdemo.models.zoo import CHAT_PAIR, Pair
from specdemo.remote.config import COLDEST, GATE_EFFECTS

_MOST_ITEMS = 64  # of a list
_MOST_CHARACTERS = 300  # of a text in a list
_MODELS = ("pair", "target", "drafter")  # select models for all methods
# Options that a server of another engine obeys, besides sampling of the target.
_OF_SERVER = ("external", "pair", "target", "chat", "template_options", "max_tokens", "temperature")


def draft_lengths(chosen: Any) -> DraftLengths:
    return POLICIES[chosen.policy].lengths(chosen.gamma, chosen.gamma_min, chosen.gamma_max, chosen.egag_ema_beta)


def has_effect(policy: str, method: str) -> bool:
    """Return False if a policy decides as `fixed` with a method."""
    return METHODS[method].uses_policy and (METHODS[method].sampled or not POLICIES[policy].by_logits)


def methods_with(declared: Option) -> list[str]:
    """Return the methods for which an option has an effect, with some of its values."""
    owners = [name for name, method in METHODS.items() if declared.name in method.option_names]
    if owners or not declared.applies:
        return owners or list(METHODS)
    return [
        name
        for name, method in METHODS.items()
        if getattr(method, declared.applies) or (declared.name == "rule" and name == "ar")
    ]


def _method(chosen: Any) -> Method:
    return METHODS[chosen.method]


def _methods(suits: Callable[[Method], object]) -> Callable[[Any, str], list[str]]:
    return lambda chosen, name: [other for other, method in METHODS.items() if suits(method)]


def _names_drafter(chosen: Any) -> bool:
    return chosen.drafter is not None and chosen.drafter != SAME


def _lacks_drafter(chosen: Any, name: str) -> bool:
    method = _method(chosen)
    nothing_drafts = chosen.models[1] is None and chosen.head_name is None
    return method.uses_model and not method.optional_model and nothing_drafts


def _lacks_lone_drafter(chosen: Any, name: str) -> bool:
    """Return True if the edge may have to decode alone and has no model for it."""
    if chosen.cloud is None or not (chosen.cloud.edge_only or chosen.cloud.on_loss == "edge"):
        return False
    return chosen.models[1] is None or (chosen.cloud.mode == "speculative" and not _method(chosen).uses_model)


def _fits(items: Sequence[Any]) -> bool:
    texts = [item for item in items if isinstance(item, str)]
    return len(items) <= _MOST_ITEMS and all(0 < len(text) <= _MOST_CHARACTERS for text in texts)


def _suits_encoders(method: Method) -> bool:
    return method.shape == "chain" and not method.decoder_only


_ENCODERS = OptionRule(  # of targets with an encoder
    ("method",),
    lambda chosen, name: not _suits_encoders(_method(chosen)) or chosen.head_name is not None,
    "the target has an encoder, for which method {value} or its head is not made",
    "omit head and choose {choices}",
    _methods(_suits_encoders),
)
CONFLICTS = (
    OptionRule(
        ("pair",),
        lambda chosen, name: chosen.pair and (chosen.target or _names_drafter(chosen)),
        "pair names target and drafter already",
        "give either a pair or a target and a drafter",
    ),
    OptionRule(
        ("drafter",),
        lambda chosen, name: _names_drafter(chosen) and not chosen.target,
        "a drafter needs a target",
        "give both",
    ),
    OptionRule(
        ("head",),
        lambda chosen, name: _method(chosen).drafter == "head" and chosen.head_name is None,
        "method {chosen.method} needs a head",
        "set head to a directory or Hugging Face id",
    ),
    OptionRule(
        ("drafter",),
        _lacks_drafter,
        "method {chosen.method} needs a drafter",
        "add it (same: a quantised copy), or choose pair bundled or method nasd, self or ar",
    ),
    OptionRule(
        ("activations",),
        lambda chosen, name: chosen.activations == "8" and not any(is_gguf(model or "") for model in chosen.models),
        "activations 8 needs a GGUF file",
        f"choose pair {CHAT_PAIR}, or auto",
    ),
    OptionRule(
        ("gamma_min", "gamma_max"),
        lambda chosen, name: getattr(chosen, name) is not None and not POLICIES[chosen.policy].bounded,
        "{name} has no effect with policy {chosen.policy}",
        "set gamma, or choose policy dynamic",
    ),
    OptionRule(
        ("gamma_min",),
        lambda chosen, name: draft_lengths(chosen).least > draft_lengths(chosen).most,
        "gamma_min {value} is above gamma_max {chosen.gamma_max}",
        "exchange them",
    ),
    OptionRule(
        ("threshold",),
        lambda chosen, name: chosen.threshold is not None and RULES[chosen.rule].threshold is None,
        "rule {chosen.rule} has no threshold",
        "choose {choices}",
        lambda chosen, name: [other for other, rule in RULES.items() if rule.threshold is not None],
    ),
    OptionRule(
        ("temperature", "drafter_temperature"),
        lambda chosen, name: 0 < (getattr(chosen, name) or 0) < COLDEST,
        f"{{name}} must be 0 or at least {COLDEST}, not {{value}}",
        "0 is greedy",
    ),
    OptionRule(
        ("drafter_temperature", "drafter_top_p"),
        lambda chosen, name: chosen.universal and getattr(chosen, name) is not None,
        "{name} has no effect with universal, whose drafts are certain",
        "omit one of them",
    ),
    OptionRule(
        ("bad_words", "stop_texts", "stop_tokens"),
        lambda chosen, name: not _fits(getattr(chosen, name)),
        f"{{name}} contains an empty text, one of more than {_MOST_CHARACTERS} characters, or more than {_MOST_ITEMS} "
        "items",
        "shorten the list",
    ),
    OptionRule(
        ("use_cache",),
        lambda chosen, name: chosen.cloud is not None and not chosen.use_cache,
        "use_cache can be disabled for a local target only",
        "enable it, or choose mode off",
    ),
    OptionRule(
        ("method",),
        lambda chosen, name: (
            chosen.cloud is not None and (_method(chosen).local_target or chosen.head_name is not None)
        ),
        "method {value} or its head needs a local target",
        "choose {choices}, or mode off",
        _methods(lambda method: not method.local_target),
    ),
    OptionRule(
        ("drafter",),
        _lacks_lone_drafter,
        "method {chosen.method} has no model that could continue alone",
        "give a drafter, and choose {choices}",
        _methods(lambda method: method.uses_model),
    ),
    OptionRule(
        ("gates",),
        lambda chosen, name: (
            chosen.cloud is not None and chosen.cloud.gates and not (_method(chosen).gates and not chosen.universal)
        ),
        "gates need the distributions of a draft model in the target's vocabulary",
        "disable universal, and choose method {choices}",
        _methods(lambda method: method.gates),
    ),
    OptionRule(
        ("provisional",),
        lambda chosen, name: chosen.cloud is not None and chosen.cloud.provisional and not _method(chosen).drafts,
        "method {chosen.method} has no drafts to commit after the deadline",
        "choose another method",
    ),
    OptionRule(
        ("external",),
        lambda chosen, name: chosen.external is not None and chosen.cloud is not None,
        "the server of another engine decodes alone",
        "omit external, or choose mode off",
    ),
    OptionRule(
        ("bad_words",),
        lambda chosen, name: chosen.external is not None and chosen.bad_words,
        "bad_words needs a target on this machine, not a server of another engine",
        "omit one of them",
    ),
)


def _effective_methods(chosen: Any, name: str) -> list[str]:
    """Return the methods with an effect of the option's value."""
    methods = methods_with(chosen.OPTIONS[name])
    if name == "rule" and not RULES[chosen.rule].shares_noise:
        return [method for method in methods if METHODS[method].drafts]
    return methods


def _ignored_by_method(chosen: Any, name: str) -> bool:
    if chosen.external is not None or chosen.method in _effective_methods(chosen, name):
        return False
    if name in _MODELS and chosen.drafter != SAME:
        return False
    edge_decodes = chosen.cloud is not None and chosen.cloud.edge_only
    return not (edge_decodes and chosen.OPTIONS[name].applies in ("uses_model", "may_reencode"))


EFFECTS = (
    OptionRule(
        ("template_options",),
        lambda chosen, name: not chosen.chat,
        "template_options has no effect without a chat template",
        "enable chat",
    ),
    OptionRule(
        (),
        lambda chosen, name: (
            chosen.external is not None
            and name not in _OF_SERVER
            and (chosen.OPTIONS[name].group != "Sampling" or chosen.OPTIONS[name].applies == "sampled")
        ),
        "{name} has no effect with external",
        "the server decides, so set it there",
    ),
    OptionRule(
        (),
        _ignored_by_method,
        "{name} has no effect with method {chosen.method}",
        "choose {choices}",
        _effective_methods,
    ),
    OptionRule(
        (),
        lambda chosen, name: (
            chosen.external is None
            and chosen.OPTIONS[name].policies
            and chosen.policy not in chosen.OPTIONS[name].policies
        ),
        "{name} has no effect with policy {chosen.policy}",
        "choose {choices}",
        lambda chosen, name: chosen.OPTIONS[name].policies,
    ),
    OptionRule(
        ("policy",),
        lambda chosen, name: chosen.external is None and not has_effect(chosen.policy, chosen.method),
        "policy {value} has no effect with method {chosen.method}, whose drafts are certain",
        "choose {choices}",
        lambda chosen, name: [policy for policy in POLICIES if has_effect(policy, chosen.method)],
    ),
    OptionRule(
        ("q_rows",),
        lambda chosen, name: chosen.cloud is not None and not _method(chosen).sampled,
        "q_rows has no effect with method {chosen.method}",
        "choose {choices}",
        _methods(lambda method: method.sampled),
    ),
)


INPUTS = (  # of objects that a caller adds to a recipe; `chosen` has a plan and these objects
    OptionRule(
        ("stores",),
        lambda chosen, name: chosen.plan.recipe.ngram_keep and chosen.stores is None,
        "ngram_keep has no effect without stores",
        "pass the same object as stores to every run",
    ),
    OptionRule(
        ("drafter", "prediction"),
        lambda chosen, name: getattr(chosen, name) is not None and not chosen.plan.method.drafts,
        "method {chosen.plan.method.name} does not draft",
        "choose another method, or omit the {name}",
    ),
    OptionRule(
        ("names",),
        lambda chosen, name: (
            chosen.names is not None and (chosen.plan.cloud is None or "names" not in chosen.plan.cloud.gates)
        ),
        "names has no effect without gate names",
        "add names to the gates of a remote target",
    ),
    OptionRule(
        ("logprobs",),
        lambda chosen, name: chosen.logprobs is not None and chosen.plan.method.verifier is not None,
        "method {chosen.plan.method.name} has no log-probabilities of tokens",
        "choose another method",
    ),
    OptionRule(
        ("score",),
        lambda chosen, name: chosen.score and (chosen.logprobs is None or chosen.plan.recipe.encoder),
        "score needs logprobs and a decoder",
        "set logprobs, or choose another target",
    ),
    OptionRule(
        ("drafter", "processors", "prediction", "logprobs", "names"),
        lambda chosen, name: (
            getattr(chosen, name) not in (None, ())
            and (chosen.plan.server is not None or (name == "processors" and chosen.plan.cloud is not None))
        ),
        "input {name} needs a local target",
        "omit it, or choose mode off and no external server",
    ),
)


def refuse_inputs(plan: Any, inputs: Any) -> None:
    """Raise `UserError` for objects that a run cannot use."""
    refuse(INPUTS, SimpleNamespace(plan=plan, **vars(inputs)))


def refuse_with_encoder(chosen: Any) -> None:
    """Raise `UserError` for a method that a target with an encoder cannot run."""
    refuse((_ENCODERS,), chosen)


def ineffective(chosen: Any, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options among `names` without effect in the recipe `chosen`, each with cause and remedy."""
    names = list(names)
    yield from problems(EFFECTS, chosen, names)
    if chosen.cloud is not None:
        yield from problems(GATE_EFFECTS, chosen.cloud, names)


def refuse_ineffective(chosen: Any, names: Iterable[str]) -> None:
    for _, problem in ineffective(chosen, names):
        raise UserError(problem)


def can_draft(pair: Pair, method: Method) -> bool:
    if method.uses_head and pair.head is not None:
        return True
    return method.drafter is None or (method.uses_model and pair.drafter is not None)


def settings_of_pair(pair: Pair, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a pair, replaced by the named ones; its policy only if it has an effect on the method."""
    settings = {**pair.settings, **named}
    if "policy" not in named and settings["method"] in METHODS and not has_effect(pair.policy, settings["method"]):
        settings["policy"] = "fixed"
    return settings
