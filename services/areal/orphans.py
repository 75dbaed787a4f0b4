"""Finds and ends processes that detached themselves, by adopting them.

A process can leave its group, session, parent, and environment (fork twice, setsid, an empty
environment); then none of our lists contains it. But the kernel gives a process whose parent has
ended to its nearest ancestor that is a "subreaper".

Imports the standard library only: the keeper of each process of a stack runs without any package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# /proc/PID/stat after the name, which may hold anything: state, parent, ...
_PARENT_FIELD = 1
_LOOK_S = 0.005


def adopt_orphans() -> None:
    """Makes this process adopt its descendants' orphans; it then has to reap them.

    Only on Linux. The setting survives exec and is not inherited by children.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Call in a new child: it is killed when the thread that created it ends, also after exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def own_children() -> set[int]:
    """Returns the pids of this process's children, including dead ones not yet waited for."""
    me, found = str(os.getpid()), set()
    # /proc/self/task/*/children would be shorter, and leaves some out while others end.
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (
                (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            continue  # ended meanwhile
        if fields[_PARENT_FIELD] == me:
            found.add(int(folder.name))
    return found


def end_children(spare: Collection[int] = (), limit_s: float = 5.0) -> int:
    """Kills and reaps all children except some, and their children; blocks until they are gone.

    Children of a killed child become ours, so it repeats until there are none. Needs
    `adopt_orphans`.

    Args:
        spare: Pids of children to keep.
        limit_s: A process that survives SIGKILL this long (it hangs in the kernel) is left alone.

    Returns:
        How many were ended.
    """
    deadline, ended = time.monotonic() + limit_s, 0
    while (strays := own_children().difference(spare)) and time.monotonic() < deadline:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                ended += os.waitpid(pid, os.WNOHANG)[0] == pid
            except (ProcessLookupError, ChildProcessError, PermissionError):
                continue  # reaped meanwhile
        time.sleep(_LOOK_S)  # the kernel's work; nothing announces the end of any of several
    return ended


def reap_strays(spare: Collection[int]) -> None:
    """Reaps adopted children that have ended by themselves; returns at once.

    Args:
        spare: Pids that other code waits for.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # One that is waited for hides those behind it: they are reaped the next time.
            if ended is None or ended.si_pid in spare:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return  # there is no child at all
