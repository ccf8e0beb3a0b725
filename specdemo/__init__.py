"""Speculative decoding of language models: visualisation, measurement and verification.

Public names are imported on first access, so `import specdemo` loads neither torch nor transformers.

>>> from specdemo import Recipe, generate, load_pair
>>> recipe = Recipe(method="nasd", temperature=0, max_tokens=5)
>>> *_, end = generate(recipe, "for i in range(", load_pair("bundled", device="cpu"))
>>> end.metrics.tokens
5
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "1.0.0"
_EXPORTS = {
    "End": "specdemo.core.events",
    "Header": "specdemo.core.events",
    "Loading": "specdemo.core.events",
    "LoadedPair": "specdemo.generate",
    "Recipe": "specdemo.recipe",
    "Step": "specdemo.core.step",
    "Stores": "specdemo.models.chat_caches",
    "StepEvent": "specdemo.core.events",
    "UserError": "specdemo.core.errors",
    "generate": "specdemo.generate",
    "load_pair": "specdemo.generate",
}
__all__ = [*sorted(_EXPORTS), "methods"]


def methods() -> dict[str, str]:
    """Return the title of every decoding method by name.

    >>> "draft" in methods() and "ar" in methods()
    True
    """
    return {name: method.title for name, method in import_module("specdemo.drafters").METHODS.items()}


def set_environment_defaults() -> None:
    """Set environment variables of oneDNN, OpenMP and transformers. Entry points call this before torch is imported.

    oneDNN compiles and caches 0.5 MB per weight shape and number of rows.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # ZeroGPU emulates CUDA in one thread only
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Reserve `specdemo.generate` for the function; importing the submodule would bind the module to that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "generate" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
