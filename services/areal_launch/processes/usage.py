"""How much memory the processes of a stack use at their peak, and how much CPU in all."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Mapping

import psutil

_MIB = 1024 * 1024


class UsageSampler:
    """Peaks of resident memory by process, its descendants included.

    CPU comes from the kernel's own account of ended children, so it is exact once all have ended
    (and were waited for), with no sampling.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], interval_s: float = 3.0) -> None:
        """`pids` returns the current pid of each process, by name."""
        self.peak_mb: dict[str, float] = {}
        """Peak memory by process name; "total" is the largest sum at one moment, the launcher
        included."""
        self.now_mb: dict[str, float] = {}
        self._pids = pids
        self._interval_s = interval_s
        self._cpu_before = _cpu_seconds()

    async def run(self) -> None:
        """Samples forever; cancel it."""
        while True:
            await asyncio.to_thread(self.sample, dict(self._pids()))
            await asyncio.sleep(self._interval_s)

    def sample(self, pids: Mapping[str, int]) -> None:
        parents: dict[int, int] = {}
        memory: dict[int, int] = {}
        for process in psutil.process_iter(["ppid", "memory_info"]):
            if process.info["memory_info"] is not None:  # None: another user's
                parents[process.pid] = process.info["ppid"]
                memory[process.pid] = process.info["memory_info"].rss
        owner = {pid: name for name, pid in pids.items()}
        owner[psutil.Process().pid] = "launcher"
        usage: dict[str, float] = {}
        for pid, resident in memory.items():
            name = _owner_of(pid, parents, owner)
            if name:
                usage[name] = usage.get(name, 0.0) + resident / _MIB
        usage["total"] = sum(usage.values())
        self.now_mb = usage
        for name, value in usage.items():
            self.peak_mb[name] = max(value, self.peak_mb.get(name, 0.0))

    def cpu_seconds(self) -> float:
        """Returns the CPU of this process and of all children that have ended since."""
        return _cpu_seconds() - self._cpu_before


def _owner_of(pid: int, parents: Mapping[int, int], owner: Mapping[int, str]) -> str:
    """The nearest ancestor (or itself) that is a process of the stack."""
    seen: set[int] = set()
    while pid and pid not in seen:
        if pid in owner:
            # A child that the launcher has just made is the launcher's only by descent.
            return owner[pid]
        seen.add(pid)
        pid = parents.get(pid, 0)
    return ""


def _cpu_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
