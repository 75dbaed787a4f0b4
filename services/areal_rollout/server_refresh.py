"""Keeps the server table up to date.

    NATS `areal.<experiment>.<trial>.servers` ──> announced ─┐
                                                             ├─> ListServers ──> table
    every 2 s, in case an announcement was lost ─────────────┘

| who       | consumes       | waits for              | unblocked by                 |
|-----------|----------------|------------------------|------------------------------|
| follow    | ListServers    | an announcement        | announce, 2 s                |
| the table |                | nothing                |                              |

An announcement says only "look again": weight-sync's answer is the truth, of which only what has
changed since the answer before is asked for. While weight-sync is away the last answer stands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from areal.chassis.logging import get_logger
from areal.errors import ArealError
from areal.weights.servers import ServerChanges
from areal_rollout.generation.server_table import ServerTable

_REFRESH_S = 2.0
# After a refresh of d seconds none for 4 d: a thousand servers that change one after the other must
# not keep the process busy with listings.
_REST, _MAX_REST_S = 4.0, 0.25

ListChanges = Callable[[str], Awaitable[ServerChanges]]


class ServerRefresh:
    """Feeds one table; `follow` forever, `announce` whenever something may have changed."""

    def __init__(self, table: ServerTable, list_changes: ListChanges) -> None:
        self._table = table
        self._list_changes = list_changes
        self._as_of = ""
        self._announced = asyncio.Event()
        self._log = get_logger(__name__)
        self._away = False

    def announce(self) -> None:
        """Asks again now, because something changed. A burst costs one or two calls."""
        self._announced.set()

    async def once(self) -> None:
        """Asks once; a failure is logged and leaves the table as it was."""
        try:
            changes = await self._list_changes(self._as_of)
        except ArealError as error:
            if not self._away:
                self._log.warning("servers_unknown", error=str(error))
            self._away = True
            return
        if self._away:
            self._log.info("servers_known_again")
        self._away = False
        self._as_of = changes.as_of
        if changes.whole:
            self._table.update(changes.servers)
        else:
            self._table.change(changes.servers, changes.gone)

    async def follow(self) -> None:
        """Refreshes at every announcement, and at the latest every two seconds."""
        while True:
            self._announced.clear()
            began = time.monotonic()
            await self.once()
            await asyncio.sleep(min(_REST * (time.monotonic() - began), _MAX_REST_S))
            try:
                async with asyncio.timeout(_REFRESH_S):
                    await self._announced.wait()
            except TimeoutError:
                pass
