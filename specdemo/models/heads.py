"""Loading of heads: the kind of a checkpoint, its files and weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from specdemo.core.errors import UserError
from specdemo.models.engines.head import Head, HeadWeights
from specdemo.models.engines.select import engine_of, head_of
from specdemo.models.head_kinds.checkpoint import HeadCheckpoint, HeadKind
from specdemo.models.head_kinds.dflash import DFLASH, DSPARK
from specdemo.models.head_kinds.eagle import EAGLE
from specdemo.models.head_kinds.eagle3 import EAGLE3
from specdemo.models.head_kinds.medusa import MEDUSA
from specdemo.models.hub import Hub
from specdemo.models.spec import HeadSpec
from specdemo.models.untrusted import model_errors, read_settings, weight_files
from specdemo.worker import ReportProgress, TaskProgress, ignore_progress

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

LoadedDrafter: TypeAlias = "LoadedModel | LoadedHead"

HEAD_KINDS = (MEDUSA, DFLASH, DSPARK, EAGLE3, EAGLE)  # the first that fits is used
_CONVERT = "run specdemo convert-head FILE DIRECTORY and give the directory"
_FILE_OF_TARGET = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedHead:
    """Head in this process with its specification."""

    spec: HeadSpec
    head: Head

    @property
    def weight_bytes(self) -> int:
        return self.head.weight_bytes

    encoder = False

    @property
    def device(self) -> torch.device:
        return self.head.device


def tap_count(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> int:
    """Return the number of hidden states that a head receives, before it is downloaded. Raises `UserError`."""
    if Path(name).expanduser().is_file():
        raise UserError(f"{name} is a file, and files other than safetensors may contain code: {_CONVERT}")
    config = read_settings(name, hub.settings(name, report=report) / "config.json")
    with model_errors(name, kind="head"):
        return _kind(name, config).tap_count(config)


def head_files(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> tuple[Path, int]:
    """Return the directory of a head and the bytes of its weights. Raises `UserError` for pickles."""
    tap_count(name, hub, report)
    folder = hub.weights(name, report=report, remedy=_CONVERT)
    return folder, sum(path.stat().st_size for path in weight_files(folder))


def load_head(
    spec: HeadSpec, target: LoadedModel, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> LoadedHead:
    """Load a head for a loaded target. Raises `UserError` for files that do not fit it."""
    weights = read_head(spec, target, hub, report)
    with model_errors(spec.name, kind="head"):
        return LoadedHead(spec, head_of(weights, target.model))


def read_head(
    spec: HeadSpec, target: LoadedModel, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> HeadWeights:
    if not engine_of(target.model).hidden_states:
        raise UserError(f"heads need hidden states, and {target.name} runs without them: choose method nasd or suffix")
    hub = hub or Hub()
    folder, _ = head_files(spec.name, hub, report)
    config = read_settings(spec.name, folder / "config.json")
    if warning := _verifier_warning(spec, config):
        warnings.warn(warning, stacklevel=2)
    report(TaskProgress(f"reading {spec.title}"))
    with model_errors(spec.name, kind="head"):
        return _kind(spec.name, config).read(HeadCheckpoint(spec.name, config, folder), target)


def _kind(name: str, config: Mapping[str, Any]) -> HeadKind:
    kind = next((kind for kind in HEAD_KINDS if kind.fits(config)), None)
    if kind is None:
        given = config.get("speculators_model_type") or "unknown"
        known = ", ".join(kind.name for kind in HEAD_KINDS)
        raise UserError(f"{name} is a head of another kind ({given}): choose one of kind {known}")
    return kind


def _verifier_warning(spec: HeadSpec, config: Mapping[str, Any]) -> str:
    speculators = config.get("speculators_config")
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
