"""What goes into the store, checked, and how much may: plain records, no grpc and no redis."""

from __future__ import annotations

from dataclasses import dataclass

from areal.types import Purpose

RECORD_BYTES = 512
"""A task's record without its body, as the scripts count it; measured: about 530."""
ENDED_BYTES = 200
"""Bytes of a record after the task was trained on and released; measured: 185 for 16,000 tasks."""

# Share of Redis's own limit: above that limit Redis refuses every write, so no commit could free
# memory. The rest is for the next batch, which may pass our limit, and for what is not counted.
_OF_REDIS = 0.8


class MemoryGauge:
    """The limit that the scripts compare the ledger's own bytes with; sampled once a second."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """What the ledger may hold now."""
        self.ledger_bytes = 0
        """What it held at the sample: bodies, groups, journals, tracebacks and records."""
        self.redis_bytes = 0
        """Memory that Redis used at that time for all data of all its users."""
        self._asked_bytes = limit_bytes

    def sample(self, ledger_bytes: int, redis_bytes: int, redis_limit_bytes: int = 0) -> None:
        """Takes in what the ledger holds, what Redis uses, and Redis's own limit (0: none)."""
        self.ledger_bytes, self.redis_bytes = ledger_bytes, redis_bytes
        self.limit_bytes = self._asked_bytes
        if redis_limit_bytes:
            left = int(_OF_REDIS * redis_limit_bytes) - redis_bytes
            self.limit_bytes = max(0, min(self._asked_bytes, ledger_bytes + left))


@dataclass(frozen=True)
class NewTask:
    """A validated task on its way in."""

    task_id: str
    purpose: Purpose
    body: bytes
    """The serialized Task."""
    position: tuple[int, int] | None
    time_to_live_ms: int | None


@dataclass(frozen=True)
class Completion:
    """A validated group on its way in."""

    task_id: str
    token: int
    """Fencing token of the lease under which it was made."""
    payload: bytes
    """The serialized TrajectoryGroup as it arrived, possibly a zstd frame."""
    head_version: int
    """Smallest version that sampled a token; -1 if none was sampled."""
    lengths: tuple[int, ...]
    generated_tokens: int
    mean_reward: float


@dataclass(frozen=True)
class Swept:
    """The results of one sweep."""

    extended: int
    """Leases extended because of an outage."""
    requeued: int
    """Leases that had expired."""
    expired: int
    """Tasks past their time to live."""
    released: int
    """Results that were read, and serve tasks that ended long ago; bounded in each sweep."""
    gap_ms: int
    """Milliseconds since the previous sweep."""
