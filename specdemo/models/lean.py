"""The Llama family without overhead: Llama, Qwen2, Qwen3, Mistral, SmolLM and their like, one request at a time.

The same arithmetic as `transformers`, in fewer and larger pieces: one product for query, key and value, one for gate
and up, keys and values written in place, heads that share keys folded into rows. In bfloat16 and float16 every rounding
is where `transformers` has it; in float32 the gain of a norm is folded into the product that follows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdemo.core.step import Draft
from specdemo.models.forest import positions, visible
from specdemo.models.memory import weight_bytes
from specdemo.models.packed import PackedLinear, can_pack
from specdemo.models.slots import has_window

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # the kinds whose angles depend on the position alone
FEW = 16  # rows up to which masks are kept ready

Rows = Callable[[Tensor], Tensor]


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model has to run through `transformers`; None if it need not."""
    config = model.config
    if type(model).__name__ not in FAMILY:
        return f"{type(model).__name__} is none of {', '.join(FAMILY)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if has_window(model):
        return "it has a sliding window"
    if (kind := config.rope_parameters["rope_type"]) not in ROPES:
        return f"its rotary embedding is of kind {kind}"
    return None


@dataclass(frozen=True)
class Layer:
    """One layer as functions of rows `[n, width]`."""

    enter: Rows  # norm before attention
    qkv: Rows
    norm_heads: Rows | None  # of queries and keys among `[n, heads, dim]`
    out: Rows
    between: Rows  # norm before the gated layer
    gate_up: Rows
    down: Rows


class Lean:
    """The weights of a loaded model, fused and packed; shared by any number of engines.

    Raises `ValueError` for a model that `why_not` turns down.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if reason := why_not(model):
            raise ValueError(reason)
        self.config, self.generation_config = model.config, model.generation_config
        self.dtype, self.device = model.dtype, model.device
        config, body = model.config, model.model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._parts: list[nn.Module | Tensor] = []  # for the count of bytes
        self.embedding: Tensor = self._count(body.embed_tokens.weight)
        self._angles = body.rotary_emb
        self.layers = [self._layer(layer) for layer in body.layers]
        self.leave, self.head = self._after_norm(body.norm, [model.lm_head])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return weight_bytes(nn.ModuleList(part for part in self._parts if isinstance(part, nn.Module))) + sum(
            part.numel() * part.element_size() for part in self._parts if isinstance(part, Tensor)
        )

    def with_layers(self, kept: Sequence[int]) -> Lean:
        """The same weights through these layers only."""
        thin = copy.copy(self)
        thin.layers = [self.layers[i] for i in kept]
        return thin

    def rotation(self, where: Tensor) -> Tensor:
        """Cosines and sines `[2, n, 1, dim]` at positions `[n]`, the first half of the sines negated.

        So that rotating is `x * cos + x.roll(dim / 2) * sin`.
        """
        angles = torch.cat(self._angles(self.embedding, where[None]))
        angles[1, :, : self.head_dim // 2].neg_()
        return angles[:, :, None]

    def _count(self, part: Tensor) -> Tensor:
        self._parts.append(part)
        return part

    def _layer(self, layer: nn.Module) -> Layer:
        attention, gated = layer.self_attn, layer.mlp
        enter, qkv = self._after_norm(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
        between, gate_up = self._after_norm(layer.post_attention_layernorm, [gated.gate_proj, gated.up_proj])
        norm_heads = None
        if hasattr(attention, "q_norm"):
            gains = [attention.q_norm.weight.expand(self.heads, -1), attention.k_norm.weight.expand(self.kv_heads, -1)]
            norm_heads = head_norm(torch.cat(gains), attention.q_norm.variance_epsilon)
        return Layer(
            enter, qkv, norm_heads, self._linear([attention.o_proj]), between, gate_up, self._linear([gated.down_proj])
        )

    def _after_norm(self, norm: nn.Module, linears: list[nn.Module]) -> tuple[Rows, Rows]:
        """A norm and the product that follows it, the gain in whichever of the two it is cheaper."""
        gain, eps = norm.weight, norm.variance_epsilon
        if self.dtype == torch.float32 and all(type(linear) is nn.Linear for linear in linears):
            width = len(gain)
            return unit_norm(width * eps, self.device), self._linear(linears, gain * math.sqrt(width))
        return rms_norm(self._count(gain), eps), self._linear(linears)

    def _linear(self, linears: list[nn.Module], gain: Tensor | None = None) -> Rows:
        """Linear layers of one input as one product; quantised ones are called as they are, one after another."""
        if any(type(linear) is not nn.Linear for linear in linears):
            self._parts.extend(linears)
            if len(linears) == 1:
                return linears[0]
            return lambda rows: torch.cat([linear(rows) for linear in linears], dim=-1)
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        if gain is not None:
            weight = weight * gain
        if can_pack(weight):
            packed = PackedLinear(weight, bias)
            self._parts.append(packed)
            return packed.forward  # the module's hooks would cost more than some of the products
        if weight.data_ptr() != self.embedding.data_ptr():
            self._count(weight)
        return lambda rows: F.linear(rows, weight, bias)


def rms_norm(gain: Tensor, eps: float) -> Rows:
    """RMSNorm (1910.07467) with the roundings of `transformers`: the gain is applied in the model's own dtype."""

    def norm(rows: Tensor) -> Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return gain * wide.to(rows.dtype)

    return norm


def head_norm(gain: Tensor, eps: float) -> Rows:
    """RMSNorm of the leading heads, those with a row in `gain` `[heads, dim]`; the others, values, pass through."""
    norm, count = rms_norm(gain, eps), len(gain)
    return lambda rows: torch.cat((norm(rows[:, :count]), rows[:, count:]), 1)


def unit_norm(eps: float, device: torch.device) -> Rows:
    """RMSNorm without gain and up to the factor sqrt(width), which the next product holds: x / sqrt(|x|^2 + eps)."""
    root, length = torch.tensor(math.sqrt(eps), device=device), torch.linalg.vector_norm
    return lambda rows: rows / length(rows, dim=-1, keepdim=True).hypot_(root)


# What a kernel for attention computes for a row depends, in its last bits, on how many rows and keys it was given: on
# full vectors of keys, on which of its code for few rows it takes, on where it cuts a long sum. With key counts and row
# counts from these sets a row's bits are its own, whatever rides along in the same pass (seen with oneDNN and MKL on
# Zen 4; `specdemo/models/parity.py` asks the machine at hand). The products need no such care.
BLOCK = 512  # keys that the kernel takes at a time
PARTS = (64, 128, 192, 384, 512)  # key counts within the last block
ROWS = 4  # row counts are multiples of this


def padded_keys(count: int) -> int:
    """The least number of keys, `count` or more, that attention may be given."""
    whole, part = divmod(count, BLOCK)
    return whole * BLOCK + (next(width for width in PARTS if width >= part) if part else 0)


class LeanEngine:
    """A forward pass of `Lean` weights over the keys and values of one request."""

    def __init__(self, model: Lean) -> None:
        self._model = model
        self._length = 0
        self._room = 0
        self._kv = torch.empty(0)  # [layers, keys or values, heads, positions, dim]
        self._angles = torch.empty(0)  # [cosines or sines, positions, 1, dim]
        # What is the same in every pass, or in the next few:
        self._turns: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by rows
        self._masks: dict[int, Tensor] = {}  # by rows
        self._seen: tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]] = (0, (), ())  # width, keys and values by layer

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            index = torch.tensor(slots, device=self._kv.device)
            self._kv[:, :, :, length:end] = self._kv[:, :, :, index]
        self._length = end

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return self._kv[:, :, :, : self._length].numel() * self._kv.element_size() if self._room else 0

    def run(self, new: list[int], held: int, draft: Draft) -> Tensor:
        """Feed `new` after the `held` positions; logits `[len(draft) + 1, vocab]` of the last rows."""
        model = self._model
        n, end = len(new), held + len(new)
        if end > self._room:
            self._grow(end)
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        half, group, shared = dim // 2, heads // kv_heads, 2 * kv_heads
        queries, width = group * n, padded_keys(end)
        spare = -queries % ROWS
        if draft.is_chain:
            angles = self._angles[:, held:end]
            mask = self._chain_mask(n, held, width)
        else:
            angles = self._angles[:, torch.tensor(positions(n, held, draft), device=model.device)]
            mask = self._mask(F.pad(visible(n, held, draft), (0, width - end)))
        cos, sin = self._turn(n, angles)
        places = self._kv[:, :, :, held:end].unbind()
        if width != self._seen[0]:
            self._seen = (width, *(self._kv[:, i, None, :, :width].unbind() for i in (0, 1)))
        _, keys, values = self._seen
        rows = F.embedding(torch.tensor(new, device=model.device), model.embedding)
        for i, layer in enumerate(model.layers):
            qkv = layer.qkv(layer.enter(rows)).view(n, heads + shared, dim)
            if layer.norm_heads is not None:
                qkv = layer.norm_heads(qkv)
            turned = qkv * cos + qkv.roll(half, -1) * sin
            places[i].copy_(turned.narrow(1, heads, shared).view(n, 2, kv_heads, dim).permute(1, 2, 0, 3))
            # Heads that share keys are more rows of one head: a pass over few rows costs what one row costs.
            asked = turned.narrow(1, 0, heads).transpose(0, 1).reshape(1, kv_heads, queries, dim)
            if spare:
                asked = F.pad(asked, (0, 0, 0, spare))
            mixed = F.scaled_dot_product_attention(asked, keys[i], values[i], attn_mask=mask)[0, :, :queries]
            rows = rows.add_(layer.out(mixed.reshape(heads, n, dim).transpose(0, 1).reshape(n, heads * dim)))
            gate, up = layer.gate_up(layer.between(rows)).chunk(2, -1)
            rows = rows.add_(layer.down(F.silu(gate).mul_(up)))
        self._length = end
        return model.head(model.leave(rows[-len(draft) - 1 :]))

    def _grow(self, end: int) -> None:
        """Make room for `end` positions; by doubling, so that a long text is copied a bounded number of times."""
        model, old = self._model, self._kv
        room = max(BLOCK, 2 * self._room, end + -end % BLOCK)
        # Zeros, since what is masked is multiplied by nothing, and nothing times what memory held may be no number.
        self._kv = torch.zeros(
            (len(model.layers), 2, model.kv_heads, room, model.head_dim), dtype=model.dtype, device=model.device
        )
        if self._room:
            self._kv[:, :, :, : self._room] = old
        self._room = room
        self._angles = model.rotation(torch.arange(room, device=model.device))
        self._masks.clear()
        self._seen = (0, (), ())

    def _turn(self, n: int, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for n rows of all heads, `[n, heads, dim]`.

        Values are turned by no angle, so that they can be written together with the keys.
        """
        model = self._model
        if n not in self._turns:
            heads, turned = model.heads + 2 * model.kv_heads, model.heads + model.kv_heads
            both = angles.new_zeros(2, n, heads, model.head_dim)
            both[0, :, turned:] = 1
            self._turns = {k: v for k, v in self._turns.items() if k <= FEW} | {n: (*both, both[:, :, :turned])}
        cos, sin, part = self._turns[n]
        part.copy_(angles)
        return cos, sin

    def _chain_mask(self, n: int, held: int, width: int) -> Tensor:
        """For few rows a view into one staircase, long enough for every place that they can stand at."""
        ones = partial(torch.ones, dtype=torch.bool, device=self._model.device)
        if n > FEW:
            return self._mask(ones(n, width).tril(held))
        if n not in self._masks:
            self._masks[n] = self._mask(ones(n, 2 * self._room).tril(self._room))
        first = self._room - held
        return self._masks[n][:, first : first + width]

    def _mask(self, seen: Tensor) -> Tensor:
        """0 where seen and the least number elsewhere, a row for each row of queries: `[group * n + spare, keys]`."""
        model = self._model
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(~seen.cpu(), torch.finfo(model.dtype).min)
        mask = mask.repeat(model.heads // model.kv_heads, 1)
        return F.pad(mask, (0, 0, 0, -len(mask) % ROWS)).to(model.device)
