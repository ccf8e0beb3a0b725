"""Protocol of targets, which verify drafts in this process or in a service, and of the context that they receive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftLengthPolicy, Verifier

if TYPE_CHECKING:
    import torch

    from specdemo.core.sampling import SamplingParams


class TargetContext(Protocol):
    """Inputs for the caches and the verifier of a target."""

    options: Any  # values of all options, by name
    policy: DraftLengthPolicy  # a verifier may wrap it to record the distributions of drafts

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def draft_caches(self) -> Sequence[Any]: ...

    @property
    def candidates(self) -> int:
        """Number of target tokens that a verdict must contain."""

    @property
    def method_verifier(self) -> Callable[[Any], Verifier] | None:
        """Function from this context to the verifier of the method, if it has its own."""

    def scorer(self, role: Any) -> Any:
        """Return the model with this role, which scores drafts."""

    def noise(self, name: str, *, shared: bool = ...) -> Any:
        """Return the random stream `name`; the stream shared with the drafter if `shared` and the rule has it."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that the run needs."""

    @property
    def logprobs(self) -> int | None:
        """See `ModelVerifier`."""

    def cached(self, loaded: Any, role: str, pad: int = ..., taps: tuple[int, ...] = ...) -> Any:
        """Return a cached model; in a conversation, that of the previous turn."""

    def open(self, model: Any) -> Any:
        """Return a cached model that is closed with this context."""

    def on_close(self, call: Callable[[], None]) -> None:
        """Register a call for the end of the run."""


class Target(Protocol):
    """Model whose distribution the text follows."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop(self) -> Collection[int]:
        """Tokens that end a text."""

    @property
    def opening(self) -> Sequence[int]:
        """First tokens of a text whose prompt an encoder reads."""

    @property
    def encoder(self) -> bool:
        """True if an encoder reads the prompt."""

    @property
    def context(self) -> int:
        """Longest text, in tokens."""

    @property
    def chains_only(self) -> str:
        """Return the reason why forests cannot be verified, or an empty string."""

    @property
    def device(self) -> torch.device | None:
        """Device in this process, if any."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Return the entries of a trace header."""

    @property
    def pass_costs(self) -> Mapping[int, float] | None:
        """Cost of passes by number of rows, in AR steps; None if they are not measured."""

    @property
    def weight_bytes(self) -> int: ...

    def bit_equal(self, longest_draft: int | None, length: int) -> bool:
        """Return True if rows have the same bits in passes of any size.

        `longest_draft`: of chains, None for other drafts. `length`: tokens of the text. Beyond the compared sizes the
        result is False.
        """

    def open_cache(self, context: TargetContext) -> Any | None:
        """Return the cached model of a run, None for a target outside this process."""

    def verifier(self, context: TargetContext) -> Verifier:
        """Return the verifier of a run, which is closed with `context`."""

    def close(self) -> None:
        """Close the connection, if any."""
