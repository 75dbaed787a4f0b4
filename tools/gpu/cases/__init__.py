"""One file per question: `settings(miniature)`, what to try; `measure(setting, miniature)`, a try.

A try runs in a process of its own, so that running out of memory, hanging or crashing is a result.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The cheapest failure first.
NAMES = ("probe", "correct", "attention", "step", "head", "export", "checkpoint", "stack")


def find(name: str) -> ModuleType:
    """The case of a name."""
    return import_module(f"tools.gpu.cases.{name}")
