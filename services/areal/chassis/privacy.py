"""What a process knows is not for the processes beside it, even of the same user.

A service may have its secrets in its environment, and has them in its memory; code of users
(rewards, and what they start) runs beside it as the same user. The kernel shows `/proc/PID/environ`
and `/proc/PID/mem` only of processes that are "dumpable", and lets only those be traced.

Costs: no core dumps of services, and py-spy or gdb need root. A program that the process starts is
dumpable again. Not for processes that use CUDA: NCCL's peers read each other's memory.
"""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Makes this process one that only root looks into; without effect where Linux is not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
