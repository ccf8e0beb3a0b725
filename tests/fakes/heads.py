"""Random heads for small targets, written as published checkpoints are, and their distributions computed again.

The distributions of the full text are computed row by row from hidden states of `transformers`, from the published
descriptions and without the head engines.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from specdemo.models.cached_head import Head

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48
BLOCK = 4  # rows of a DFlash block
RANK = 6  # of a Markov head


def _layer_shapes(prefix: str, inputs: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a decoder layer whose attention has `inputs` columns."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (width, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, width),
        "mlp.up_proj": (INNER, width),
        "mlp.down_proj": (width, INNER),
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _random(shapes: dict[str, tuple[int, ...]], scale: float) -> dict[str, Tensor]:
    return {f"{name}.weight": scale * torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def _vocabulary(ids: list[int] | None, vocab: int) -> dict[str, Tensor]:
    if ids is None:
        return {}
    used = torch.zeros(vocab, dtype=torch.bool)
    used[ids] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": used}


def head_tensors(target: PretrainedConfig, ids: list[int] | None, own: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return tensors under the names of SafeAILab; `own`: stored instead of shared with the target."""
    torch.manual_seed(0)
    width, vocab = target.hidden_size, target.vocab_size
    tensors = _random({"fc": (width, 3 * width), **_layer_shapes("midlayer", 2 * width, width)}, 1.5)
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = 1 + 0.3 * torch.randn(width)
    rows = {"lm_head": len(ids or range(vocab)), "embed_tokens": vocab}
    tensors |= {f"{name}.weight": torch.randn(rows[name], width) for name in own}
    return tensors | _vocabulary(ids, vocab)


def head_config(target: PretrainedConfig, drafted: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafted,
        "max_position_embeddings": 512,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **changes,
    }


def eagle_tensors(target: PretrainedConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    width = target.hidden_size
    tensors = _random({"fc": (width, 2 * width), **_layer_shapes("layers.0", width, width)}, 1.5)
    tensors["fc.bias"] = 0.3 * torch.randn(width)
    tensors["layers.0.post_attention_layernorm.weight"] = 1 + 0.3 * torch.randn(width)
    return tensors


def eagle_config(target: PretrainedConfig) -> dict[str, Any]:
    config = head_config(target, 0, architectures=["LlamaForCausalLM"], bias=True)
    del config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]
    return config


def medusa_tensors(
    target: PretrainedConfig, ids: list[int] | None = None, heads: int = 3, blocks: int = 1, own: bool = False
) -> dict[str, Tensor]:
    """Return tensors under the names of FasterDecoding; `own`: with output matrices."""
    torch.manual_seed(0)
    width, tensors = target.hidden_size, {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = 0.5 * torch.randn(width, width) / width**0.5
            tensors[f"{i}.{j}.linear.bias"] = 0.3 * torch.randn(width)
        if own:
            tensors[f"{i}.{blocks}.weight"] = 0.3 * torch.randn(len(ids or range(target.vocab_size)), width)
    return tensors if ids is None else tensors | {"d2t": torch.tensor(ids) - torch.arange(len(ids))}


def medusa_config(**changes: Any) -> dict[str, Any]:
    """Return config.json of Medusa heads with too few heads, as in published files."""
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target", **changes}


def save_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def random_head(folder: Path, target: PretrainedConfig, ids: list[int], **changes: Any) -> str:
    return save_head(folder, head_tensors(target, ids), head_config(target, len(ids), **changes))


def dflash_tensors(target: PretrainedConfig, ids: list[int] | None, markov: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a DFlash head of two layers, or of a DSpark head with a Markov head."""
    torch.manual_seed(0)
    width, drafted = target.hidden_size, len(ids or range(target.vocab_size))
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, 3 * width)}
    norms: dict[str, int] = {"hidden_norm": width, "norm": width}
    for layer in ("layers.0", "layers.1"):
        norms |= {f"{layer}.{name}_layernorm": width for name in ("input", "post_attention")}
        norms |= {f"{layer}.self_attn.{name}_norm": HEAD_DIM for name in "qk"}
        shapes |= _layer_shapes(layer, width, width)
    if markov:
        shapes |= {"markov_head.markov_w1": (target.vocab_size, RANK), "markov_head.markov_w2": (drafted, RANK)}
        shapes["confidence_head.proj"] = (1, width + RANK)
    tensors = _random(shapes, 2)
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(size) for name, size in norms.items()}
    if markov:
        tensors["confidence_head.proj.bias"] = torch.randn(1)
    return tensors | _vocabulary(ids, target.vocab_size)


def dflash_config(target: PretrainedConfig, drafted: int, markov: bool = False, **changes: Any) -> dict[str, Any]:
    """Return config.json of a DFlash or DSpark head of `speculators`."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = head_config(target, drafted)
    kept = (*names, "rms_norm_eps", "rope_theta", "vocab_size", "max_position_embeddings")
    dspark = {"markov_rank": RANK, "markov_head_type": "vanilla"} if markov else {}
    return {
        "speculators_model_type": "dspark" if markov else "dflash",
        "transformer_layer_config": {"num_hidden_layers": 2, **{name: layer[name] for name in kept}},
        "aux_hidden_state_layer_ids": [0, 1, 2],
        "block_size": BLOCK,
        "mask_token_id": target.vocab_size - 1,
        "draft_vocab_size": drafted,
        **dspark,
        **changes,
    }


def checkpoint(
    kind: str, target: PretrainedConfig, ids: list[int] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config.json of a random head; `ids`: draft vocabulary, which EAGLE-1/2 lacks."""
    drafted = len(ids or range(target.vocab_size))
    if kind == "eagle":
        return eagle_tensors(target), eagle_config(target)
    if kind == "eagle3":
        return head_tensors(target, ids), head_config(target, drafted)
    if kind == "medusa":
        return medusa_tensors(target, ids), medusa_config(draft_vocab_size=drafted)
    markov = kind == "dspark"
    return dflash_tensors(target, ids, markov), dflash_config(target, drafted, markov)


def opened(head: Head, states: Tensor | None = None) -> Any:
    """Return the head for a text of a target with these states; None: its rows are given to `start_rows`."""

    class GivenStates:
        def states(self, tokens: Sequence[int], start: int) -> Tensor | None:
            return None if states is None else states[start : len(tokens)]

    return head.open(GivenStates())


def head_for(folder: str, where: Path, method: str = "eagle") -> str:
    """Write a random head of `method` for a saved target, with every other token; return its directory."""
    target = AutoConfig.from_pretrained(folder)
    ids = list(range(0, target.vocab_size, 2))
    if method == "medusa":
        return save_head(where, medusa_tensors(target, ids, heads=8), medusa_config(draft_vocab_size=len(ids)))
    if method == "block":
        tensors = dflash_tensors(target, ids, markov=True)
        tensors["confidence_head.proj.bias"] = torch.tensor([0.5])  # drafts of several lengths
        return save_head(where, tensors, dflash_config(target, len(ids), markov=True, block_size=12))
    return random_head(where, target, ids)


def reference_logits(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any, tokens: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """Return the logits `[len(drafted) + 1, vocab]` after `tokens` and each of `drafted`; others than drafted: -inf."""
    return next(branch_logits(tensors, config, target, tokens, [drafted]))


def branch_logits(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Any,
    tokens: Sequence[int],
    branches: Iterable[Sequence[int]],
) -> Iterator[Tensor]:
    """Yield the logits of `reference_logits` for each branch of a tree."""
    with torch.no_grad():
        hidden = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        if "medusa_num_heads" in config:
            yield from (_medusa(tensors, target, hidden[-1][0, -1], len(drafted) + 1) for drafted in branches)
            return
        taps = config.get("eagle_aux_hidden_state_layer_ids", [len(hidden) - 1])
        states = torch.cat([hidden[tap][0] for tap in taps], -1)
        kind = _Eagle3 if "midlayer.mlp.up_proj.weight" in tensors else _Eagle
        head = kind(tensors, config, target)
        last = head.committed(states, tokens)
        for drafted in branches:
            yield head.logits(last, len(states), drafted)


def _medusa(tensors: Mapping[str, Tensor], target: Any, state: Tensor, count: int) -> Tensor:
    rows = []
    for head in range(count):
        x, block = state, 0
        while f"{head}.{block}.linear.weight" in tensors:
            y = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
            x, block = x + y * y.sigmoid(), block + 1
        output = tensors.get(f"{head}.{block}.weight", target.get_output_embeddings().weight)
        row = output @ x
        rows.append(row.masked_fill(~_drafted(tensors, len(row)), -math.inf))
    return torch.stack(rows)


def _drafted(tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor:
    if "d2t" not in tensors:
        return torch.ones(vocab_size, dtype=torch.bool)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


class _Eagle3:
    layer = "midlayer."

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Any) -> None:
        self.tensors, self.epsilon = tensors, config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.embeddings = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.output = target.get_output_embeddings().weight
        self.allowed = _drafted(tensors, len(self.output))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def committed(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        self.allowed[list(tokens[1:])] = True  # the text extends the draft vocabulary
        for position, (state, following) in enumerate(zip(states, tokens[1:], strict=True)):
            row = self.row(self.entered(state), following, position)
        return row

    def logits(self, last: Tensor, length: int, drafted: Sequence[int]) -> Tensor:
        rows = [last]
        del self.keys[length:], self.values[length:]
        for i, token in enumerate(drafted):
            rows.append(self.row(rows[-1], token, length + i))
        return torch.stack([self.output @ self.left(row) for row in rows]).masked_fill(~self.allowed, -math.inf)

    def entered(self, state: Tensor) -> Tensor:
        return self.tensors["fc.weight"] @ state

    def left(self, row: Tensor) -> Tensor:
        return self.norm("norm", row)

    def combined(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Return the residual and the input of attention."""
        embedded = self.norm("midlayer.input_layernorm", self.embeddings[token])
        return state, torch.cat([embedded, self.norm("midlayer.hidden_norm", state)])

    def row(self, state: Tensor, token: int, position: int) -> Tensor:
        state, x = self.combined(state, token)
        query, key, value = (self.weight(f"self_attn.{name}_proj") @ x for name in "qkv")
        self.keys.append(torch.stack([self.rotated(head, position) for head in key.view(KV_HEADS, HEAD_DIM)]))
        self.values.append(value.view(KV_HEADS, HEAD_DIM))
        mixed = []
        for i, head in enumerate(query.view(HEADS, HEAD_DIM)):
            group = i * KV_HEADS // HEADS
            head = self.rotated(head, position)
            weights = (torch.stack(self.keys)[:, group] @ head / math.sqrt(HEAD_DIM)).softmax(0)
            mixed.append(weights @ torch.stack(self.values)[:, group])
        state = state + self.weight("self_attn.o_proj") @ torch.cat(mixed)
        x = self.norm(f"{self.layer}post_attention_layernorm", state)
        gate, up = self.weight("mlp.gate_proj") @ x, self.weight("mlp.up_proj") @ x
        return state + self.weight("mlp.down_proj") @ (gate * gate.sigmoid() * up)

    def rotated(self, head: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        angles = position * self.theta ** (-2 * torch.arange(half) / HEAD_DIM)
        first, second = head[:half], head[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x / (x.square().mean() + self.epsilon).sqrt()

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.layer}{name}.weight"]


class _Eagle(_Eagle3):
    """EAGLE-1/2: `fc` of embedding and final state, no norms around the layer."""

    layer = "layers.0."

    def entered(self, state: Tensor) -> Tensor:
        return state

    def left(self, row: Tensor) -> Tensor:
        return row

    def combined(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        x = self.tensors["fc.weight"] @ torch.cat([self.embeddings[token], state]) + self.tensors["fc.bias"]
        return x, x
