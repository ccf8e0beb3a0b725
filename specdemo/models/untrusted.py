"""Checks of configuration, tokenizer and weight files in untrusted model directories.

Sizes are checked before anything is built. Their limits exceed those of all published models. With them, sizes and
their sums in C are below 2^31.
"""

from __future__ import annotations

import fnmatch
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from specdemo.background import TaskCancelled
from specdemo.core.errors import UserError, plain_text
from specdemo.core.formats import format_bytes
from specdemo.models.memory import is_out_of_memory
from specdemo.worker import Stopped

MAX_TOKENIZER_BYTES = 64_000_000  # of files other than weights
_MAX_COMMAS, _MAX_BRACKETS = 4_000_000, 2_000_000
SETTINGS_FILES = (  # that `transformers` reads, checked before any weights are downloaded
    *("*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt"),
    *("chat_template*", "*.jinja", "*.model", "*.spm", "*.bpe", "*.safetensors.index.json"),
)
_MAX_WEIGHTS_PER_BYTE, _SMALL_MODEL = 8, 1_000_000
_ATTENTION = re.compile(r"_?(attn|experts)_implementation(_internal)?")

MAX_INT32 = (1 << 31) - 1
MAX_HEADS, MAX_HEAD_DIM = 4_096, 4_096
MAX_HEADS_WIDTH = 1 << 18
_MAX_TOKEN_IDS = 1_000
_SMALLEST_FLOAT = 1e-38

_ROTATES_WHOLE_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma2")  # names of model types
FAMILIES = (*_ROTATES_WHOLE_HEADS, "gpt2", "gpt_neox", "t5")

# All names that `transformers` accepts for a value
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HEAD_DIM = ("head_dim", "d_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_POSITIVE = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rotary_emb_base", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "factor", "attention_factor", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
)
_LIMITS: tuple[tuple[tuple[str, ...], float, float], ...] = (  # names, least and largest value; integers are whole
    (_LAYERS, 1, 1_000),
    ((*_HEADS, "num_key_value_heads"), 1, MAX_HEADS),
    (_HEAD_DIM, 1, MAX_HEAD_DIM),
    (_WIDTH, 1, 65_536),
    (("intermediate_size", "n_inner", "d_ff"), 1, 1 << 20),
    (("vocab_size",), 1, 4_000_000),
    (("max_position_embeddings", "n_positions", "n_ctx", "num_labels"), 1, 1 << 24),
    (("sliding_window",), 0, MAX_INT32),
    (_POSITIVE, _SMALLEST_FLOAT, 1 / _SMALLEST_FLOAT),
    (("partial_rotary_factor", "rotary_pct"), _SMALLEST_FLOAT, 1),
)
_TOKEN_IDS = ("bos", "eos", "pad", "sep", "decoder_start", "forced_bos", "forced_eos")

Result = TypeVar("Result")


@contextmanager
def model_errors(
    name: str, problem: str = "cannot be loaded", folder: Path | None = None, kind: str = "model"
) -> Iterator[None]:
    """Convert exceptions, except cancellation and lack of memory, to `UserError`."""
    try:
        yield
    except (UserError, TaskCancelled, Stopped):
        raise
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # exception of Rust extensions
        if not (panic or isinstance(error, Exception)) or is_out_of_memory(error):
            raise
        if isinstance(error, SafetensorError):
            raise UserError(
                f"the weights of {name} are damaged ({plain_text(str(error))}): download them again"
            ) from error
        reason = error_reason(error, str(folder or ""), name)
        raise UserError(f"{name} {problem} ({reason}): choose another {kind}") from error


def converts_errors(function: Callable[..., Result]) -> Callable[..., Result]:

    @wraps(function)
    def checked(spec: Any, *args: Any, **options: Any) -> Result:
        with model_errors(spec.name):
            return function(spec, *args, **options)

    return checked


def error_reason(error: BaseException, folder: str = "", name: str = "") -> str:
    """Return the first line of an error, in which `folder` is replaced by `name`."""
    if isinstance(error, KeyError) and " " not in str(error):
        return f"unknown value {plain_text(str(error), 60)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    text = plain_text(line.replace(folder, name) if folder else line, 150).rstrip(".: ")
    return text if " " in text else f"{type(error).__name__} {text}".rstrip()


def check_files(name: str, folder: Path) -> None:
    root = folder.resolve()
    if root.parent.name == "snapshots":  # files may link to ../../blobs
        root = root.parents[1]
    patterns = (*SETTINGS_FILES, "*.safetensors")
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_dir() or not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            continue
        label = f"{path.relative_to(folder).as_posix()} of {name}"
        if not (path.exists() and path.resolve().is_relative_to(root)):
            raise UserError(f"{label} is a link out of the directory: copy the file into it")
        mode = path.stat()
        if not stat.S_ISREG(mode.st_mode):
            raise UserError(f"{label} is not a regular file: replace it by one")
        check_sizes(name, {path.name: mode.st_size})
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{name} contains an adapter: merge it into the weights first")


def check_sizes(name: str, sizes: Mapping[str, int]) -> None:
    for file, size in sizes.items():
        if size > MAX_TOKENIZER_BYTES and not file.endswith(".safetensors"):
            limit = format_bytes(MAX_TOKENIZER_BYTES)
            raise UserError(f"{file} of {name} has {format_bytes(size)}, more than {limit}: choose another model")


def read_settings(name: str, path: Path) -> dict[str, Any]:
    label = f"{path.name} of {name}"
    try:
        text = path.read_bytes()
        if text.count(b",") > _MAX_COMMAS or text.count(b"[") + text.count(b"{") > _MAX_BRACKETS:
            raise ValueError("it has too many values")
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{label} is not valid JSON ({error_reason(error)}): replace the file") from error
    except RecursionError:
        raise UserError(f"{label} is nested too deeply: replace the file") from None
    if not isinstance(value, dict):
        raise UserError(f"{label} is not a JSON object: replace the file")
    return value


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values inside objects and lists, with their keys."""
    pending = [("", value)]
    while pending:
        key, item = pending.pop()
        yield key, item
        if isinstance(item, dict):
            pending += item.items()
        elif isinstance(item, list):
            pending += (("", value) for value in item)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Check the values of a supported family; those of other architectures are tried by `try_architecture`."""
    label = f"config.json of {name}"
    if not isinstance(config.get("model_type", ""), str):
        raise UserError(f"{label} has a model_type that is not a text: choose another model")
    if config.get("transformers_weights") is not None:
        raise UserError(f"{label} names other weights than model.safetensors: rename the file and delete the entry")
    for key, value in walk(config):
        if value is None or not _ATTENTION.fullmatch(key):
            continue
        if not isinstance(value, str) or {*value} & {*"/:@"}:  # it may be code of the hub
            raise UserError(f"{label} has the attention {shown(value)}, which is no name: choose another model")
    if config.get("model_type") in FAMILIES:
        check_model_config(label, config)
    else:
        check_special_tokens(label, config)


def check_model_config(label: str, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first value of a configuration that is invalid or contradicts others."""
    check_special_tokens(label, settings)
    ropes = [settings.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not all(rope is None or isinstance(rope, dict) for rope in ropes):
        raise UserError(f"{label} has a rotary embedding that is no object: choose another model")
    for part in (settings, *filter(None, ropes)):
        for names, least, most in _LIMITS:
            kinds = (int,) if isinstance(least, int) else (int, float)
            for name in names:
                value = part.get(name)
                if value is not None and not (type(value) in kinds and least <= value <= most):
                    reason = f"{name} is {shown(value)}, not a number from {least:,} to {most:,}"
                    raise UserError(f"{label} is invalid ({reason}): choose another model")
    if problem := next(_contradictions(settings), ""):
        raise UserError(f"{label} {problem}: choose another model")


def check_special_tokens(label: str, settings: Mapping[str, Any]) -> None:
    for name in (f"{name}_token_id" for name in _TOKEN_IDS):
        value = settings.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not (
            len(ids) <= _MAX_TOKEN_IDS and all(type(token) is int and -100 <= token <= MAX_INT32 for token in ids)
        ):
            raise UserError(f"{label} is invalid ({name} is {shown(value)}, not a token id): choose another model")


def _first(settings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((settings[name] for name in names if settings.get(name)), None)


def _contradictions(settings: Mapping[str, Any]) -> Iterator[str]:
    width, heads = _first(settings, _WIDTH), _first(settings, _HEADS)
    dim = _first(settings, _HEAD_DIM)
    kind = settings.get("model_type")
    if dim is None and width and heads:
        dim = width // heads
    if heads and dim and heads * dim > MAX_HEADS_WIDTH:
        yield f"has {heads:,} heads of {dim:,} values, together more than {MAX_HEADS_WIDTH:,}"
    rotated = _rotated(settings, dim) if dim else None
    if rotated is None:
        return
    if rotated < 2 or rotated % 2:
        yield f"rotates {rotated:,} values of a head, not an even number from 2"
    if kind in _ROTATES_WHOLE_HEADS and rotated != dim:
        yield f"rotates {rotated:,} of the {dim:,} values of a head, and its architecture rotates all"


def _rotated(settings: Mapping[str, Any], head_dim: int) -> int | None:
    """Return the rotated values of a head as computed by `transformers`."""
    rope, kind = settings.get("rope_scaling") or settings.get("rope_parameters") or {}, settings.get("model_type")
    share = rope.get("partial_rotary_factor")
    if kind == "gpt_neox":
        return int(head_dim * (share or settings.get("rotary_pct") or 0.25))
    if kind not in _ROTATES_WHOLE_HEADS:
        return None
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        return head_dim
    return int(head_dim * (share or settings.get("partial_rotary_factor") or 1))


def shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return plain_text(repr(value), 40)


def weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("model-*-of-*.safetensors"))


def check_weights(name: str, folder: Path) -> None:
    """Raise `UserError` if the index of shards lists other files, which `transformers` would read."""
    index, shards = folder / "model.safetensors.index.json", {path.name for path in weight_files(folder)}
    if not index.exists() or shards == {"model.safetensors"}:
        return
    listed = read_settings(name, index).get("weight_map")
    files = {str(file) for file in listed.values()} if isinstance(listed, dict) else {"no files"}
    if others := sorted(files - shards):
        raise UserError(f"{index.name} of {name} lists {plain_text(others[0], 60)!r}: download this file")


def check_weight_count(name: str, folder: Path, model: Any) -> None:
    """Raise `UserError` if a model is far larger than its files; missing weights and masks are allocated."""
    stored = sum(path.stat().st_size for path in weight_files(folder))
    count = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if count > _MAX_WEIGHTS_PER_BYTE * stored + _SMALL_MODEL:
        raise UserError(
            f"the weights of {name} have {format_bytes(stored)}, and its configuration describes {count:,} weights: "
            "choose another model"
        )


def check_tensors(name: str, model: Any, loaded: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    computed = {key for key, _ in model.named_buffers()}
    wrong = {
        "missing": loaded["missing_keys"],
        "unexpected": {*loaded["unexpected_keys"]} - computed,
        "of other shapes": [key for key, *_ in loaded["mismatched_keys"]],
        "not floats": [key for key, _ in model.named_parameters() if dtypes.get(key, "F")[0] in "IUC"],
    }
    problems = [f"{kind}: {_listed(keys)}" for kind, keys in wrong.items() if keys]
    if problems:
        raise UserError(
            f"the weights of {name} do not match its configuration ({'; '.join(problems)}): choose another model"
        )


def _listed(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return plain_text(", ".join(names[:3]), 150) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
