"""Python imports this module at the start of each process of the tests.

At its import, Gradio compares the interface file (.pyi) of each component with its source, which takes half of the
time. Tests do not read these files.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODULE, FUNCTION = "gradio.component_meta", "create_or_modify_pyi"


class WithoutInterfaceFiles:
    """Finder that replaces `FUNCTION` when its module has been loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            assert hasattr(module, FUNCTION)
            setattr(module, FUNCTION, lambda *arguments: None)

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutInterfaceFiles())
