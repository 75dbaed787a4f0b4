"""Who gives a version to whom: one copy leaves the store, then those that have one give it on.

    store ──> a      then a ──> b      then a ──> c, b ──> d      then a, b, c, d ──> e, f, g, h

Each gives to one at a time, so n servers have a version after 1 + log2(n) transfers, and the
store's network carries it once. Nothing depends on a giver being right or alive: who pulls compares
the digests of the manifest, and a giver that fails is not asked for that version again.

| wait   | consumes           | waits for                 | unblocked by                        |
|--------|--------------------|---------------------------|-------------------------------------|
| a turn | a giver's network  | a giver with nothing to do| a transfer's end, or its own timeout|
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_weight_sync.engine.base import CannotPullError, EngineError, Fault

_KEPT = 2  # while some servers still load a version, others are told of the next
_OF_THE_GIVER = {Fault.UPDATE_REFUSED, Fault.TIMEOUT}  # others are the taker's own


@dataclass
class Turn:
    """Where a server pulls a version from, and who can pull it from that server."""

    giver: str
    """http://host:port of the server or sidecar to pull from; empty: the store."""
    taker: str = ""
    """The server that will have the version and then pass it on; empty: no one can pull it from
    there."""


@dataclass
class _Copies:
    """The copies of one version."""

    free: list[str] = field(default_factory=list)
    """Servers that have the version and are not giving it to another."""
    holders: set[str] = field(default_factory=set)
    giving: int = 0
    """Number of transfers in progress, including the store's."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> str:
        """Returns the next giver; empty: the store, because no server has or is getting it."""
        while not self.free and self.giving:
            await self.changed.wait()
        return self.free.pop(0) if self.free else ""


class Givers:
    """The givers of the newest versions, by the versions' names.

    Example:
        >>> async with givers.turn("v00000012-inc3", timeout=60.0) as turn:
        ...     turn.taker = await pull(turn.giver or store)
    """

    def __init__(self) -> None:
        self._versions: dict[str, _Copies] = {}

    def holds(self, name: str, server: str) -> bool:
        """Whether a server or sidecar has received a version."""
        return name in self._versions and server in self._versions[name].holders

    @asynccontextmanager
    async def turn(self, name: str, timeout: float) -> AsyncIterator[Turn]:
        """Waits for a giver; after `timeout` seconds it is the store."""
        if name not in self._versions:
            for name_before in list(self._versions)[: 1 - _KEPT]:
                del self._versions[name_before]
            self._versions[name] = _Copies()
        copies = self._versions[name]
        try:
            async with asyncio.timeout(timeout):
                turn = Turn(await copies.next())
        except TimeoutError:
            turn = Turn("")
        copies.giving += 1
        able = turn.giver
        try:
            yield turn
        except EngineError as error:
            if error.fault in _OF_THE_GIVER and not isinstance(error, CannotPullError):
                able = ""
                copies.holders.discard(turn.giver)
            raise
        finally:
            copies.giving -= 1
            if turn.taker and turn.taker not in copies.holders:
                copies.holders.add(turn.taker)
                copies.free.append(turn.taker)
            if able:
                copies.free.append(able)
            copies.changed.set()
            copies.changed = asyncio.Event()
