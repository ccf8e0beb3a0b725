"""Loading of heads: the kind of a checkpoint, its files and weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from specdemo.core.errors import UserError
from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.models.cached_head import Head
from specdemo.models.engines.engine import cache_capacity
from specdemo.models.engines.select import engine_of
from specdemo.models.engines.torch_head import HeadConfig, HeadWeights
from specdemo.models.head_kinds import (
    EAGLE,
    EAGLE3,
    HEAD_KINDS,
    HeadCheckpoint,
    HeadKind,
    listed_taps,
    read_head_config,
)
from specdemo.models.hub import Hub, local_shapes
from specdemo.models.spec import HeadSpec, is_gguf
from specdemo.models.untrusted import model_errors, weight_files
from specdemo.models.zoo import REVISIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from specdemo.models.load import LoadedModel
    from specdemo.models.memory_plan import MemoryPlan

LoadedDrafter: TypeAlias = "LoadedModel | Head"

HALF_BYTES = 2  # of a value in the cache of a native head
_NATIVE_BITS = {"fc": 8.5, "lm_head": 8.0, "embed_tokens": 32.0}  # with scales
_LAYER_BITS = 4.5
_FILE_OF_TARGET = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)
_CONVERT = "run specdemo convert-head FILE DIRECTORY and give the directory"


@dataclass(frozen=True)
class HeadPlan:
    """Bytes of a loaded head."""

    weights: int  # for heads of torch: size of the files
    position: int  # keys and values of a token

    def total(self, context: int) -> int:
        return self.weights + cache_capacity(context) * self.position


def tap_count(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> int:
    """Return the number of hidden states that a head receives, before it is downloaded. Raises `UserError`."""
    if Path(name).expanduser().is_file():
        raise UserError(f"{name} is a file, and files other than safetensors may contain code: {_CONVERT}")
    config = read_head_config(name, hub.settings(name, report=report))
    with model_errors(name, kind="head"):
        return len(listed_taps(config, _kind(config), 0))


def head_files(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> tuple[Path, int]:
    """Return the directory of a head and the bytes of its weights. Raises `UserError` for pickles."""
    tap_count(name, hub, report)
    folder = hub.weights(name, report=report, remedy=_CONVERT)
    return folder, sum(path.stat().st_size for path in weight_files(folder))


def plan_head(name: str, target: MemoryPlan, hub: Hub) -> HeadPlan:
    """Return the memory of a head on the engine of its target. Raises `UserError`."""
    folder, size = head_files(name, hub)
    config = read_head_config(name, folder)
    kind = _kind(config)
    if not (target.native and kind is EAGLE3):
        return HeadPlan(size, 0)
    stored = local_shapes(name, folder)
    shapes = {kind.rename(key).removesuffix(".weight"): shape for key, (_, shape) in stored.items()}
    shapes.setdefault("lm_head", (config.integer("draft_vocab_size"), shapes["fc"][0]))
    bits = sum(prod(shape) * _NATIVE_BITS.get(name, _LAYER_BITS) for name, shape in shapes.items())
    return HeadPlan(round(bits / 8), 2 * shapes["self_attn.k_proj"][0] * HALF_BYTES)


def load_head(
    spec: HeadSpec,
    target: LoadedModel,
    hub: Hub | None = None,
    report: ReportProgress = ignore_progress,
    make: Callable[[HeadWeights, Any], Head] | None = None,
) -> Head:
    """Load a head for a loaded target; `make`: constructor in place of that of its kind.

    Raises `UserError` for files that do not fit the target.
    """
    if not engine_of(target.model).hidden_states:
        raise UserError(f"heads need hidden states, and {target.name} runs without them: choose method nasd or suffix")
    checkpoint = _checkpoint(spec, target.model.config, hub or Hub(), report)
    if warning := _verifier_warning(spec, checkpoint.config):
        warnings.warn(warning, stacklevel=2)
    report(Loading(f"reading {spec.title}"))
    kind = _kind(checkpoint.config)
    with model_errors(spec.name, kind="head"):
        return (make or kind.make)(checkpoint.read(kind), target.model)


def is_head(name: str, hub: Hub) -> bool:
    """Return True if a directory or hub id contains a head, by its configuration and the names of its tensors."""
    if is_gguf(name):
        return False
    revision = REVISIONS.get(name)
    config = read_head_config(name, hub.settings(name, revision))
    kind = next((kind for kind in HEAD_KINDS if kind.fits(config)), None)
    return kind is not None and (kind is not EAGLE or "fc.weight" in local_shapes(name, hub.weights(name, revision)))


def check_head(spec: HeadSpec, target: PretrainedConfig, hub: Hub) -> str:
    """Compare a head with its target; return a warning, or an empty text. Raises `UserError` for others."""
    checkpoint = _checkpoint(spec, target, hub)
    with model_errors(spec.name, kind="head"):
        checkpoint.check(_kind(checkpoint.config))
    return _verifier_warning(spec, checkpoint.config)


def _checkpoint(
    spec: HeadSpec, target: PretrainedConfig, hub: Hub, report: ReportProgress = ignore_progress
) -> HeadCheckpoint:
    folder, _ = head_files(spec.name, hub, report)
    config = read_head_config(spec.name, folder)
    text = target.get_text_config()
    return HeadCheckpoint(config, folder, text.num_hidden_layers, text.hidden_size, text.vocab_size)


def _kind(config: HeadConfig) -> HeadKind:
    kind = next((kind for kind in HEAD_KINDS if kind.fits(config)), None)
    if kind is None:
        given = config.values.get("speculators_model_type") or "unknown"
        known = ", ".join(kind.name for kind in HEAD_KINDS)
        raise UserError(f"{config.name} is a head of another kind ({given}): choose one of kind {known}")
    return kind


def _verifier_warning(spec: HeadSpec, config: HeadConfig) -> str:
    speculators = config.values.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    trained = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(trained, str) or not trained:
        return ""
    wanted, given = (
        _FILE_OF_TARGET.sub("", name.rstrip("/").rpartition("/")[2]) for name in (trained, spec.target.name)
    )
    if wanted.casefold() == given.casefold():
        return ""
    return f"{spec.title} was trained for {wanted}, and the target is {given}: few drafts may be accepted"
