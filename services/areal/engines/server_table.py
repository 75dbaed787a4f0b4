"""Which inference servers may take a request (which of them should: `routing`).

    announcement or timer ──> update(listing) ──> Server records ──> choose(…) ──> Server
                                   │                   ^                │ none admissible
                                   │ left SERVING      │ blocked a      v
                                   v                   │ moment     changed(…) waits
                          its running requests         │
                          are given up (abandon) <── failed(server)

| who     | consumes      | waits for                       | unblocked by               |
|---------|---------------|---------------------------------|----------------------------|
| update  | whole listing | nothing                         |                            |
| failed  | one failure   | nothing                         |                            |
| choose  | the records   | nothing                         |                            |
| changed |               | a change, or the end of a block | update, wake, its deadline |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from yarl import URL

from areal.engines.routing import Router, Server
from areal.servers import InferenceServer, ServerState

_BLOCK_S = 0.25
_MAX_BLOCK_S = 8.0


class ServerTable:
    """State only: never talks to anyone."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._admissible: dict[int, list[Server]] = {}
        self._router = Router()
        self._blocked: set[Server] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Servers that take traffic."""
        return sum(server.serving for server in self._servers.values())

    def update(self, listing: Sequence[InferenceServer]) -> None:
        """Takes over the whole list of servers; wakes whoever waits for a change."""
        loop_time = asyncio.get_running_loop().time()
        changed = False
        for item in listing:
            server = self._servers.get(item.url)
            if server is None:
                base = URL(item.url.rstrip("/"))
                server = Server(item.url, base / "generate", base / "abort_request")
                self._servers[item.url] = server
            serving = item.state is ServerState.SERVING and item.version >= 0
            changed |= (server.serving, server.version) != (serving, item.version)
            if serving and not server.serving:
                server.blocked_until = loop_time
            server.serving, server.version = serving, item.version
            server.note = f"{item.state} at version {item.version}"
            if item.cause:
                server.note += f": {item.cause}"
            if item.state is ServerState.QUARANTINED:
                self._abandon(server)
        for url in self._servers.keys() - {item.url for item in listing}:
            server = self._servers.pop(url)
            server.serving, server.note, changed = False, "left", True
            self._abandon(server)
        if changed:
            self._admissible.clear()
            self.wake()

    def choose(
        self, min_version: int, affinity_key: str, cost: int, avoid: Collection[str] = ()
    ) -> Server | None:
        """The server for a request; None if there is no admissible one now.

        Args:
            min_version: No server below it is admissible.
            affinity_key: Requests that share it stay together while that is not much slower.
            cost: Tokens of the request: prompt and still to come.
            avoid: Urls taken only if there is no other.
        """
        servers = self._admissible.get(min_version)
        if servers is None:
            servers = [s for s in self._servers.values() if s.serving and s.version >= min_version]
            self._admissible[min_version] = servers
        if not servers:
            return None
        return self._router.choose(
            servers,
            now=asyncio.get_running_loop().time(),
            min_version=min_version,
            key=affinity_key,
            cost=cost,
            avoid=avoid,
        )

    async def changed(self, timeout: float) -> None:
        """Returns at the next change, when a block ends, or after `timeout` seconds."""
        now = asyncio.get_running_loop().time()
        self._blocked = {s for s in self._blocked if s.serving and s.blocked_until > now}
        for server in self._blocked:
            timeout = min(timeout, server.blocked_until - now)
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass

    def wake(self) -> None:
        """Wakes everyone in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def failed(self, server: Server) -> bool:
        """A request failed there: no new ones for a moment, longer each time in a row.

        Returns:
            Whether this is news; one burst of failures counts once.
        """
        now = asyncio.get_running_loop().time()
        if now < server.blocked_until:
            return False
        server.blocked_until = now + min(_BLOCK_S * 2.0 ** min(server.failures, 10), _MAX_BLOCK_S)
        server.failures += 1
        self._blocked.add(server)
        return True

    def describe(self) -> str:
        """The servers and their states, for messages."""
        if not self._servers:
            return "no server is known"
        lines = [f"{server.url} {server.note}" for server in self._servers.values()]
        more = f", and {len(lines) - 5} more" if len(lines) > 5 else ""
        return ", ".join(lines[:5]) + more

    @staticmethod
    def _abandon(server: Server) -> None:
        for scope in server.running:
            give_up(scope)


def give_up(scope: asyncio.Timeout) -> None:
    """Ends what runs in a timeout scope now; it sees TimeoutError."""
    if not scope.expired():  # one that expires already cannot be moved, and needs not
        scope.reschedule(asyncio.get_running_loop().time())
