"""Checks of configuration, tokenizer and weight files in untrusted model directories."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from specdemo.background import TaskCancelled
from specdemo.core.errors import UserError, plain_text
from specdemo.core.formats import format_bytes
from specdemo.models import model_sizes
from specdemo.models.memory import is_out_of_memory
from specdemo.worker import Stopped

MAX_TOKENIZER_BYTES, _MAX_SETTINGS_BYTES = 64_000_000, 8_000_000
_MAX_HEADER_BYTES = 25_000_000
_MAX_COMMAS, _MAX_BRACKETS = 4_000_000, 2_000_000
_MAX_DEPTH, _MAX_VALUES = 50, 200_000
_READ = ("*.json", "*.txt", "*.model", "*.spm", "*.bpe", "*.jinja", "*.safetensors")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.spm", "*.bpe", "model.safetensors.index.json")
_TEMPLATES = "additional_chat_templates"
_MAX_EXPERTS_OF_ALL_LAYERS, _MAX_POSITION_TABLE = 50_000, 1 << 26
_MAX_TOKEN_IDS = 1_000

# Pattern of keys, smallest value and largest value.
_SIZES = (
    (r"num_(hidden_|encoder_|decoder_)?layers|(en|de)coder_layers|n_layers?", 1, model_sizes.MAX_LAYERS),
    (r".*(layers?|blocks|depths?|loops|repeats)", None, model_sizes.MAX_LAYERS),
    (r"(num_|n_)?((en|de)coder_)?((attention|key_value|kv)_)?heads|n_head", 1, model_sizes.MAX_HEADS),
    (r".*heads?", None, 65_536),
    (r"hidden_size|d_model|n_embd|embedding_size", 1, model_sizes.MAX_WIDTH),
    (r"head_dim|d_kv", 0, model_sizes.MAX_HEAD_DIM),
    (r"intermediate_size|d_ff|ffn_dim|(en|de)coder_ffn_dim|n_inner", 1, model_sizes.MAX_INNER),
    (r"vocab_size", 1, model_sizes.MAX_VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx", 1, model_sizes.MAX_POSITIONS),
    (r".*(positions?|position_embeddings|seq_len|seq(uence)?_length)", None, model_sizes.MAX_POSITIONS),
    (r"sliding_window", 0, model_sizes.MAX_INT32),
    (r".*experts(_per_tok)?", None, 16_384),
    (r".*(_size|_dim|_rank|channels|width|dims|sizes|buckets)", None, 1 << 24),
)
_POSITIVE = "|".join(
    (
        *("rope_theta", "rotary_emb_base", "factor", "attention_factor", "(low|high)_freq_factor", "beta_(fast|slow)"),
        *("rms_norm_eps", "layer_norm_eps(ilon)?", "query_pre_attn_scalar", "(attn|final)_logit_softcapping"),
        "original_max_position_embeddings",
    )
)
_SHARE = r"partial_rotary_factors?|rotary_pct"
_TOKEN_ID = r"(bos|eos|pad|sep|decoder_start|forced_bos|forced_eos)_token_id"
_LARGEST_FLOAT, _LARGEST_INT = 3.5e38, 1 << 63
_MAX_WEIGHTS_PER_BYTE, _SMALL_MODEL = 8, 1_000_000
_ATTENTION = r"_?(attn|experts)_implementation(_internal)?"

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
        reason = _reason(error, str(folder or ""), name)
        raise UserError(f"{name} {problem} ({reason}): choose another {kind}") from error


def converts_errors(function: Callable[..., Result]) -> Callable[..., Result]:

    @wraps(function)
    def checked(spec: Any, *args: Any, **options: Any) -> Result:
        with model_errors(spec.name):
            return function(spec, *args, **options)

    return checked


def _reason(error: BaseException, folder: str = "", name: str = "") -> str:
    if isinstance(error, KeyError) and " " not in str(error):
        return f"unknown value {plain_text(str(error), 60)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    text = plain_text(line.replace(folder, name) if folder else line, 150).rstrip(".: ")
    return text if " " in text else f"{type(error).__name__} {text}".rstrip()


def check_folder(name: str, folder: Path) -> None:
    check_files(name, folder)
    check_config(name, read_settings(name, folder / "config.json"))
    if (folder / "generation_config.json").exists():
        _check_values(f"generation_config.json of {name}", read_settings(name, folder / "generation_config.json"))


def check_files(name: str, folder: Path) -> None:
    for path in _files(folder):
        label = f"{path.relative_to(folder).as_posix()} of {name}"
        if not _inside(path, folder):
            raise UserError(f"{label} is a link out of the directory: copy the file into it")
        mode = path.stat()
        if not stat.S_ISREG(mode.st_mode):
            raise UserError(f"{label} is not a regular file: replace it by one")
        check_sizes(name, {path.name: mode.st_size})
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{name} contains an adapter: merge it into the weights first")


def check_sizes(name: str, sizes: Mapping[str, int]) -> None:
    for file, size in sizes.items():
        if size > (limit := _largest(file)):
            raise UserError(
                f"{file} of {name} has {format_bytes(size)}, more than {format_bytes(limit)}: choose another model"
            )


def _files(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if any(fnmatch.fnmatch(entry.name, pattern) for pattern in _READ) and not entry.is_dir():
            yield folder / entry.name
    templates = folder / _TEMPLATES
    if templates.is_symlink() or templates.is_file():
        yield templates
    elif templates.is_dir():
        yield from templates.iterdir()


def _largest(name: str) -> float:
    if name in _SETTINGS or name.endswith(".jinja"):
        return _MAX_SETTINGS_BYTES
    return MAX_TOKENIZER_BYTES if any(fnmatch.fnmatch(name, pattern) for pattern in _TOKENIZERS) else math.inf


def _inside(path: Path, folder: Path) -> bool:
    if not path.is_symlink():
        return True
    root = folder.resolve()
    if root.parent.name == "snapshots":  # files may link to ../../blobs
        root = root.parents[1]
    target = Path(os.path.realpath(path))
    return target.exists() and target.is_relative_to(root)


def read_settings(name: str, path: Path) -> dict[str, Any]:
    label = f"{path.name} of {name}"
    try:
        text = path.read_bytes()
        if text.count(b",") > _MAX_COMMAS or text.count(b"[") + text.count(b"{") > _MAX_BRACKETS:
            raise ValueError("it has too many values")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise UserError(f"{label} is not valid JSON ({_reason(error)}): replace the file") from error
    except RecursionError:
        raise UserError(f"{label} is nested too deeply: replace the file") from None
    if not isinstance(value, dict):
        raise UserError(f"{label} is not a JSON object: replace the file")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {plain_text(repeated, 50)!r} occurs twice")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def walk(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from walk(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield "", item
            yield from walk(item, depth + 1)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    label = f"config.json of {name}"
    _check_values(label, config)
    if not isinstance(config.get("model_type", ""), str):
        raise UserError(f"{label} has a model_type that is not a text: choose another model")
    if config.get("transformers_weights") is not None:
        raise UserError(f"{label} names other weights than model.safetensors: rename the file and delete the entry")
    for part in _parts(config):
        model_sizes.sizes_of_config(part).check(label)
        experts = max((n for key, n in part.items() if key.endswith("experts") and isinstance(n, int)), default=0)
        layers = _first(part, "num_layers", "encoder_layers")
        if layers and layers * experts > _MAX_EXPERTS_OF_ALL_LAYERS:
            raise UserError(f"{label} has {layers:,} layers of {experts:,} experts: choose a smaller model")
        positions, width = _first(part, "max_position_embeddings"), _first(part, "d_model", "emb_dim")
        if positions and width and positions * width > _MAX_POSITION_TABLE:
            raise UserError(f"{label} has a table of {positions:,} positions: choose another model")


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in ("text_config", "encoder", "decoder"):
        if isinstance(config.get(key), dict):
            yield from _parts(config[key])


def _check_values(label: str, settings: Mapping[str, Any]) -> None:
    count = 0
    try:
        for key, value in walk(settings):
            count += 1
            if count > _MAX_VALUES:
                raise ValueError(f"it has more than {_MAX_VALUES:,} values")
            if _is_number(value) and not abs(value) <= (_LARGEST_INT if type(value) is int else _LARGEST_FLOAT):
                raise ValueError(f"{key or 'a list'} has a number beyond the range of floats")
            if problem := _problem(key, value):
                raise ValueError(f"{key} is {_shown(value)}, not {problem}")
    except ValueError as error:
        raise UserError(f"{label} is invalid ({plain_text(str(error))}): choose another model") from None


def _problem(key: str, value: Any) -> str:
    if value is None or not key:  # items of lists have no key
        return ""
    if re.fullmatch(_TOKEN_ID, key):
        return "" if _are_token_ids(value) else "a token id"
    if re.fullmatch(_ATTENTION, key):
        return "" if isinstance(value, str) and not {*value} & {*"/:@"} else "the name of an attention implementation"
    if re.fullmatch(_POSITIVE, key):
        return "" if all(_is_number(item) and item > 0 for item in _items(value)) else "a positive number"
    if re.fullmatch(_SHARE, key):
        shares = all(_is_number(item) and 0 < item <= 1 for item in _items(value))
        return "" if shares else "a number above 0 and up to 1"
    for pattern, low, high in _SIZES:
        if re.fullmatch(pattern, key):
            return _size_problem(value, low, high)
    return ""


def _size_problem(value: Any, low: int | None, high: int) -> str:
    numbers = [item for item in _items(value) if low is not None or (_is_number(item) and item > high)]
    valid = all(type(item) is int and (low is None or item >= low) and item <= high for item in numbers)
    return "" if valid else f"a whole number from {low or 0:,} to {high:,}"


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_token_ids(value: Any) -> bool:
    ids = list(_items(value))
    return len(ids) <= _MAX_TOKEN_IDS and all(type(i) is int and -100 <= i < 1 << 31 for i in ids)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return plain_text(text) if len(text) < 40 else "too long"


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("model-*-of-*.safetensors"))


def check_weights(name: str, folder: Path) -> None:
    files = weight_files(folder)
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
            raise UserError(
                f"the weights of {name} are damaged ({path.name} has an absurd header): download them again"
            )
    index = folder / "model.safetensors.index.json"
    if index.exists() and files[:1] != [folder / "model.safetensors"]:
        listed = read_settings(name, index).get("weight_map")
        shards = {path.name for path in files}
        if not isinstance(listed, dict) or any(not isinstance(shard, str) for shard in listed.values()):
            raise UserError(f"{index.name} of {name} lists no files: download it again")
        if others := sorted({*listed.values()} - shards):
            raise UserError(f"{index.name} of {name} lists {plain_text(others[0], 60)!r}: download this file")


def check_weight_count(name: str, folder: Path, count: int) -> None:
    """Raise `UserError` if a model of `count` weights is far larger than its files; missing weights are allocated."""
    stored = sum(path.stat().st_size for path in weight_files(folder))
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
