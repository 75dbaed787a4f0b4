"""Process settings: its name, its limit on open files, and the protection of its memory."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

PROCESS_VARIABLE = "AREAL_PROCESS"
"""Holds the process's name within its stack, e.g. `rollout`; the chart and Compose set it too."""


_ENOUGH = 1_048_576


def open_files() -> int:
    """Raises the limit on open files (often 1,024) as far as the system allows; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return min(soft, most) if soft != resource.RLIM_INFINITY else most


_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Lets only root read this process's memory and environment; does nothing outside Linux.

    A service has secrets in its environment and memory; code of users (rewards, and what they
    start) runs beside it as the same user. The kernel shows `/proc/PID/environ` and
    `/proc/PID/mem` only of processes that are "dumpable", and lets only those be traced.

    Costs: no core dumps of services, and py-spy or gdb need root. A program that the process
    starts is dumpable again. Not for processes that use CUDA: NCCL's peers read each other's
    memory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def signal_name(number: int) -> str:
    """Returns "SIGSEGV" for 11; the number where it has no name, as real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
