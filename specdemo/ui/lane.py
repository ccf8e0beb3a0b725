"""Lanes of the page: the recipes that a run decodes side by side, and their traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from specdemo.core import trace
from specdemo.core.events import End, Event, Header, Loading, MemoryUse, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.options import Option
from specdemo.core.policies import POLICIES
from specdemo.core.rules import DEFAULT_RULE, rule_traits
from specdemo.drafters import draft_shape
from specdemo.external.address import EngineAddress
from specdemo.models.spec import SAME
from specdemo.option_rules import methods_with
from specdemo.recipe import Recipe
from specdemo.ui.settings import OPTIONS, method_name

SPEC, BASELINE = "spec", "ar"
LANES = (SPEC, BASELINE, "third", "fourth")
EXTRA = tuple(name for name in LANES if name not in (SPEC, BASELINE))  # lanes for further recipes
SHORT_TOKENS, SHORT_S = 60, 0.5  # shorter comparisons are repeated
SHORT_PAIRS, LONGEST_REPEATED_S = 3, 2.0
ALONE = {"edge_only": "edge only: the helper alone", "cloud_only": "cloud only: the large model alone"}


@dataclass(eq=False)
class Lane:
    """Decoding of the prompt with one recipe. The trace is stored as text, which takes a seventh of the memory."""

    lines: list[str] = field(default_factory=list)
    header: Header | None = None
    end: End | None = None
    metrics: Metrics = field(default_factory=Metrics)
    memory: MemoryUse = field(default_factory=MemoryUse)
    first: Lane | None = None

    def add(self, event: Event) -> str:
        """Store an event; return its trace line."""
        match event:
            case Loading():
                return ""
            case Header():
                self.header = event
            case StepEvent():
                self.metrics = event.metrics
                if event.memory != MemoryUse():
                    self.memory = event.memory
            case End():
                self.end = event
        self.lines.append(line := trace.write(event))
        return line

    def record_speeds(self, speeds: Sequence[float]) -> None:
        """Store the speed of each repetition in the last line of the trace."""
        if self.end is not None and len(speeds) > 1:
            self.end = replace(self.end, pair_speeds=tuple(speeds))
            self.lines[-1] = trace.write(self.end)

    @property
    def begun(self) -> bool:
        return self.header is not None

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.header.recipe if self.header else {}

    @property
    def title(self) -> str:
        """Recipe and differences from the first lane."""
        if not (self.begun and self.first and self.first.begun):
            return title(self.recipe)
        return ", ".join([title(self.recipe), *_differences(self.recipe, self.first.recipe)])

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.header.environment if self.header else {}

    @property
    def exact(self) -> bool:
        return self.header is None or self.header.exact

    @property
    def bit_equal(self) -> bool:
        return self.header is not None and self.header.bit_equal

    @property
    def external(self) -> bool:
        """True if another engine decoded."""
        return bool(self.recipe.get("external"))

    @property
    def timed(self) -> bool:
        """True if the durations of the steps are known."""
        return self.metrics.draft_s is not None

    @property
    def weights(self) -> float | None:
        return sum(filter(None, map(self.environment.get, ("target_bytes", "drafter_bytes")))) or None

    @property
    def acceptance(self) -> float | None:
        """Acceptance for formulas: the mean overlap (lower variance) if it decides, otherwise alpha."""
        return self.metrics.alpha if self.counted else self.metrics.mean_beta

    @property
    def acceptance_name(self) -> str:
        return "α" if self.counted else "mean overlap β"

    @property
    def counted(self) -> bool:
        """True for rules that accept without regard to min(p, q), and where an engine reports counts only."""
        rule = rule_traits(self.recipe)
        return self.external or not (rule.overlaps or rule.chains_only)

    @property
    def steps(self) -> tuple[StepEvent, ...]:
        """Step events, parsed from the text; the prefill is step 0."""
        return _parsed_steps(self, len(self.lines))

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.steps for token in event.step.tokens]


@lru_cache(maxsize=len(LANES))
def _parsed_steps(lane: Lane, count: int) -> tuple[StepEvent, ...]:
    return tuple(event for event in trace.parse(lane.lines[:count]) if isinstance(event, StepEvent))


def mode(recipe: Mapping[str, Any]) -> str:
    return str((recipe.get("cloud") or {}).get("mode", ""))


def linked(lanes: Mapping[str, Lane]) -> bool:
    """Return True if a lane ran over a link: total times are compared, since a remote AR lane streams its tokens."""
    return any(mode(lane.recipe) for lane in lanes.values())


def same_target(lane: Lane, other: Lane) -> bool:
    """Return True if both lanes ran the same form of the target on the same device."""
    names = ("external", "pair", "target", "dtype", "quantization", "activations", "device")
    return all(lane.recipe.get(name) == other.recipe.get(name) for name in names)


def clock(metrics: Metrics, total: bool) -> float:
    """Seconds that speeds refer to: since the first token, or in total."""
    return metrics.decode_s + ((metrics.ttft_s or 0.0) if total else 0.0)


def speed(metrics: Metrics, total: bool) -> float | None:
    """Tokens per second without the prefill, or of the total time."""
    tokens, seconds = metrics.tokens if total else metrics.decode_tokens, clock(metrics, total)
    return tokens / seconds if seconds else None


def title(recipe: Mapping[str, Any]) -> str:
    if external := recipe.get("external"):
        return str(EngineAddress.parse(external))
    if mode(recipe) in ALONE:
        return ALONE[mode(recipe)]
    if recipe["method"] == "ar":
        return "large model alone" + (", over the link" if mode(recipe) else "") + _weight_format(recipe)
    if recipe["method"] == "beam":
        return f"{recipe['num_beams']} beams"
    rule = recipe.get("rule", DEFAULT_RULE)
    depth = " deep" if draft_shape(recipe["method"]) == "forest" else ""
    policy = POLICIES.get(recipe.get("policy", "fixed"), POLICIES["fixed"])
    most = policy.lengths(recipe["gamma"], recipe.get("gamma_min"), recipe.get("gamma_max")).most
    length = f"up to {most} guesses{depth}"
    link = ", edge and cloud" if mode(recipe) else ""
    copy = f" by {recipe.get('drafter_quantization')} copy" if recipe.get("drafter") == SAME else ""
    test = "" if rule == DEFAULT_RULE else f", {rule}"
    return f"{method_name(recipe['method'])}{copy}, {length}{test}{link}{_weight_format(recipe)}"


def short_names(lanes: Mapping[str, Lane]) -> dict[str, str]:
    """Return the method of each lane with drafts, or its title if methods are equal; empty for a single method."""
    titles = {name: lane.title for name, lane in lanes.items() if name != BASELINE and lane.begun}
    methods = Counter(text.partition(",")[0] for text in titles.values())
    short = {name: text.partition(",")[0] for name, text in titles.items()}
    names = {name: method if methods[method] == 1 else titles[name] for name, method in short.items()}
    return names if len(names) > 1 else {}


def _weight_format(recipe: Mapping[str, Any]) -> str:
    quantization = recipe.get("quantization", "none")
    narrow = recipe.get("activations") == "8"
    return ("" if quantization == "none" else f", in {quantization}") + (", 8-bit activations" if narrow else "")


_IN_TITLE = (  # and the model next to it, or without effect on texts and speeds
    *("pair", "target", "method", "gamma", "rule", "num_beams", "external"),
    *("quantization", "drafter_quantization", "activations", "mode", "remote", "top"),
)
_VALUE_CHARACTERS = 20


def _differences(recipe: Mapping[str, Any], first: Mapping[str, Any]) -> Iterator[str]:
    flat, others = ({**lane, **(lane.get("cloud") or {})} for lane in (recipe, first))
    options = OPTIONS if recipe.get("cloud") and first.get("cloud") else Recipe.OPTIONS
    for name, option in options.items():
        value, other = (_value(values.get(name, option.default)) for values in (flat, others))
        if value != other and _written(option, recipe):
            yield f"{name.replace('_', ' ')} {value}"


def _written(option: Option, recipe: Mapping[str, Any]) -> bool:
    if option.name == "gamma" and recipe.get("policy", "fixed") != "fixed":
        return True
    if option.name == "drafter" and recipe.get("drafter") == SAME:
        return False
    used = not option.policies or recipe.get("policy") in option.policies
    return used and option.name not in _IN_TITLE and recipe["method"] in methods_with(option)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return "/".join(map(str, value))[:_VALUE_CHARACTERS] or "none"
    if value in (None, ""):
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)[-_VALUE_CHARACTERS:]


def lanes_of(recipe: Recipe, compare: bool, extra: Sequence[Recipe] = ()) -> dict[str, Recipe]:
    """Return the recipes of a run by lane. An AR recipe without a link occupies the lane of the baseline."""
    own = replace(recipe, external=None)
    others = dict(zip(EXTRA, extra, strict=False))
    if own.method == "ar" and own.cloud is None:
        return {BASELINE: baseline_of(own)} | others
    if compare or extra:
        return {SPEC: own, BASELINE: baseline_of(own)} | others
    return {SPEC: own}


def baseline_of(recipe: Recipe) -> Recipe:
    """Return AR decoding by the same target, over the same link."""
    cloud = None
    if recipe.cloud is not None and recipe.cloud.mode == "speculative":
        cloud = replace(recipe.cloud, mode="cloud_only", provisional=False, gates=(), on_loss="end")
    return replace(recipe, method="ar", cloud=cloud, use_cache=True)


def is_short(runs: Sequence[Metrics]) -> bool:
    """Return True for the comparison of a short text."""
    short = any(run.tokens < SHORT_TOKENS or run.decode_s < SHORT_S for run in runs)
    return short and sum(clock(run, total=True) for run in runs) < LONGEST_REPEATED_S


def alternating(lanes: Mapping[str, Recipe], pairs: int) -> list[tuple[str, Recipe]]:
    """Repeat `lanes`, every second time in reverse order."""
    forward = list(lanes.items())
    return [lane for i in range(pairs) for lane in (reversed(forward) if i % 2 else forward)]


def model_name(recipe: Mapping[str, Any]) -> str:
    """Return the pair, or the last part of the target's name."""
    target = str(recipe.get("target") or "").rstrip("/")
    return target.rpartition("/")[2] or str(recipe.get("pair") or "")


def name_lanes(recipes: Sequence[Recipe]) -> str:
    lanes = [asdict(recipe) for recipe in recipes]
    return "; ".join(
        f"{', '.join([title(lane), *_differences(lane, lanes[0])])} ({model_name(lane)})" for lane in lanes
    )
