"""Protocol of targets, which verify drafts in this process or in a service."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftLengthPolicy, Verifier

if TYPE_CHECKING:
    import torch

    from specdemo.core.sampling import SamplingParams


@dataclass(frozen=True)
class VerifierInputs:
    """Inputs for the verifier of a run."""

    options: Any  # values of all options, by name
    sampling: SamplingParams
    policy: DraftLengthPolicy
    target_cache: Any | None  # cached model of the target, None outside this process
    draft_caches: Sequence[Any]
    candidates: int  # target tokens that a verdict must contain
    accept: Any  # noise of acceptance
    correct: Any  # noise of corrections; shared with the drafter if the rule shares noise
    logprobs: int | None  # see `ModelVerifier`
    open: Callable[[Any], Any]  # returns a cached model, closed at the end of the run
    on_close: Callable[[Callable[[], object]], object]  # registers a call for the end of the run


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

    def open_cache(self, open: Callable[..., Any], taps: tuple[int, ...]) -> Any | None:
        """Return the cached model of a run by `open(target, role, pad=..., taps=...)`, None outside this process.

        `taps`: hidden states that the run needs.
        """

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Return the verifier of a run."""

    def close(self) -> None:
        """Close the connection, if any."""
