"""The GPUs that a stack may have: those in `CUDA_VISIBLE_DEVICES`, or all that a driver shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"\d+|GPU-[\w-]+|MIG-[\w/-]+")
MIG = "MIG-"
"""A slice of a GPU. CUDA shows a process at most one, whatever the variable lists."""


def listed(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` names; None if it is not set.

    CUDA ignores everything after the first entry that is no GPU, so -1 hides all.

    Example:
        >>> listed({"CUDA_VISIBLE_DEVICES": "4,5,-1,6"})
        ('4', '5')
    """
    if VARIABLE not in environment:
        return None
    names: list[str] = []
    for entry in environment[VARIABLE].split(","):
        if not _NAME.fullmatch(entry.strip()):
            break
        names.append(entry.strip())
    return tuple(names)


def lent(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Returns the names of the GPUs that processes are placed on.

    Args:
        environment: Of the launcher.
        count: How many to expect if the variable is not set.
    """
    names = listed(environment)
    return tuple(map(str, range(count))) if names is None else names


def hidden_unless(gpus: int) -> dict[str, str]:
    """Returns variables that hide all GPUs from a process of a stack that has none.

    For processes that are placed nowhere: they prepare or check what the trainer does later, and
    should find the same device. With `gpus`, they see the user's.
    """
    return {} if gpus else {VARIABLE: ""}


def device_files(root: Path = Path("/dev")) -> int:
    """Returns how many GPUs a driver shows here; 1 for a driver that does not show how many.

    WSL2 has one file for all GPUs (dxg), and so has ROCm (kfd).
    """
    count = len(list(root.glob("nvidia[0-9]*")))
    return count or int(any((root / name).exists() for name in ("dxg", "kfd")))
