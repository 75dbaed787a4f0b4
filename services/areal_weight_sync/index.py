"""Servers by state, which have changed, and who is told: each kept up to date, never counted again.

So that a watcher costs the same for 1,000 servers as for one. A listing costs what has changed:

    mark(a) ─> 1   mark(b) ─> 2   mark(a) ─> 3          since("life:1") = [a, b]
    b ─> 2, a ─> 3 (the newest change of each)          since("life:2") = [a]

A reader returns the mark that it got. One of another coordinator, or older than what is
remembered, is told everything.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from itertools import takewhile

from areal.weights.servers import ServerState

_REMEMBERED = 20_000


class Census:
    """Counts servers by state and version; does no I/O.

    Example:
        >>> census.put("10.0.0.7:30000", ServerState.SERVING, 12)
        >>> census.number(ServerState.SERVING, 12)
        1
    """

    def __init__(self) -> None:
        self._shown: dict[str, tuple[ServerState, int]] = {}
        self._numbers: Counter[tuple[ServerState, int]] = Counter()

    def put(self, server_id: str, state: ServerState, version: int) -> None:
        """Sets a server's current state and version."""
        self.drop(server_id)
        self._shown[server_id] = state, version
        self._numbers[state, version] += 1

    def drop(self, server_id: str) -> None:
        """Removes a server that has gone, or is counted again."""
        before = self._shown.pop(server_id, None)
        if before is not None:
            self._numbers[before] -= 1
            if not self._numbers[before]:
                del self._numbers[before]

    def number(self, state: ServerState, version: int) -> int:
        """Returns the number of servers in a state, at a version."""
        return self._numbers[state, version]

    def states(self) -> dict[ServerState, int]:
        """Returns the number of servers by state."""
        counts = dict.fromkeys(ServerState, 0)
        for (state, _), number in self._numbers.items():
            counts[state] += number
        return counts

    def versions(self, state: ServerState) -> set[int]:
        """Returns the versions of the servers in a state."""
        return {version for other, version in self._numbers if other is state}


class Changes:
    """The newest change of each server, in order."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        """Remembers the newest changes of that many servers, including those that have gone."""
        self._life = uuid.uuid4().hex[:12]
        self._remembered = remembered
        self._number = 0
        self._numbers: dict[str, int] = {}
        self._forgotten = 0

    def mark(self, server_id: str) -> None:
        """Records that a server changed, came, or left."""
        self._number += 1
        self._numbers.pop(server_id, None)  # to the end
        self._numbers[server_id] = self._number
        if len(self._numbers) > self._remembered:
            oldest = next(iter(self._numbers))
            self._forgotten = self._numbers.pop(oldest)

    @property
    def as_of(self) -> str:
        """Returns a mark of all changes up to now, for `since`."""
        return f"{self._life}:{self._number}"

    def since(self, as_of: str) -> list[str] | None:
        """Returns changed servers' ids, the last changed first; None: unknown, read everything."""
        life, _, number = as_of.partition(":")
        if life != self._life or not number.isdecimal() or len(number) > 18:
            return None
        after = int(number)
        if not self._forgotten <= after <= self._number:
            return None
        newest = takewhile(lambda item: item[1] > after, reversed(self._numbers.items()))
        return [server_id for server_id, _ in newest]


class Feed:
    """Ids of servers changed since the last read, never messages: a slow reader costs nothing.

    The empty id stands for the version.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._event = asyncio.Event()

    def put(self, server_id: str) -> None:
        """Marks one as changed."""
        self._ids[server_id] = None
        self._event.set()

    async def take(self, timeout: float | None = None) -> list[str]:
        """Waits for a change; empty when `timeout` seconds passed without one."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return []
        self._event.clear()
        ids, self._ids = list(self._ids), {}
        return ids
