"""What the coordinator remembers, and what it needs of the world besides servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from areal.weights.manifest import PolicyVersion
from areal_weight_sync.engine.base import Fault
from areal_weight_sync.server_state import ServerRecord


@dataclass
class Totals:
    """Over the trial; survive restarts.

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
        """From pause to continue, per update of a serving server."""
        return self.update_seconds / self.server_updates if self.server_updates else 0.0


@dataclass
class Snapshot:
    """What a store remembers."""

    current: PolicyVersion | None = None
    base: PolicyVersion | None = None
    """Version 0 (its files may be gone)."""
    records: list[ServerRecord] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


class Store(Protocol):
    """The truth about versions, atomic."""

    async def publish(self, version: PolicyVersion) -> None:
        """Makes a version current.

        Raises:
            StaleIncarnation, WrongStep: Refused; nothing changed.
        """


class Observer(Protocol):
    """Counts what happens, for /metrics."""

    def updated(self, seconds: float) -> None:
        """A serving server was updated."""

    def failed(self, fault: Fault) -> None:
        """A server was quarantined."""
