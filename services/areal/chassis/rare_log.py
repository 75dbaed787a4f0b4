"""Log lines of what happens all the time: some at first, then one a minute of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

_FIRST = 10
_PAUSE_S = 60.0


class _Log(Protocol):
    def info(self, event: str, **fields: Any) -> Any: ...


class RareLog:
    """Keeps a log short, so that what is rare is still in it after a long run.

    Example:
        >>> routine = RareLog(log)
        >>> routine.info("published", version=7)  # the eleventh within a minute is not written
    """

    def __init__(self, log: _Log, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._log = log
        self._clock = clock
        self._written: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def info(self, event: str, **fields: Any) -> None:
        """Writes the line, or counts it for the next one of its kind, as `unsaid`."""
        now, written = self._clock(), self._written.get(event, 0)
        if written >= _FIRST and now - self._last[event] < _PAUSE_S:
            self._unsaid[event] = self._unsaid.get(event, 0) + 1
            return
        self._written[event], self._last[event] = written + 1, now
        if unsaid := self._unsaid.pop(event, 0):
            fields["unsaid"] = unsaid
        self._log.info(event, **fields)
