"""Tells in the terminal why workers returned episodes: their logs say so, and no one reads those.

| consumes            | waits for         | unblocked by |
|---------------------|-------------------|--------------|
| the workers' logs   | `_LOOK_S` seconds | the timer    |
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_launch.processes.log_tail import LogTail

_LOOK_S = 2.0
_QUIET_S = 60.0
"""Least seconds between two lines: if a server is away, every episode is returned."""


class ReturnedEpisodes:
    """Reports the episodes that were returned because of a server or a service.

    Args:
        logs: Of the rollout workers; they need not exist yet.
        report: Called with a line.
    """

    def __init__(self, logs: Sequence[Path], report: Callable[[str], None]) -> None:
        self._tails = [LogTail(log, from_end=True) for log in logs]
        self._report = report
        self._count = 0
        self._cause = ""
        self._not_before = 0.0

    async def run(self) -> None:
        """Watches for returned episodes until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)  # nothing announces a line of a log
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Reads the logs, and reports at most once in a minute."""
        for tail in self._tails:
            for line in tail.read():
                if cause := _infrastructure(line):
                    self._count, self._cause = self._count + 1, cause
        if self._count and now >= self._not_before:
            episodes = "1 episode was" if self._count == 1 else f"{self._count} episodes were"
            self._report(f"{episodes} returned and will be run again: {self._cause}")
            self._count, self._not_before = 0, now + _QUIET_S


def _infrastructure(line: str) -> str:
    """The cause in a worker's log line; "" if no server or service made it return an episode."""
    if '"episode_returned"' not in line:
        return ""
    try:
        content = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(content, dict) or content.get("cause") != "infrastructure":
        return ""
    return " ".join(str(content.get("detail") or "no cause was given").split())[:300]
