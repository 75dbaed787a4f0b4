"""Which inference servers exist: sources are watched, the coordinator is told.

    static ──────┐
    DNS ─────────┤ whole listings           new: register          ┌─────────────┐
    Kubernetes ──┴───────────────> Discovery ───────────────────>  │ Coordinator │
                                             vanished: drain       └─────────────┘
    RegisterServer, DrainServer (RPC) ─────────────────────────────────^

| loop               | consumes            | waits for             | unblocked by               |
|--------------------|---------------------|-----------------------|----------------------------|
| follow, per source | its listings        | the source's next one | a change there             |
| accompany          | changed servers     | a change of a server  | a member (Kubernetes only) |

A listing is whole, so nothing can be missed; a source that cannot be asked yields none, and its
servers stay. Only what newly appears is registered: a server drained by hand stays out until it
vanishes and comes back. Servers registered by RPC belong to no source and are never removed here;
registering a discovered one changes nothing about who removes it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from areal.chassis.logging import get_logger
from areal.errors import NotFound
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.http import normalize_url

# Long enough for every rollout worker to hear that the server takes no new requests, and to keep
# those that are nearly done; then they are aborted and continue elsewhere from their tokens.
DRAIN_S = 1.0


@dataclass(frozen=True)
class Found:
    """One server of a listing."""

    url: str
    pod: str = ""
    """Name of its pod (Kubernetes)."""


Listing = Mapping[str, Found]
"""Servers by server id, host:port."""


class Source(ABC):
    """Lists servers, and watches for changes.

    Example:
        class Two(Source):
            async def watch(self):
                yield listing_of(["http://10.0.0.1:30000", "http://10.0.0.2:30000"])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        """The configured entry; it is kept in the records of the servers that it found."""
        self.lists_once = False
        """Whether `watch` ends, after a listing that never changes."""

    @abstractmethod
    def watch(self) -> AsyncGenerator[Listing, None]:
        """Yields all its servers now, and again after each change; an outage yields nothing."""

    def accompany(self, coordinator: Coordinator) -> Coroutine[Any, Any, None] | None:
        """Tells the source's own world how its servers are, until cancelled; None: no one asks."""
        return None

    async def close(self) -> None:
        return


class StaticSource(Source):
    """A url of the experiment file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lists_once = True

    async def watch(self) -> AsyncGenerator[Listing, None]:
        yield listing_of([self.name])


class Discovery:
    """Tells one coordinator what all sources list."""

    def __init__(self, coordinator: Coordinator, sources: Sequence[Source]) -> None:
        self._coordinator = coordinator
        self._sources = sources
        self._listed: dict[str, Listing] = {}
        self._log = get_logger(__name__)
        names = {source.name for source in sources}
        self._inherited: dict[str, list[str]] = {}
        """By source: the servers that the previous incarnation knew, until the source's first
        listing."""
        for server_id, origin in coordinator.origins().items():
            if origin and origin not in names:
                self._leave(server_id, "its source is no longer configured")
            elif origin:
                self._inherited.setdefault(origin, []).append(server_id)

    def start(
        self,
        spawn: Callable[..., asyncio.Task[None]],
        keep: Callable[..., asyncio.Task[None]],
    ) -> None:
        """Follows every source in a task of its own."""
        for source in self._sources:
            begin = spawn if source.lists_once else keep
            begin(self.follow(source), f"discovery-{source.name}")
            if (company := source.accompany(self._coordinator)) is not None:
                keep(company, f"accompany-{source.name}")

    async def follow(self, source: Source) -> None:
        """Follows one source for as long as it lists."""
        async with aclosing(source.watch()) as listings:
            async for listing in listings:
                self.take(source.name, listing)

    def take(self, name: str, listing: Listing) -> None:
        """Registers what is new in a listing, drains what is not in it any more."""
        before = self._listed.get(name)
        self._listed[name] = dict(listing)
        if before is None:  # the first one: servers that vanished while no one looked
            gone = self._inherited.pop(name, [])
            before = {}
        else:
            gone = list(before)
        for server_id in gone:
            if not any(server_id in each for each in self._listed.values()):
                self._leave(server_id, f"{name} no longer lists it")
        for server_id, found in listing.items():
            if server_id not in before:
                self._coordinator.register(server_id, found.url, origin=name)

    def _leave(self, server_id: str, cause: str) -> None:
        self._log.info("server_vanished", server=server_id, cause=cause)
        try:
            self._coordinator.drain(server_id, DRAIN_S)
        except NotFound:
            return  # drained by hand and forgotten already


def listing_of(urls: Sequence[str]) -> dict[str, Found]:
    """Returns a listing of plain urls.

    Raises:
        InvalidInput: One of them is not http://host:port.
    """
    return {server_id: Found(url) for server_id, url in map(normalize_url, urls)}
