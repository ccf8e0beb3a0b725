"""Interface of a kind of head in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from training.head.layers import RMSNorm
from training.head.target import Target


class DraftHead(nn.Module, ABC):
    """Base class of heads on hidden states of the target.

    `config` is the target's; `vocabulary` holds the target ids of the draft vocabulary, ascending. The output matrix
    consists of rows of the target's unless the head has its own.
    """

    taps: ClassVar[tuple[int, ...]]  # hidden states of the target, for SmolLM2-135M

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor, own_output: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config.hidden_size, len(vocabulary), bias=False) if own_output else None
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def choose_vocabulary(self, vocabulary: Tensor) -> None:
        """Draft other tokens. Raises `ValueError` if the head has its own output matrix."""
        if self.lm_head is not None:
            raise ValueError("the output matrix belongs to a vocabulary: omit --vocabulary")
        self.vocabulary = vocabulary

    @abstractmethod
    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        """Return the input of the output matrix for each step, `[size, length, width]`; `tokens` `[size, length]`.

        Row t of step i may depend on tokens up to t + 1 + i and predicts token t + 2 + i.
        """

    @abstractmethod
    def start_from(self, target: Target) -> None:
        """Copy weights of the target."""

    @abstractmethod
    def settings(self, taps: Sequence[int]) -> dict[str, Any]:
        """Return entries of `config.json` besides those of all kinds; `taps`: hidden states of the target."""

    def logits(self, states: Tensor, output: Tensor) -> Tensor:
        """Return logits over the draft vocabulary; `output` holds the target's rows of the draft vocabulary."""
        return F.linear(states, output if self.lm_head is None else self.lm_head.weight)


class LayerHead(DraftHead):
    """Base class of heads of decoder layers on fused states of three layers of the target."""

    architecture: ClassVar[str]  # in `config.json`
    taps = (2, 15, 27)

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor, own_output: bool = False) -> None:
        super().__init__(config, taps, vocabulary, own_output)
        width = config.hidden_size
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def settings(self, taps: Sequence[int]) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "eagle_aux_hidden_state_layer_ids": [*taps],
        }

    @torch.no_grad()
    def copy_ends(self, target: Target) -> None:
        """Copy the target's final norm and output rows; `fc` passes the last tap through."""
        width = target.config.hidden_size
        self.fc.weight.zero_()[:, -width:].copy_(torch.eye(width))
        self.norm.weight.copy_(target.norm)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(target.output[self.vocabulary])
