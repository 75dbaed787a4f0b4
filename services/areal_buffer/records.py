"""What has been checked on its way into the store: plain records, no grpc and no redis."""

from __future__ import annotations

from dataclasses import dataclass

from areal.types import Purpose


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
    """Of the lease it was made under."""
    payload: bytes
    """The serialized TrajectoryGroup as it came: maybe a zstd frame."""
    head_version: int
    """Smallest version that sampled a token; -1 if none was sampled."""
    lengths: tuple[int, ...]
    generated_tokens: int
    mean_reward: float


@dataclass(frozen=True)
class Swept:
    """What a sweep did."""

    extended: int
    """Leases extended because of an outage."""
    requeued: int
    """Leases that had expired."""
    expired: int
    """Tasks past their time to live."""
    released: int
    """Results that were read, or serve tasks that ended long ago: at most so many of each."""
    gap_ms: int
    """Since the sweep before."""
