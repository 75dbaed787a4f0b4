"""Which inference servers may take a request (which of them should: `routing`).

    announcement or timer ──> update, change ──> Server records ──> choose(…) ──> Server
                                   │                   ^                │ none admissible
                                   │ left SERVING      │ blocked a      v
                                   v                   │ moment     changed(…) waits
                          its running requests         │
                          are given up (abandon) <── failed(server)

| who     | consumes      | waits for                       | unblocked by               |
|---------|---------------|---------------------------------|----------------------------|
| update  | whole listing | nothing                         |                            |
| change  | what changed  | nothing                         |                            |
| failed  | one failure   | nothing                         |                            |
| choose  | the records   | nothing                         |                            |
| changed |               | a change, or the end of a block | update, wake, its deadline |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from yarl import URL

from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation.routing import Router, Server

_BLOCK_S = 0.25
_MAX_BLOCK_S = 8.0


class ServerTable:
    """State only: never talks to anyone."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._admissible: dict[int, list[Server]] = {}
        self._router = Router()
        self._serving = 0
        self._blocked: set[Server] = set()
        # Both spare a waiter a look at all servers: thousands may wait.
        self._unblocks_at = 0.0
        self._none_before: dict[int, float] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return self._serving

    def update(self, listing: Sequence[InferenceServer]) -> None:
        """Takes over the whole list of servers; wakes those who wait for a change."""
        self.change(listing, self._servers.keys() - {item.server_id for item in listing})

    def change(self, listing: Sequence[InferenceServer], gone: Collection[str]) -> None:
        """Takes over some servers and forgets those with the ids in `gone`; wakes as `update`."""
        loop_time = asyncio.get_running_loop().time()
        changed = False
        for item in listing:
            server = self._servers.get(item.server_id)
            if server is not None and server.url != item.url:
                changed |= self._forget(item.server_id)
                server = None
            if server is None:
                base = URL(item.url.rstrip("/"))
                server = Server(item.url, base / "generate", base / "abort_request")
                self._servers[item.server_id] = server
            serving = item.state is ServerState.SERVING and item.version >= 0
            before = server.serving, server.version, server.adapter
            changed |= before != (serving, item.version, item.adapter)
            if serving and not server.serving:
                server.blocked_until = loop_time
            server.serving, server.version = serving, item.version
            server.adapter = item.adapter
            server.note = f"{item.state} at version {item.version}"
            if item.cause:
                server.note += f": {item.cause}"
            if item.state is ServerState.QUARANTINED:
                self._abandon(server)
        for server_id in gone:
            changed |= self._forget(server_id)
        if changed:
            self._serving = sum(server.serving for server in self._servers.values())
            self._admissible.clear()
            self._none_before.clear()
            self.wake()

    def choose(
        self, min_version: int, affinity_key: str, cost: int, avoid: Collection[str] = ()
    ) -> Server | None:
        """Returns the server for a request; None if no server is admissible now.

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
        now = asyncio.get_running_loop().time()
        if not servers or now < self._none_before.get(min_version, 0.0):
            return None
        server = self._router.choose(
            servers, now=now, min_version=min_version, key=affinity_key, cost=cost, avoid=avoid
        )
        if server is None:  # all are blocked, and each block only gets longer
            self._none_before[min_version] = min(each.blocked_until for each in servers)
        return server

    async def changed(self, timeout: float) -> None:
        """Returns at the next change, when a block ends, or after `timeout` seconds."""
        now = asyncio.get_running_loop().time()
        if self._blocked and now >= self._unblocks_at:
            self._blocked = {s for s in self._blocked if s.serving and s.blocked_until > now}
            self._unblocks_at = min((s.blocked_until for s in self._blocked), default=0.0)
        if self._blocked:
            timeout = min(timeout, self._unblocks_at - now)
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
        """Blocks a server after a failed request for a moment, longer each time in a row.

        Returns:
            Whether this is news; one burst of failures counts once.
        """
        now = asyncio.get_running_loop().time()
        if now < server.blocked_until:
            return False
        server.blocked_until = now + min(_BLOCK_S * 2.0 ** min(server.failures, 10), _MAX_BLOCK_S)
        server.failures += 1
        if not self._blocked or server.blocked_until < self._unblocks_at:
            self._unblocks_at = server.blocked_until
        self._blocked.add(server)
        return True

    def describe(self) -> str:
        """Returns the servers and their states, for messages."""
        if not self._servers:
            return "no server is known"
        lines = [f"{server.url} {server.note}" for server in self._servers.values()]
        more = f", and {len(lines) - 5} more" if len(lines) > 5 else ""
        return ", ".join(lines[:5]) + more

    def _forget(self, server_id: str) -> bool:
        server = self._servers.pop(server_id, None)
        if server is None:
            return False
        server.serving, server.note = False, "left"
        self._abandon(server)
        return True

    @staticmethod
    def _abandon(server: Server) -> None:
        for scope in server.running:
            give_up(scope)


def give_up(scope: asyncio.Timeout) -> None:
    """Ends what runs in a timeout scope now; it sees TimeoutError."""
    if not scope.expired():  # one that expires already cannot be moved, and needs not
        scope.reschedule(asyncio.get_running_loop().time())
