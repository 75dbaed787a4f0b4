"""Versions and servers: the target, one member per server, and who is told what changed.

                    publish(v)                        register / report / drain
                        │                                        │
                 ┌──────v─────────────────────────────────────────v─────┐
                 │ Coordinator: target, counters                        │
                 │   Member ──┐  Member ──┐  Member ──┐   (one task each)│
                 └────────────┼───────────┼───────────┼─────────────────┘
                              └─ changed ─┴─> feeds: Redis writer, NATS announcer, each watcher
                                              (a feed holds ids, not messages: slow readers see
                                               the newest state, and cost nothing)

| loop           | consumes                | waits for               | unblocked by              |
|----------------|-------------------------|-------------------------|---------------------------|
| member         | target, its server      | see member.py           | publish, probe, report    |
| feed reader    | ids of changed servers  | a change                | any member, publish       |
| garbage        | confirmations           | all servers at a version| the last one's `_serve`   |

Plain asyncio: Redis, NATS and HTTP come in through `Store`, feeds and the engine factory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.chassis.rare_log import RareLog
from areal.config.transports import in_object_store
from areal.errors import CapacityExceeded, ConfigError, InvalidInput, NotFound
from areal.weights.adapters import check_against
from areal.weights.broadcast import Offer, Seats, buckets
from areal.weights.manifest import (
    PolicyVersion,
    build_manifest,
    check_same_tensors,
    stored_versions,
)
from areal.weights.objects import ObjectStore
from areal.weights.servers import InferenceServer, ServerState, SyncStatus
from areal_weight_sync.broadcasts import Broadcasts
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.confirmation import Confirmation
from areal_weight_sync.engine.base import Engine, Fault
from areal_weight_sync.index import Census, Changes, Feed
from areal_weight_sync.interfaces import Observer, Snapshot, Store, Totals
from areal_weight_sync.limits import Pace, UpdateSlots
from areal_weight_sync.member import Member
from areal_weight_sync.server_state import DRAINING, JOINING, SERVING, ServerRecord
from areal_weight_sync.turns import LONGEST_LEASE_S, Turns, now
from areal_weight_sync.versions import DigestCache, collect

# The number that weight-sync is tested with; far more than one run has.
MOST_SERVERS = 10_000
_HOLD_WAIT_S = 5.0
_IDENTITY = attrgetter("version", "incarnation", "path")


class Coordinator:
    """Owns versions and servers; see the module's picture."""

    def __init__(
        self,
        config: WeightSyncConfig,
        store: Store,
        make_engine: Callable[[str], Engine],
        spawn: Callable[..., asyncio.Task[None]],
        keep: Callable[..., asyncio.Task[None]],
        observer: Observer | None = None,
    ) -> None:
        """Wires it; nothing runs before `start`.

        Args:
            config: Times, the interruption mode, the folder of published versions.
            store: Where versions are made current.
            make_engine: Makes a server's client from its url.
            spawn: `spawn(coroutine, name)` runs a background task.
            keep: The same for a loop, whose return is a failure, too.
            observer: Metrics.
        """
        self.config = config
        self.confirmation = Confirmation(config.logprob_tolerance)
        self.digests = DigestCache()
        self.slots = UpdateSlots(config.max_unavailable)
        self.pauses, self.probes = Pace(32, longest_s=0.05), Pace(32, longest_s=1.0)
        self.totals = Totals()
        self._store = store
        self._make_engine = make_engine
        self._spawn = spawn
        self._begin = keep
        self._observer = observer
        self._current: PolicyVersion | None = None
        self._base: PolicyVersion | None = None
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._feeds: set[Feed] = set()
        self.changes = Changes()
        self._census = Census()
        self._publishing = asyncio.Lock()
        self.broadcasts = Broadcasts()
        self.turns = Turns(0.0, 0.0)
        self._turn_ends: asyncio.TimerHandle | None = None
        self._collected = -1
        self._log = get_logger(__name__)
        self.routine = RareLog(self._log)
        """The log for the messages that each version brings for each server."""

    # ── versions ────────────────────────────────────────────────────────────────────────────

    def start(self, snapshot: Snapshot) -> None:
        """Takes over from a previous incarnation: its servers join and are confirmed again."""
        self.turns = Turns(now(), self.config.turn_lease_s)
        self._current, self._base = snapshot.current, snapshot.base
        self.totals = snapshot.totals
        for record in snapshot.records:
            self._add(record)

    @property
    def base(self) -> PolicyVersion | None:
        """Version 0, the configured model."""
        return self._base

    @property
    def target(self) -> PolicyVersion | None:
        """The current version, which servers are brought to."""
        return self._current

    async def publish(self, version: PolicyVersion) -> int:
        """Checks a version's files, makes it current and wakes every member.

        Idempotent for the same version, path and incarnation.

        Returns:
            The current version.

        Raises:
            InvalidInput: Files or tensors are not what they should be; nothing changed.
            StaleIncarnation: A newer trainer has published.
            WrongStep: Not above the current version.
        """
        if not _is_place(version.path):
            raise InvalidInput(f"version.path {version.path!r}: expected an absolute path")
        if version.adapter is not None and not (version.files and version.adapter.base_digest):
            raise InvalidInput(
                f"version {version.version}: an adapter: expected its files and a base_digest"
            )
        async with self._publishing:
            now = self._current
            if version.adapter is not None and (self._base is None or version.version < 1):
                raise InvalidInput(
                    f"version {version.version}: an adapter: expected version 0, as whole weights, "
                    "before it"
                )
            if now is not None and now.stored and _IDENTITY(now) == _IDENTITY(version):
                return now.version
            if not version.files:
                built = await asyncio.to_thread(
                    build_manifest, Path(version.path), version.version, version.incarnation
                )
                version = replace(built, path=version.path)
            else:
                await asyncio.to_thread(self.digests.verify, version)
            if self._base is not None:
                check_against(version, self._base)
            await self._store.publish(version)
            if now is None or version.version > now.version:
                self._advance(version)
            elif version.version == now.version:
                self._stored(now, version)
            return self.status().current_version

    async def publish_model(self, path: Path) -> None:
        """Makes the configured model version 0.

        Raises:
            ConfigError: There is none.
        """
        if not await asyncio.to_thread(path.is_dir):
            raise ConfigError(f"model.path {str(path)!r}: expected a model directory")
        await self.publish(PolicyVersion(version=0, incarnation=0, path=str(path)))
        self._log.info("initial_version", path=str(path))

    async def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        """Makes current what a trainer is about to broadcast; raises as `publish`."""
        if version.files or not _is_place(version.path):
            raise InvalidInput(
                f"version.path {version.path!r}: expected an absolute path, and no files"
            )
        async with self._publishing:
            if self._base is None or self._current is None:
                raise InvalidInput(f"version {version.version}: there is no version 0 yet")
            check_same_tensors(version, self._base)
            list(buckets(version.tensors))  # every dtype is one that a broadcast carries
            if not self._current.stored and (given := self.broadcasts.given(version, offer)):
                return given  # the answer was lost
            members = {
                server_id: (member.record.boot_id, member.ranks)
                for server_id, member in self._members.items()
                if member.record.state is SERVING and member.ranks
            }
            if not members or version.version <= self._current.version:
                return Seats("", 0)  # nothing has changed: it is published as stored
            await self._store.publish(version)
            seats = self.broadcasts.seat(version, offer, members)
            self._advance(version)
            return seats

    def _advance(self, version: PolicyVersion) -> None:
        if version.version == 0:
            self._base = version
        else:
            self.totals.published += 1
        self._current = version
        self.routine.info("published", version=version.version, path=version.path)
        self._wake()

    def _stored(self, before: PolicyVersion, version: PolicyVersion) -> None:
        """Records that the version has files now, or that a newer trainer's version has."""
        self._current = version
        self.routine.info("stored", version=version.version, path=version.path)
        if before.digest != version.digest:  # its trainer died before, this is the next one's
            self.confirmation.restart(version.version)
            self.totals.confirmed_version = min(self.totals.confirmed_version, version.version - 1)
            for member in self._members.values():
                member.disown(version)
        self._wake()

    def _wake(self) -> None:
        for member in self._members.values():
            member.poke()
        self._announce("")

    def elsewhere(self) -> list[PolicyVersion]:
        """Returns stored versions that may not be in the folder of published ones."""
        known = (self._current, self._base)
        return [v for v in known if v is not None and v.stored and not in_object_store(v.path)]

    async def kept(self) -> list[PolicyVersion]:
        """Returns version 0, then the versions in the published folder; oldest first."""
        root = self.config.weights_root
        stored = await asyncio.to_thread(stored_versions, root) if root else []
        if objects := self.config.objects:
            stored += await asyncio.to_thread(ObjectStore(objects).versions)
        return [v for v in (self._base,) if v is not None] + stored

    # ── servers ─────────────────────────────────────────────────────────────────────────────

    def register(self, server_id: str, url: str, *, origin: str = "") -> InferenceServer:
        """Makes a server known, or cuts its quarantine or its drain short. Idempotent.

        Args:
            server_id: host:port of the url.
            url: Where it listens.
            origin: The source that found it and says when it leaves; empty: an RPC.

        Raises:
            CapacityExceeded: So many are known that an RPC adds none: each is probed and stored.
        """
        member = self._members.get(server_id)
        if member is None and not origin and len(self._members) >= MOST_SERVERS:
            raise CapacityExceeded(
                f"server {server_id!r}: {len(self._members)} servers are known, at most "
                f"{MOST_SERVERS}; drain those that are gone, and try again in 60 s"
            )
        if member is not None and origin:
            member.record.origin = origin
        if member is None:
            member = self._add(ServerRecord(server_id, url, origin=origin))
            self._log.info("server_registered", server=server_id, origin=origin)
        elif member.record.state is DRAINING:
            member.record.move(JOINING)
            self.changed(member.record)
            self._replace_task(member, member.run, self._begin)
        else:
            member.poke(deep=True, revive=True)
        return member.record.public()

    def report(self, server_id: str, cause: str) -> None:
        """Probes a server now because a client saw it fail.

        Ignores unknown servers (they just left).
        """
        member = self._members.get(server_id)
        if member is not None:
            self._log.info("server_reported", server=server_id, cause=cause[:300])
            member.suspect()

    def drain(self, server_id: str, deadline_s: float) -> None:
        """Stops new traffic to a server; it is forgotten when idle or past the deadline.

        Raises:
            NotFound: The server does not exist.
        """
        member = self._members.get(server_id)
        if member is None:
            raise NotFound(f"server {server_id!r}: not known")
        if member.record.state is DRAINING:
            return
        member.record.move(DRAINING)
        self.changed(member.record)
        self._replace_task(member, lambda: self._drain(member, deadline_s), self._spawn)

    async def _drain(self, member: Member, deadline_s: float) -> None:
        await member.drain(deadline_s)
        server_id = member.record.server_id
        self._log.info("server_forgotten", server=server_id)
        del self._members[server_id], self._tasks[server_id]
        self.confirmation.forget(server_id)
        self._census.drop(server_id)
        self._announce(server_id)

    async def hold(self, incarnation: int, lease_s: float) -> list[str]:
        """Begins, renews or, with 0, ends a trainer's turn on the GPUs that it shares with servers.

        Waits some seconds until they sleep.

        Returns:
            Ids of the servers that still hold memory.

        Raises:
            InvalidInput: They share no GPUs, or not in turns; or a value is out of its range.
            StaleIncarnation: A newer trainer has had a turn.
        """
        if not self.config.turns:
            raise InvalidInput("HoldServers: expected allocation_mode with '|…@alternating'")
        if incarnation < 1:
            raise InvalidInput(f"incarnation {incarnation}: expected 1 or more")
        if not 0 <= lease_s <= LONGEST_LEASE_S:
            raise InvalidInput(f"lease {lease_s} s: expected 0 to {LONGEST_LEASE_S:.0f} s")
        began = not self.turns.trainers(now())
        self.turns.hold(incarnation, now() + lease_s)
        if self._turn_ends is not None:
            self._turn_ends.cancel()
        loop = asyncio.get_running_loop()
        self._turn_ends = loop.call_later(lease_s, self._end_turn, lease_s)
        if not lease_s:
            return []
        if began:
            self._wake()
        feed, until = self.open_feed(), now() + min(_HOLD_WAIT_S, lease_s / 3)
        try:
            while (awake := self._holding()) and (left := until - now()) > 0:
                await feed.take(left)
        finally:
            self.close_feed(feed)
        return awake

    def _end_turn(self, lease_s: float) -> None:
        if lease_s:
            self._log.warning("turn_expired", after_s=lease_s)
        for member in self._members.values():
            member.poke(revive=True)

    def _holding(self) -> list[str]:
        return sorted(
            server_id
            for server_id, member in self._members.items()
            if not (member.asleep or member.gone)
        )

    def servers(self) -> list[InferenceServer]:
        """Returns the records of all known servers."""
        return [member.record.public() for member in self._members.values()]

    def origins(self) -> dict[str, str]:
        """Returns the source that found each server, by id; empty: registered by RPC."""
        return {server_id: member.record.origin for server_id, member in self._members.items()}

    def record(self, server_id: str) -> ServerRecord | None:
        """Returns one server; None when it is not known (any longer)."""
        member = self._members.get(server_id)
        return member.record if member else None

    async def stop(self) -> None:
        """Ends all members; each lets its server continue first, unless it sleeps."""
        if self._turn_ends is not None:
            self._turn_ends.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.control_timeout_s)

    def _add(self, record: ServerRecord) -> Member:
        member = Member(record, self._make_engine(record.url), self)
        self._members[record.server_id] = member
        self._tasks[record.server_id] = self._begin(member.run(), f"member-{record.server_id}")
        self.changed(record)
        return member

    def _replace_task(
        self,
        member: Member,
        work: Callable[[], Coroutine[None, None, None]],
        begin: Callable[..., asyncio.Task[None]],
    ) -> None:
        """Ends a member's task (it leaves no server paused), then runs another."""
        server_id = member.record.server_id
        before = self._tasks[server_id]
        before.cancel()  # now: it must not take another step in the new state

        async def after() -> None:
            await asyncio.wait({before})
            await work()

        self._tasks[server_id] = begin(after(), f"member-{server_id}")

    # ── what members say ────────────────────────────────────────────────────────────────────

    def changed(self, record: ServerRecord) -> None:
        """Counts and announces a server's new state."""
        self._census.put(record.server_id, record.state, record.version)
        if record.state is SERVING and record.version > self.totals.confirmed_version:
            self.totals.confirmed_version = record.version
        self._announce(record.server_id)
        self._maybe_collect(record)

    def updated(self, record: ServerRecord, seconds: float, aborted: int) -> None:
        """Adds a serving server's update to the totals."""
        self.totals.server_updates += 1
        self.totals.update_seconds += seconds
        self.totals.aborted_requests += aborted
        if self._observer is not None:
            self._observer.updated(seconds)

    def failed(self, fault: Fault) -> None:
        """Counts a server's quarantine, by cause."""
        if self._observer is not None:
            self._observer.failed(fault)

    def recheck(self, server_ids: list[str]) -> None:
        """Rechecks servers whose checksums were outvoted."""
        for server_id in server_ids:
            member = self._members.get(server_id)
            if member is not None and member.record.state is SERVING:
                member.doubt()

    # ── watchers ────────────────────────────────────────────────────────────────────────────

    def open_feed(self) -> Feed:
        """Returns a reader of changes, with everything marked as changed."""
        feed = Feed()
        for server_id in ("", *self._members):
            feed.put(server_id)
        self._feeds.add(feed)
        return feed

    def close_feed(self, feed: Feed) -> None:
        """Forgets a reader of changes."""
        self._feeds.discard(feed)

    def status(self) -> SyncStatus:
        """Returns the current state."""
        at = -1 if self._current is None else self._current.version
        draining = self._census.states()[DRAINING]
        return SyncStatus(
            current=self._current,
            confirmed_servers=self._census.number(SERVING, at),
            servers=len(self._members) - draining,
            confirmed_version=self.totals.confirmed_version,
            updates=self.totals.published,
            update_seconds_mean=self.totals.mean_seconds,
            aborted_requests=self.totals.aborted_requests,
            draining=draining,
            unstored=self._current is not None and not self._current.stored,
        )

    def states(self) -> dict[ServerState, int]:
        """Returns the number of servers by state."""
        return self._census.states()

    def _announce(self, server_id: str) -> None:
        if server_id:
            self.changes.mark(server_id)
        for feed in self._feeds:
            feed.put(server_id)

    def _maybe_collect(self, record: ServerRecord) -> None:
        """Deletes old folders once every serving server is at the current version."""
        current = self._current
        root = self.config.weights_root
        if root is None or current is None or record.version != current.version:
            return
        if self._census.versions(SERVING) != {current.version}:
            return
        if current.version != self._collected:
            self._collected = current.version
            in_use = [current.path, *(member.loading for member in self._members.values())]
            objects, keep = self.config.objects, self.config.keep_versions
            work = collect(root, objects, current.version, keep, in_use, self.digests, self.routine)
            self._spawn(work, "weights-garbage")


def _is_place(path: str) -> bool:
    return in_object_store(path) or Path(path).is_absolute()
