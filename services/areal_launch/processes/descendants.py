"""Finds and ends every process of a stack, whatever its parent is.

Each child of a stack carries `AREAL_STACK` (and `AREAL_PROCESS`, its name) in its environment, and
so do its own children: torchrun puts its workers into sessions of their own, which a process group
would miss. A program that writes its title over its environment (Redis and SGLang do) cannot be
read; it is found by its session, whose leader `stack.json` names, and by its descent.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

from areal.chassis.process import PROCESS_VARIABLE

STACK_VARIABLE = "AREAL_STACK"


# Between what we note as a process's start and what the kernel says.
_START_TOLERANCE_S = 5.0

Leaders = Mapping[int, float]
"""Session leaders of a stack: pid -> when it was started, in Unix seconds."""


def leaders_of(stack: Mapping[str, Any]) -> dict[int, float]:
    """Returns the session leaders that a `stack.json` names."""
    entries = stack.get("processes", {}).values()
    return {int(e["pid"]): float(e.get("spawned", 0.0)) for e in entries if e.get("pid")}


def find_tagged(
    stack_id: str, process: str = "", leaders: Leaders | None = None
) -> list[psutil.Process]:
    """Returns living processes of a stack, or of one process of it, and all their descendants.

    Args:
        stack_id: The value of `AREAL_STACK`.
        process: The value of `AREAL_PROCESS`; empty: any.
        leaders: Everything in their sessions belongs to it too.
    """
    tagged: set[int] = set()
    parents: dict[int, int] = {}
    found: dict[int, psutil.Process] = {}
    for candidate in psutil.process_iter():
        try:
            if candidate.pid == os.getpid() or candidate.status() == psutil.STATUS_ZOMBIE:
                continue
            found[candidate.pid] = candidate
            parents[candidate.pid] = candidate.ppid()
            if _in_session(candidate, leaders or {}):
                tagged.add(candidate.pid)
            environment = candidate.environ()
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
        if environment.get(STACK_VARIABLE) != stack_id:
            continue
        if not process or environment.get(PROCESS_VARIABLE) == process:
            tagged.add(candidate.pid)
    grew = True
    while grew:
        children = {pid for pid, parent in parents.items() if parent in tagged} - tagged
        grew = bool(children)
        tagged |= children
    return [found[pid] for pid in sorted(tagged)]


def _in_session(candidate: psutil.Process, leaders: Leaders) -> bool:
    """Whether its session is that of a leader.

    A session's number is not reused while a member exists. After that another process may get it:
    then its start differs.
    """
    session = os.getsid(candidate.pid)
    if session not in leaders:
        return False
    if candidate.pid != session:
        return True
    return abs(candidate.create_time() - leaders[session]) < _START_TOLERANCE_S


def end_tagged(
    stack_id: str, process: str = "", *, grace_s: float = 0.0, leaders: Leaders | None = None
) -> int:
    """Ends what `find_tagged` finds: SIGTERM, then SIGKILL after `grace_s`; blocks meanwhile.

    Returns:
        How many processes were found alive at first.
    """
    first = find_tagged(stack_id, process, leaders)
    deadline = time.monotonic() + grace_s
    if grace_s > 0:
        _signal(first, signal.SIGTERM)
        _wait_gone(first, grace_s)
    # New ones may be born while we look: look again until no one is left, within bounds. Those
    # found by their descent stay known when their ancestor is gone.
    known = set(first)
    while remaining := [
        each for each in known.union(find_tagged(stack_id, process, leaders)) if _lives(each)
    ]:
        known.update(remaining)
        _signal(remaining, signal.SIGKILL)
        _wait_gone(remaining, 1.0)
        if time.monotonic() > deadline + 10.0:
            break
    return len(first)


def _signal(processes: list[psutil.Process], signum: signal.Signals) -> None:
    for process in processes:
        try:
            # A stopped process (SIGSTOP) handles SIGTERM only once it runs again.
            process.send_signal(signal.SIGCONT)
            process.send_signal(signum)
        except psutil.Error:
            continue


def _wait_gone(processes: list[psutil.Process], timeout: float) -> None:
    """Waits without waitpid(2): that would take the exit codes of the launcher's children."""
    deadline = time.monotonic() + timeout
    while any(_lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
