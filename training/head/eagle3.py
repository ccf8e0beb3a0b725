"""EAGLE-3 (arXiv 2503.01840) in plain torch: a decoder layer on three hidden states of the target and the next token.

Row t of step i receives token t + 1 + i and predicts token t + 2 + i. In step 0 its state is `fc` of the target's
states at t; in later steps it is the head's own state of the step before (training-time test). The rows of step 0
attend causally; row t of a later step attends to the rows up to t of step 0 and to row t of all steps up to its own,
as in a draft that starts at t. In the loss, its reference is the target's distribution at t + 1 + i. Parameter names
and `config.json` are those of the published checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from training.head.conversations import Batch
from training.head.target import Target, rotate

TAPS = (2, 15, 27)  # for SmolLM2-135M
Cache = list[tuple[Tensor, Tensor]]  # keys and values of each step
DECAY = 0.8  # of the weight per step
OVERLAP_WEIGHT = 1.0
BLOCKS = {"cpu": 256, "cuda": 4096}  # rows; those of a processor fit into its cache
TRAINED = "training_tokens"  # key of config.json
OF_TARGET = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
    "max_position_embeddings",
)


class Attention(nn.Module):
    """Attention with grouped queries over the rows of step 0 and the same row of later steps."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, self.size = config.hidden_size, config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        queries, keys = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.repeats = queries // keys
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Attend from rows `x` `[size, n, inputs]` of step `len(cache)`; append keys and values to `cache`."""
        rows = x.shape[1]
        positions = torch.arange(rows, device=x.device) + len(cache)
        value = self.v_proj(x).unflatten(-1, (-1, self.size))
        query, key = (
            rotate(part(x).unflatten(-1, (-1, self.size)), positions, self.theta).to(value.dtype).transpose(1, 2)
            for part in (self.q_proj, self.k_proj)
        )
        cache.append((key.repeat_interleave(self.repeats, 1), value.transpose(1, 2).repeat_interleave(self.repeats, 1)))
        (keys, values), *later = cache
        if not later:
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        else:
            future = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
            scores = [(query @ keys.mT).masked_fill(future, -torch.inf)]
            scores += [(query * own).sum(-1, keepdim=True).to(scores[0].dtype) for own, _ in later]
            weights = (torch.cat(scores, -1).float() * self.size**-0.5).softmax(-1).to(value.dtype)
            mixed = weights[..., :rows] @ values
            for i, (_, own) in enumerate(later):
                mixed = mixed + weights[..., rows + i, None] * own
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FirstLayer(nn.Module):
    """A decoder layer with the embedding of the next token as second input."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, embedded: Tensor, cache: Cache) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """The head.

    `config` is the target's; `vocabulary` holds the target ids of the draft vocabulary, ascending, whose rows of
    the target's output matrix are shared.
    """

    def __init__(self, config: PretrainedConfig, taps: int, vocabulary: Tensor) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.midlayer = FirstLayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def forward(self, taps: Tensor, tokens: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        """Return the input of the output matrix for each step, `[size, length, width]`; `tokens` `[size, length]`."""
        state, results = self.fc(taps), []
        cache: Cache = []
        for i in range(steps):
            following = F.pad(tokens[:, i + 1 :], (0, i + 1))
            state = self.midlayer(state, F.embedding(following, embeddings), cache)
            results.append(self.norm(state))
        return results

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Copy the last layer, which ignores the embedding, and the final norm; `fc` passes the last tap."""
        width, stored = target.config.hidden_size, dict(target.last_layer)
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"self_attn.{name}.weight"
            stored[key] = torch.cat([torch.zeros_like(stored[key]), stored[key]], -1)
        stored["hidden_norm.weight"] = stored["input_layernorm.weight"]
        stored["input_layernorm.weight"] = torch.ones_like(stored["input_layernorm.weight"])
        self.midlayer.load_state_dict(stored)
        self.fc.weight.zero_()[:, -width:].copy_(torch.eye(width))
        self.norm.weight.copy_(target.norm)


@dataclass(frozen=True)
class Rows:
    """Positions of a batch whose next token belongs to an answer, with its weight and the target's final state."""

    window: Tensor
    position: Tensor
    weight: Tensor
    final: Tensor

    def of(self, states: Tensor, step: int) -> Tensor:
        """Return the rows of `states` that predict the same tokens in `step`."""
        return states[self.window, self.position - 1 - step]


def states_of(head: Eagle3, target: Target, batch: Batch, steps: int) -> tuple[list[Tensor], Rows]:
    """Return the head's states of each step and the rows to compare. Answers begin after more than `steps` tokens."""
    device = target.embeddings.device
    tokens, weights = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.weights))
    states = target.states(tokens)
    window, position = weights[:, 1:].nonzero(as_tuple=True)
    drafted = head(states.taps, tokens, target.embeddings, steps)
    return drafted, Rows(window, position, weights[window, position + 1], states.final[window, position])


def loss(head: Eagle3, target: Target, steps: int, batch: Batch) -> Tensor:
    """Return the weighted mean over rows and steps of cross entropy and rejection rate 1 - sum min(p, q).

    p is normalised over the full vocabulary, so that rows count less where the draft vocabulary covers less. Gradients
    of the head's states are computed in blocks of rows.
    """
    device = target.embeddings.device.type
    with torch.autocast(device, torch.bfloat16):
        drafted, rows = states_of(head, target, batch, steps)
        compared = [rows.of(states, i) for i, states in enumerate(drafted)]
        leaves = [states.detach().requires_grad_() for states in compared]
        output = target.output[head.vocabulary]
        scale = rows.weight.sum() * sum(DECAY**i for i in range(steps))
        value = torch.zeros((), device=output.device)
        for block in torch.arange(len(rows.final), device=output.device).split(BLOCKS[device]):
            with torch.no_grad():
                total = F.linear(rows.final[block], target.output).float().logsumexp(-1, keepdim=True)
                p = (F.linear(rows.final[block], output).float() - total).exp()
            part = torch.zeros((), device=output.device)
            for i, states in enumerate(leaves):
                q = F.linear(states[block], output).float().log_softmax(-1)
                gained = (p * q).sum(-1) + OVERLAP_WEIGHT * torch.minimum(p, q.exp()).sum(-1)
                part = part - DECAY**i * (rows.weight[block] * gained).sum()
            (part / scale).backward()
            value += part.detach() / scale
    linear = sum((states * leaf.grad).sum() for states, leaf in zip(compared, leaves, strict=True))
    return linear + (value + OVERLAP_WEIGHT - linear.detach())


def trained_tokens(folder: Path) -> int:
    """Return the tokens that a stored head has seen, each as often as it was used."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return int(config.get(TRAINED, 0))


def save(head: Eagle3, target: Target, folder: Path, tokens: int) -> None:
    """Write `model.safetensors` and `config.json`. `d2t` holds offsets: target id = draft id + d2t[draft id].

    `tokens`: those that the head has seen.
    """
    ids = head.vocabulary.cpu()
    used = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    used[ids] = True
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    offsets = {"d2t": ids - torch.arange(len(ids)), "t2d": used}
    save_file(tensors | offsets, folder / "model.safetensors")
    config: dict[str, Any] = {name: getattr(target.config, name) for name in OF_TARGET} | {
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": True,
        TRAINED: tokens,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [*target.taps],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def load(folder: Path, target: Target) -> Eagle3:
    """Read a head written by `save`, in float32."""
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors.pop("d2t")
    del tensors["t2d"]
    ids = offsets + torch.arange(len(offsets))
    head = Eagle3(target.config, len(target.taps), ids)
    head.load_state_dict(tensors)
    return head.to(target.embeddings.device)
