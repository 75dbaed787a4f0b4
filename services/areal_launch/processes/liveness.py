"""Detects processes that have not exited but do nothing: they are stopped, or hang.

A sign of life is an answer, whatever it says: a trainer answers from a thread of its own, through
the longest step, import or compilation. One that the kernel has stopped gives none, even if its
children do: a stopped torchrun would not notice the death of a rank.

| state  | consumes        | waits for         | unblocked by                      |
|--------|-----------------|-------------------|-----------------------------------|
| asking | one connection  | an answer         | it comes; the probe's own timeout |
| pause  | nothing         | PULSE_S           | the timer                         |
"""

from __future__ import annotations

import asyncio
import time

import psutil

from areal_launch.processes.probes import Probe

PULSE_S = 2.0
# Between two checks at most this much time counts; if more passed, this process was paused.
_MOST_BETWEEN_S = 10.0


async def wait_silent(probe: Probe | None, pid: int, silent_s: float) -> str:
    """Returns once the process has given no sign of life for this long; says what was last seen."""
    silent, before = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(min(PULSE_S, silent_s / 4))
        missing = _stopped(pid) or (await _unanswered(probe) if probe is not None else "")
        now = time.monotonic()
        silent = silent + min(now - before, _MOST_BETWEEN_S) if missing else 0.0
        before = now
        if silent >= silent_s:
            return f"gave no sign of life for {silent:.0f} s: {missing}"


async def _unanswered(probe: Probe) -> str:
    answer = await probe()
    return "" if " answered " in answer else answer


def _stopped(pid: int) -> str:
    try:
        stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return ""  # it has ended: its exit says more
    return f"process {pid} is stopped (SIGSTOP)" if stopped else ""
