"""What a member needs of the coordinator."""

from __future__ import annotations

from typing import Protocol

from areal.weights.manifest import PolicyVersion
from areal_weight_sync.broadcasts import Broadcasts
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.confirmation import Confirmation
from areal_weight_sync.engine.base import Fault
from areal_weight_sync.limits import UpdateSlots
from areal_weight_sync.pace import Pace
from areal_weight_sync.server_state import ServerRecord
from areal_weight_sync.versions import DigestCache


class NotStoredError(Exception):
    """The version has no files yet, and no broadcast brings it here."""


class Hub(Protocol):
    """The coordinator, as one server's task sees it."""

    config: WeightSyncConfig
    confirmation: Confirmation
    digests: DigestCache
    slots: UpdateSlots
    pauses: Pace
    probes: Pace
    broadcasts: Broadcasts

    @property
    def target(self) -> PolicyVersion | None:
        """The current version; None before version 0."""

    def changed(self, record: ServerRecord) -> None:
        """A record has changed: announce and persist it."""

    def updated(self, record: ServerRecord, seconds: float, aborted: int) -> None:
        """A serving server was updated; seconds from pause to continue."""

    def failed(self, fault: Fault) -> None:
        """Counts a quarantine."""

    def recheck(self, server_ids: list[str]) -> None:
        """Other servers turned out to hold wrong weights."""
