"""A block head: one pass drafts all positions (after DSpark, 2607.05147, and P-EAGLE, 2602.01469) in plain torch.

Row t of slot i receives `fc` of the target's states at t, the embedding of token t + 1 and a vector of the slot, and
predicts token t + 2 + i. A Markov term of low rank adds the embedding of token t + 1 + i in front of the
output matrix, so that slots form a chain. The confidence of slot i predicts sum min(p, q) from the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from training.head.kind import LayerHead
from training.head.layers import Cache, DecoderLayer, FirstLayer
from training.head.target import Target

LAYERS = 2
SLOTS = 5
RANK = 64


class Markov(nn.Module):
    """Bigram logits of low rank, factored through embeddings and output rows of the target."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Linear(width, rank, bias=False)
        self.markov_w2 = nn.Linear(rank, width, bias=False)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(embedded))


class Confidence(nn.Module):
    """Logits of the probability that a token is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        return self.proj(states)[..., 0]


class Block(LayerHead):
    """The head."""

    architecture = "BlockHead"

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor, own_output: bool = False) -> None:
        super().__init__(config, taps, vocabulary, own_output)
        width = config.hidden_size
        self.layers = nn.ModuleList([FirstLayer(config), *(DecoderLayer(config) for _ in range(LAYERS - 1))])
        self.slots = nn.Parameter(torch.zeros(SLOTS - 1, 2 * width))  # of slots from 1, see `FirstLayer.forward`
        self.markov_head = Markov(width, RANK)
        self.confidence_head = Confidence(width)

    def settings(self, taps: Sequence[int]) -> dict[str, Any]:
        return super().settings(taps) | {"num_hidden_layers": LAYERS, "block_size": SLOTS, "markov_rank": RANK}

    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        fused, results = self.fc(taps), []
        following = F.embedding(F.pad(tokens[:, 1:], (0, 1)), embeddings)
        caches: list[Cache] = [[] for _ in self.layers]
        for i, shift in enumerate([None, *self.slots][:steps]):
            state = self.layers[0](fused, following, caches[0], shift)
            for layer, cache in zip(self.layers[1:], caches[1:], strict=True):
                state = layer(state, cache)
            before = F.embedding(F.pad(tokens[:, i + 1 :], (0, i + 1)), embeddings)
            results.append(self.norm(state) + self.markov_head(before))
        return results

    def confidence_loss(self, states: Tensor, overlap: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            self.confidence_head(states.detach()).float(), overlap.detach(), reduction="none"
        )

    def load_stored(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors of a block head, or those of an EAGLE-3 head as the first slot."""
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self.load_state_dict(self.state_dict() | renamed)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Copy the target's last layer; further layers and the Markov term begin without effect."""
        self.copy_ends(target)
        self.layers[0].start_from(target.last_layer)
        for layer in self.layers[1:]:
            layer.load_state_dict(target.last_layer)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        self.markov_head.markov_w2.weight.zero_()
        self.confidence_head.proj.weight.zero_()
