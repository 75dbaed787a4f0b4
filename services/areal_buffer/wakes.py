"""Wake-ups: who waits for a change of the ledger hears of it, without polling.

script finds nothing, sets a flag ──> another script changes that, clears the flag, PUBLISHes
│ one subscriber per process
v
Wakes.notify(kind) ──> every Wakes.wait(kind) returns
"""

from __future__ import annotations

import asyncio
from enum import StrEnum


class Kind(StrEnum):
    """What may have become possible; the words that the scripts publish."""

    LEASE = "lease"
    TAKE = "take"
    ENDED = "ended"


class Wakes:
    """Counts notifications by kind and lets callers wait for the next one."""

    def __init__(self) -> None:
        self._events = {kind: asyncio.Event() for kind in Kind}

    def next(self, kind: Kind) -> asyncio.Event:
        """The event of the next notification. Get it before looking, so that none is missed."""
        return self._events[kind]

    def notify(self, kind: Kind) -> None:
        """Wakes everyone who waits for `kind`."""
        event, self._events[kind] = self._events[kind], asyncio.Event()
        event.set()

    def notify_all(self) -> None:
        """After messages may have been missed."""
        for kind in Kind:
            self.notify(kind)
