"""Former names of modules: areal.engines.sft is `areal_torch.engines.sft` since 0.3.

Recipes import some of them. A recipe from before the move gets the same module, and one warning
that names the new place. The former names go in 0.4, and this file with them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_MOVED = {
    "areal.engines.parallel.estimate": "areal.memory_estimate",
    "areal.models.directory": "areal.model_directory",
    "areal.rewards.sandbox": "areal.sandbox",
    "areal.algorithms": "areal_torch.algorithms",
    "areal.engines": "areal_torch.engines",
    "areal.models": "areal_torch.models",
}


def _present(name: str) -> str:
    """The present name of a module, or "" if it has not moved."""
    for former, present in _MOVED.items():
        if name == former or name.startswith(former + "."):
            return present + name.removeprefix(former)
    return ""


class _Moved(MetaPathFinder, Loader):
    """Finds a former name, and gives it the module of its present name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _present(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        present = _present(spec.name)
        if spec.name not in ("areal.algorithms", "areal.engines", "areal.models"):
            text = f"{spec.name} is {present} since 0.3; the former name goes in 0.4"
            warnings.warn(text, FutureWarning, stacklevel=2)
        module = importlib.import_module(present)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the former name's spec into the module. It keeps its own.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def keep_former_names() -> None:
    """Lets the former names be imported, once for the process."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        # First: the default finder would load a second copy from the present package's folder.
        sys.meta_path.insert(0, _Moved())
