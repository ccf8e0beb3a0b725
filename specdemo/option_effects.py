"""Options without effect: refused if named for a run, dropped from links and stored settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.options import Option
from specdemo.core.policies import POLICIES
from specdemo.core.rules import RULES
from specdemo.drafters import METHODS
from specdemo.models.spec import SAME
from specdemo.models.zoo import Pair
from specdemo.remote.config import unused_thresholds

_PAIR = ("pair", "target", "drafter")  # select models for all methods
_OF_SERVER = (  # options that a server of another engine obeys
    *("external", "pair", "target", "chat", "template_options", "max_tokens"),
    *("temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop_texts", "stop_tokens"),
)


def methods_with(declared: Option) -> list[str]:
    """Return the methods for which an option has an effect, with some of its values."""
    owners = [name for name, method in METHODS.items() if declared.name in method.option_names]
    if owners or declared.applies:
        return owners or [name for name, method in METHODS.items() if _applies(declared, name)]
    return list(METHODS)


def _applies(declared: Option, method: str) -> bool:
    return getattr(METHODS[method], declared.applies) or (declared.name == "rule" and method == "ar")


def ineffective(chosen: Any, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options among `names` without effect in the recipe `chosen`, each with cause and remedy."""
    for name in names:
        if name in chosen.OPTIONS and (problem := _problem(chosen, chosen.OPTIONS[name])):
            yield name, problem
    if chosen.cloud is not None:
        yield from unused_thresholds(chosen.cloud, names)
        if "q_rows" in names and not METHODS[chosen.method].sampled:
            choices = ", ".join(name for name, method in METHODS.items() if method.sampled)
            yield "q_rows", f"has no effect with method {chosen.method}: choose {choices}"


def _problem(chosen: Any, declared: Option) -> str:
    if declared.name == "template_options" and not chosen.chat:
        return "has no effect without a chat template: enable chat"
    if chosen.external is not None:
        decides = "has no effect with external: the server decides, so set it there"
        return "" if declared.name in _OF_SERVER else decides
    method, methods = METHODS[chosen.method], methods_with(declared)
    if declared.name in _PAIR and chosen.drafter != SAME:
        return ""
    alone = declared.applies in ("uses_model", "may_reencode") and chosen.cloud is not None and chosen.cloud.alone
    if method.name not in methods and not alone:
        return f"has no effect with method {method.name}: choose {', '.join(methods)}"
    if declared.policies and chosen.policy not in declared.policies:
        return f"has no effect with policy {chosen.policy}: choose {', '.join(declared.policies)}"
    if declared.name == "policy" and not has_effect(chosen.policy, chosen.method):
        choices = ", ".join(name for name in POLICIES if has_effect(name, chosen.method))
        return f"{chosen.policy} has no effect with method {method.name}, whose drafts are certain: choose {choices}"
    if declared.name == "rule" and not method.drafts and not RULES[chosen.rule].shares_noise:
        choices = ", ".join(name for name in methods if name != method.name)
        return f"{chosen.rule} has no effect with method {method.name}: choose {choices}"
    return ""


def has_effect(policy: str, method: str) -> bool:
    """Return False if a policy decides as `fixed` with a method."""
    return METHODS[method].uses_policy and (METHODS[method].sampled or not POLICIES[policy].by_logits)


def settings_of_pair(pair: Pair, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a pair, replaced by the named ones; its policy only if it has an effect on the method."""
    settings = {**pair.settings, **named}
    if "policy" not in named and settings["method"] in METHODS and not has_effect(pair.policy, settings["method"]):
        settings["policy"] = "fixed"
    return settings


def refuse_ineffective(chosen: Any, named: Iterable[str]) -> None:
    """Raise `UserError` for the first of the named options without effect."""
    for name, problem in ineffective(chosen, list(named)):
        raise UserError(f"{name} {problem}")
