"""Registry entry and build context of a decoding method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from specdemo.core.decode import Drafter, DraftLengthPolicy, Verifier
from specdemo.core.options import OptionSet, option, options

if TYPE_CHECKING:
    from specdemo.core.sampling import SamplingParams

Shape = Literal["chain", "forest"]
DrafterT = TypeVar("DrafterT", bound=Drafter)


class VocabularyBridge(Protocol):
    """Interface that converts tokens between the vocabularies of target and drafter."""

    def read(self, tokens: Sequence[int]) -> list[int]: ...

    def write(self, tokens: Sequence[int], new: Sequence[int]) -> list[int]: ...


class BuildContext(Protocol):
    """Inputs from which a method builds its drafter and verifier."""

    @property
    def options(self) -> Any:
        """Values of all options, by name."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters for target tokens."""

    @property
    def vocab_size(self) -> int:
        """Size of the target vocabulary."""

    @property
    def source(self) -> Sequence[int]:
        """Encoder input; empty for decoders."""

    @property
    def stop(self) -> Collection[int]:
        """Stop tokens."""

    @property
    def seed(self) -> int: ...

    @property
    def bridge(self) -> VocabularyBridge | None:
        """Conversion of tokens, `None` for a shared vocabulary."""

    @property
    def corpus(self) -> Sequence[Sequence[int]]:
        """Return bundled texts, to count tokens."""

    @property
    def has_drafter(self) -> bool:
        """Return True if a draft model is loaded."""

    @property
    def draft_sampling(self) -> SamplingParams:
        """Sampling parameters of drafts, in target tokens."""

    @property
    def drafter_sampling(self) -> SamplingParams:
        """Sampling parameters in drafter tokens."""

    def head(self) -> Any:
        """Return the `CachedHead` of the run, None without one."""

    def scorer(self, role: Literal["drafter", "target"], layers: Callable[[int], Sequence[int]] | None = None) -> Any:
        """Return a `CachedModel`, which scores drafts; `layers` selects layers, given their number."""

    def noise(self, name: str, *, shared: bool = ...) -> Any:
        """Return the random stream `name`; the stream shared with the target if `shared` and the rule has it."""

    def with_store(self, make: Callable[[Any], DrafterT], *key: Any) -> DrafterT:
        """Return `make(store)` with the store saved under `key`, or with `None`; save the store of the result."""


@dataclass(frozen=True)
class Method:
    """Registry entry of a decoding method: texts, options, requirements and constructors."""

    name: str
    title: str
    notes: str  # Markdown for the page
    build: Callable[[BuildContext], Drafter]
    label: str = ""  # name on the page, if `name` is an abbreviation
    options: tuple[type[OptionSet], ...] = ()  # classes of options, see `core.options`
    shape: Shape = "chain"
    drafts: bool = True
    exact: bool = True  # False if no rule samples from the target's distribution
    samples: bool = True
    sampled: bool = False  # drafts are sampled above temperature 0
    drafter: Literal["model", "head"] | None = None  # what drafts besides the target
    accepts_head: bool = False  # a head may replace the draft model
    optional_model: bool = False  # drafts without a draft model or head, too
    local_target: bool = False
    shared_vocabulary: bool = False
    decoder_only: bool = False
    gates: bool = False  # gates can evaluate draft distributions
    copies: bool = False  # drafts repeat earlier text, and may end with it
    verifier: Callable[[BuildContext], Verifier] | None = None  # default: `ModelVerifier` with the acceptance rule
    policy: Callable[[Any], DraftLengthPolicy] | None = None  # default: the policy of the recipe
    candidates: Callable[[Any], int] = lambda options: 1  # target tokens that a verdict must contain

    @property
    def predictable(self) -> bool:
        """True if the speed-up can be estimated before a run."""
        return self.drafts and self.verifier is None

    @property
    def uses_policy(self) -> bool:
        return self.drafts and self.policy is None

    @property
    def uses_model(self) -> bool:
        return self.drafter == "model"

    @property
    def may_reencode(self) -> bool:
        return self.uses_model and not self.shared_vocabulary

    @property
    def uses_head(self) -> bool:
        return self.drafter == "head" or self.accepts_head

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.options for name in group.OPTIONS)


@options("Copying from earlier text")
class StoreOptions(OptionSet):
    """Options of methods that draft from a store of earlier text."""

    ngram_keep: bool = option(
        False, "Keep n-grams between runs", "reuse text seen in earlier runs of a visit", terminal=False
    )
