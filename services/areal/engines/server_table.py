"""Which inference servers may take a request, and which of them should.

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
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from yarl import URL

from areal.servers import InferenceServer, ServerState

# With more servers than this, the least loaded of so many drawn at random: nearly as even as
# scanning all (Mitzenmacher, "The power of two choices", 2001), at a cost that does not grow.
_DRAWN = 4
_AFFINITIES = 20_000
_BLOCK_S = 0.25
_MAX_BLOCK_S = 8.0


@dataclass(eq=False, slots=True)
class Server:
    """One server as this process sees it."""

    url: str
    generate_url: URL
    abort_url: URL
    version: int = -1
    """Confirmed policy version."""
    serving: bool = False
    note: str = ""
    """State and cause, for messages."""
    outstanding: int = 0
    """Tokens of the requests that this process has running there: prompt and still to come."""
    running: set[asyncio.Timeout] = field(default_factory=set)
    """One per running request; moving it to now gives the request up."""
    failures: int = 0
    """In a row."""
    blocked_until: float = 0.0
    """Loop time; no request goes there before it."""


class ServerTable:
    """State only: never talks to anyone."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._admissible: dict[int, list[Server]] = {}
        self._affinity: OrderedDict[str, Server] = OrderedDict()
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
        now = asyncio.get_running_loop().time()
        if len(servers) > _DRAWN and not avoid:
            # Drawing may miss the few that are not blocked: then look at all.
            drawn = [s for s in random.sample(servers, _DRAWN) if s.blocked_until <= now]
        else:
            drawn = []
        open_now = drawn or [s for s in servers if s.blocked_until <= now]
        candidates = [s for s in open_now if s.url not in avoid] if avoid else open_now
        if not (candidates := candidates or open_now):
            return None
        best = min(candidates, key=lambda server: server.outstanding)
        if affinity_key:
            held = self._affinity.get(affinity_key)
            if (
                held is not None
                and held.serving
                and held.version >= min_version
                and held.blocked_until <= now
                and held.url not in avoid
                and held.outstanding <= 2 * best.outstanding + 16 * cost
            ):
                return held
            self._affinity[affinity_key] = best
            if len(self._affinity) > _AFFINITIES:
                self._affinity.popitem(last=False)
        return best

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
