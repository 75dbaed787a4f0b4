"""One file per case: `settings(miniature)` lists tries, `measure(setting, miniature)` runs one.

A try runs in a process of its own, so running out of memory, hanging or crashing is a result.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The cheapest failure first.
NAMES = ("probe", "correct", "attention", "step", "head", "export", "checkpoint", "stack")


def find(name: str) -> ModuleType:
    """Return the case with this name."""
    return import_module(f"tools.gpu.cases.{name}")
