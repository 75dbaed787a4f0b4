"""What happens to a stack, for the log, the live view and stack.json."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from areal.chassis.logging import get_logger


@dataclass(frozen=True)
class StackEvent:
    """An event in the life of a stack.

    Example:
        >>> StackEvent(1700000000.0, "warning", "buffer", "buffer ended with signal 9; restart ...")
    """

    time: float
    """Unix seconds."""
    level: str
    """state (a process changed state), info, warning or error."""
    process: str
    text: str


class EventLog:
    """Collects events; everything but bare state changes goes to the launcher's log as well."""

    def __init__(self) -> None:
        self.recent: deque[StackEvent] = deque(maxlen=50)
        """The newest events, for the view."""
        self._listeners: list[Callable[[StackEvent], None]] = []
        self._log = get_logger(__name__)

    def listen(self, listener: Callable[[StackEvent], None]) -> None:
        """Calls `listener` for each event from now on, in the thread that reports it."""
        self._listeners.append(listener)

    def report(self, level: str, process: str, text: str) -> None:
        event = StackEvent(time.time(), level, process, text)
        if level != "state":
            self.recent.append(event)
            write = {"warning": self._log.warning, "error": self._log.error}
            write.get(level, self._log.info)("stack_event", process=process, text=text)
        for listener in self._listeners:
            listener(event)
