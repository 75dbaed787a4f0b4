"""Hides every package but those that GPU_MACHINE names, as if they were not installed."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_ALLOWED = set(os.environ.get("GPU_MACHINE", "").split(","))
_BY_MODULE = {
    module: {each.lower().replace("_", "-").replace(".", "-") for each in names}
    for module, names in metadata.packages_distributions().items()
}
_find = PathFinder.find_spec


def _find_allowed(
    name: str, path: Sequence[str] | None = None, target: Any = None
) -> ModuleSpec | None:
    owners = _BY_MODULE.get(name.partition(".")[0])
    return None if owners and not owners & _ALLOWED else _find(name, path, target)


if "GPU_MACHINE" in os.environ:
    # Of this repository there is what the kit brings.
    for file in Path(sysconfig.get_path("purelib")).glob("__editable__*.pth"):
        for line in file.read_text().splitlines():
            sys.path[:] = [each for each in sys.path if each != line]
    PathFinder.find_spec = staticmethod(_find_allowed)  # type: ignore[method-assign]
