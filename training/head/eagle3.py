"""EAGLE-3 (arXiv 2503.01840) in plain torch: a decoder layer on three hidden states of the target and the next token.

Row t of step i receives token t + 1 + i and predicts token t + 2 + i. In step 0 its state is `fc` of the target's
states at t; in later steps it is the head's own state of the step before (training-time test). Parameter names and
`config.json` are those of the published checkpoints.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from training.head.kind import LayerHead
from training.head.layers import Cache, FirstLayer
from training.head.target import Target


class Eagle3(LayerHead):
    """The head."""

    architecture = "LlamaForCausalLMEagle3"

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor, own_output: bool = False) -> None:
        super().__init__(config, taps, vocabulary, own_output)
        self.midlayer = FirstLayer(config)

    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        state, results = self.fc(taps), []
        cache: Cache = []
        for i in range(steps):
            following = F.pad(tokens[:, i + 1 :], (0, i + 1))
            state = self.midlayer(state, F.embedding(following, embeddings), cache)
            results.append(self.norm(state))
        return results

    def start_from(self, target: Target) -> None:
        self.copy_ends(target)
        self.midlayer.start_from(target.last_layer)
