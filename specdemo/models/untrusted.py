"""Checks of configuration, tokenizer and weight files in untrusted model directories."""

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
from specdemo.models.model_sizes import FAMILIES, check_model_config, check_special_tokens, shown
from specdemo.worker import Stopped

MAX_TOKENIZER_BYTES = 64_000_000  # of files other than weights
_MAX_COMMAS, _MAX_BRACKETS = 4_000_000, 2_000_000
SETTINGS_FILES = (  # that `transformers` reads, checked before any weights are downloaded
    *("*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt"),
    *("chat_template*", "*.jinja", "*.model", "*.spm", "*.bpe", "*.safetensors.index.json"),
)
_MAX_WEIGHTS_PER_BYTE, _SMALL_MODEL = 8, 1_000_000
_ATTENTION = re.compile(r"_?(attn|experts)_implementation(_internal)?")

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
