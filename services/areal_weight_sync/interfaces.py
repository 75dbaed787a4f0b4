"""What the coordinator remembers and needs of the world, and what a member needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from areal.chassis.rare_log import RareLog
from areal.weights.manifest import PolicyVersion
from areal_weight_sync.broadcasts import Broadcasts
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.confirmation import Confirmation
from areal_weight_sync.engine.base import Fault
from areal_weight_sync.limits import Pace, UpdateSlots
from areal_weight_sync.server_state import ServerRecord
from areal_weight_sync.turns import Turns
from areal_weight_sync.versions import DigestCache


@dataclass
class Totals:
    """Counters of the trial, which survive restarts.

    Example:
        >>> Totals(published=12, server_updates=24, update_seconds=0.61).mean_seconds
        0.025416666666666667
    """

    published: int = 0
    """Versions published by the trainer (version 0 is not counted)."""
    server_updates: int = 0
    update_seconds: float = 0.0
    aborted_requests: int = 0
    confirmed_version: int = -1

    @property
    def mean_seconds(self) -> float:
        """The mean time from pause to continue, per update of a serving server."""
        return self.update_seconds / self.server_updates if self.server_updates else 0.0


@dataclass
class Snapshot:
    """The state that a store remembers."""

    current: PolicyVersion | None = None
    base: PolicyVersion | None = None
    """Version 0 (its files may be gone)."""
    records: list[ServerRecord] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


class Store(Protocol):
    """Stores versions and servers atomically."""

    async def publish(self, version: PolicyVersion) -> None:
        """Makes a version current.

        Raises:
            StaleIncarnation, WrongStep: Refused; nothing changed.
        """


class Observer(Protocol):
    """Counts what happens, for /metrics."""

    def updated(self, seconds: float) -> None:
        """Counts an update of a serving server."""

    def failed(self, fault: Fault) -> None:
        """Counts a server that was quarantined."""


class NotStoredError(Exception):
    """The version has no files yet, and no broadcast brings it here."""


class CoordinatorView(Protocol):
    """The coordinator, as one server's task sees it."""

    config: WeightSyncConfig
    confirmation: Confirmation
    digests: DigestCache
    slots: UpdateSlots
    pauses: Pace
    probes: Pace
    broadcasts: Broadcasts
    routine: RareLog
    """The log for the messages that each version brings."""
    turns: Turns
    totals: Totals

    @property
    def target(self) -> PolicyVersion | None:
        """The current version; None before version 0."""

    @property
    def base(self) -> PolicyVersion | None:
        """Returns version 0; None before it is stored."""

    def changed(self, record: ServerRecord) -> None:
        """Announces and persists a record that has changed."""

    def updated(self, record: ServerRecord, seconds: float, aborted: int) -> None:
        """Records an update of a serving server; seconds from pause to continue."""

    def failed(self, fault: Fault) -> None:
        """Counts a server's quarantine, by cause."""

    def recheck(self, server_ids: list[str]) -> None:
        """Rechecks other servers, which turned out to hold wrong weights."""
