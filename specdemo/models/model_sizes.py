"""Schema of the configurations of supported families, and sizes, compared before anything is built from them.

The limits exceed those of all published models. With them, sizes and their sums in C are below 2^31.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specdemo.core.errors import UserError, plain_text

MAX_HEADS, MAX_HEAD_DIM = 4_096, 4_096
MAX_HEADS_WIDTH = 1 << 18
MAX_INT32 = (1 << 31) - 1
_MAX_TOKEN_IDS = 1_000
_LARGEST_FLOAT = 3.4e38

Schema = TypeVar("Schema", bound=BaseModel)

_ROTATES_WHOLE_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma2")  # names of model types
FAMILIES = (*_ROTATES_WHOLE_HEADS, "gpt2", "gpt_neox", "t5")

_Layers = Annotated[int, Field(ge=1, le=1_000)]
_Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
_HeadDim = Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)]
_Width = Annotated[int, Field(ge=1, le=65_536)]
_Inner = Annotated[int, Field(ge=1, le=1 << 20)]
_Tokens = Annotated[int, Field(ge=1, le=4_000_000)]
_Positions = Annotated[int, Field(ge=1, le=1 << 24)]
_Window = Annotated[int, Field(ge=0, le=MAX_INT32)]
_Positive = Annotated[float, Field(gt=0, le=_LARGEST_FLOAT)]
_Share = Annotated[float, Field(gt=0, le=1)]


def _token_ids(value: Any) -> Any:
    ids = value if isinstance(value, list) else [value]
    if len(ids) > _MAX_TOKEN_IDS:
        raise ValueError("too many token ids")
    if value is not None and not all(type(token) is int and -100 <= token <= MAX_INT32 for token in ids):
        raise ValueError("not a token id")
    return value


_TokenIds = Annotated[Any, AfterValidator(_token_ids)]


class SpecialTokens(BaseModel):
    """Tokens that config.json and generation_config.json name, of any architecture."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    bos_token_id: _TokenIds = None
    eos_token_id: _TokenIds = None
    pad_token_id: _TokenIds = None
    sep_token_id: _TokenIds = None
    decoder_start_token_id: _TokenIds = None
    forced_bos_token_id: _TokenIds = None
    forced_eos_token_id: _TokenIds = None


class Rotation(BaseModel):
    """Rotary embedding of config.json."""

    model_config = ConfigDict(extra="allow", strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    attention_factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    original_max_position_embeddings: _Positive | None = None
    partial_rotary_factor: _Share | None = None


class ModelConfig(SpecialTokens):
    """config.json of a supported family, with all names that `transformers` accepts for a value."""

    model_type: str = ""
    num_hidden_layers: _Layers | None = None
    n_layer: _Layers | None = None
    num_layers: _Layers | None = None
    num_decoder_layers: _Layers | None = None
    num_attention_heads: _Heads | None = None
    n_head: _Heads | None = None
    num_heads: _Heads | None = None
    num_key_value_heads: _Heads | None = None
    hidden_size: _Width | None = None
    n_embd: _Width | None = None
    d_model: _Width | None = None
    head_dim: _HeadDim | None = None
    d_kv: _HeadDim | None = None
    intermediate_size: _Inner | None = None
    n_inner: _Inner | None = None
    d_ff: _Inner | None = None
    vocab_size: _Tokens | None = None
    max_position_embeddings: _Positions | None = None
    n_positions: _Positions | None = None
    n_ctx: _Positions | None = None
    sliding_window: _Window | None = None
    num_labels: _Positions | None = None
    rms_norm_eps: _Positive | None = None
    layer_norm_eps: _Positive | None = None
    layer_norm_epsilon: _Positive | None = None
    rope_theta: _Positive | None = None
    rotary_emb_base: _Positive | None = None
    query_pre_attn_scalar: _Positive | None = None
    attn_logit_softcapping: _Positive | None = None
    final_logit_softcapping: _Positive | None = None
    partial_rotary_factor: _Share | None = None
    rotary_pct: _Share | None = None
    rope_parameters: Rotation | None = None
    rope_scaling: Rotation | None = None

    @property
    def layers(self) -> int | None:
        return self.num_hidden_layers or self.n_layer or self.num_layers

    @property
    def heads(self) -> int | None:
        return self.num_attention_heads or self.n_head or self.num_heads

    @property
    def values_per_head(self) -> int | None:
        stored = self.head_dim or self.d_kv
        width, heads = self._width, self.heads
        return width // heads if stored is None and width and heads and width % heads == 0 else stored

    @property
    def kv_values(self) -> int:
        """Values of keys and values per layer and position; 0 if unknown."""
        return 2 * (self.num_key_value_heads or self.heads or 0) * (self.values_per_head or 0)

    def contradictions(self) -> Iterator[str]:
        """Yield contradictions between sizes."""
        width, heads = self._width, self.heads
        dim, kv_heads = self.values_per_head, self.num_key_value_heads
        if width and heads and dim is None:
            yield f"divides {width:,} values among {heads:,} heads"
        if heads and kv_heads and heads % kv_heads:
            yield f"divides {heads:,} heads among {kv_heads:,} keys and values"
        if heads and dim and heads * dim > MAX_HEADS_WIDTH:
            yield f"has {heads:,} heads of {dim:,} values, together more than {MAX_HEADS_WIDTH:,}"
        rotated = self._rotated(dim) if dim else None
        if dim is None or rotated is None:
            return
        if rotated < 2 or rotated % 2:
            yield f"rotates {rotated:,} values of a head, not an even number from 2"
        if self.model_type in _ROTATES_WHOLE_HEADS and rotated != dim:
            yield f"rotates {rotated:,} of the {dim:,} values of a head, and its architecture rotates all"

    @property
    def _width(self) -> int | None:
        return self.hidden_size or self.n_embd or self.d_model

    def _rotated(self, head_dim: int) -> int | None:
        """Return the rotated values of a head as computed by `transformers`."""
        rope = self.rope_scaling or self.rope_parameters or Rotation()
        if self.model_type == "gpt_neox":
            return int(head_dim * (rope.partial_rotary_factor or self.rotary_pct or 0.25))
        if self.model_type not in _ROTATES_WHOLE_HEADS:
            return None
        if (rope.rope_type or rope.type or "default") == "default":
            return head_dim
        return int(head_dim * (rope.partial_rotary_factor or self.partial_rotary_factor or 1))


def check_model_config(label: str, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first value of a configuration that is invalid or contradicts others."""
    if problem := next(check_schema(label, ModelConfig, settings).contradictions(), ""):
        raise UserError(f"{label} {problem}: choose another model")


def check_schema(label: str, schema: type[Schema], settings: Mapping[str, Any]) -> Schema:
    try:
        return schema.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        reason = f"{key} is {shown(problem['input'])}: {problem['msg']}"
        raise UserError(f"{label} is invalid ({plain_text(reason, 150)}): choose another model") from None


def shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return plain_text(text) if len(text) < 40 else "too long"
