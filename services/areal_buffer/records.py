"""What the store gives and takes: plain records, no grpc and no redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.protocol.compression import expand
from areal.types import Purpose, TaskState

# What `stored_task` reads of a task's hash.
RECORD_FIELDS = (
    "state",
    "purpose",
    "body",
    "reason",
    "cause",
    "traceback",
    "attempts",
    "infra",
    "submitted",
    "ended",
    "step",
)


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
class StoredLease:
    """A lease as the store gave it."""

    task_id: str
    body: bytes
    token: int
    policy_version: int
    partial: bytes
    failed_servers: tuple[str, ...]
    queued_ms: int = 0
    """Since when it was queued, milliseconds since the epoch; 0: unknown."""


@dataclass(frozen=True)
class FinishedGroup:
    """A validated group on its way in."""

    task_id: str
    token: int
    """Of the lease it was made under."""
    payload: bytes
    """The serialized TrajectoryGroup as it was handed in: maybe a zstd frame."""
    head_version: int
    """Smallest version that sampled a token; -1 if none was sampled."""
    lengths: tuple[int, ...]
    generated_tokens: int
    mean_reward: float


@dataclass(frozen=True)
class ReturnedLease:
    """A lease that is returned, validated."""

    task_id: str
    token: int
    cause: str
    """Which limit counts it: workflow_error, suspected_poison; empty: none."""
    detail: str
    traceback: str
    partial: bytes
    """The journal for the next attempt."""
    failed_server: str
    site: str = ""
    """Of an error of the recipe: what all tasks that fail alike share; else empty."""


@dataclass(frozen=True)
class TakenGroup:
    """A group of a batch, without its payload."""

    task_id: str
    head_version: int
    lengths: tuple[int, ...]
    completed_ms: int = 0
    """Since when it was completed, milliseconds since the epoch; 0: unknown."""


@dataclass(frozen=True)
class Take:
    """The answer to one attempt at a batch."""

    state: str
    """taken, waiting, checkpoint_first or exhausted."""
    waiting_for: str
    replay: bool
    queued: int
    running: int
    completed: int
    rows_wanted: bool
    """Waiting, with fewer tasks queued than the caller's `refill_below`."""
    groups: tuple[TakenGroup, ...]
    payloads: Sequence[bytes]
    """Of the first groups, if asked for: those that the answer brings along."""


@dataclass(frozen=True)
class Trainer:
    """A registered trainer."""

    incarnation: int
    last_taken_step: int
    last_committed_step: int
    retried: int
    """Dead letters that were queued again."""


@dataclass(frozen=True)
class WorkflowFailure:
    """What several attempts failed of alike."""

    site: str
    attempts: int
    task_id: str
    """Of the first one, as are detail and time."""
    detail: str
    time_ms: int


@dataclass(frozen=True)
class StoredTask:
    """What is kept of a task. Times in milliseconds since the epoch."""

    task_id: str
    purpose: Purpose
    state: TaskState
    body: bytes
    """Empty once it has been released."""
    reason: str
    cause: str
    traceback: str
    attempts: int
    infrastructure_attempts: int
    submitted_ms: int
    ended_ms: int
    """0 while the task lives."""
    step: int
    payload: bytes | None
    """The group, when asked for and still there."""


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


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of the ledger."""

    submitted: int
    counts: dict[TaskState, int]
    train_counts: dict[TaskState, int]
    policy_version: int
    incarnation: int
    last_taken_step: int
    last_committed_step: int
    batch_size: int
    max_head_offpolicyness: int
    max_concurrent_rollouts: int
    admission_headroom: int
    staleness_mean: float
    staleness_max: int
    regenerated: int
    oldest_queued_ms: int
    """Submission time of the oldest queued task; 0: none is queued."""
    trajectories: int
    generated_tokens: int
    failures: tuple[WorkflowFailure, ...]
    """Since the trainer registered, the most frequent first."""
    stopped: str
    """Why the run was stopped; empty: it was not."""
    retried: int
    """Dead letters that the trainer's registration queued again."""
    held_bytes: int
    """What the ledger holds: see `areal_buffer.memory`."""


def text(value: Any) -> str:
    """Of a reply: bytes, or nil."""
    return value.decode(errors="replace") if value else ""


def failures_of(first: Sequence[bytes], attempts: Sequence[bytes]) -> tuple[WorkflowFailure, ...]:
    """From the hashes `failures` and `failures:attempts`, as Redis lists them."""
    counts = dict(zip(attempts[::2], attempts[1::2], strict=True))
    found = []
    for site, value in zip(first[::2], first[1::2], strict=True):
        task_id, time_ms, detail = text(value).split("\n", 2)
        found.append(
            WorkflowFailure(text(site), int(counts.get(site, 0)), task_id, detail, int(time_ms))
        )
    return tuple(sorted(found, key=lambda failure: -failure.attempts))


def stored_task(task_id: str, values: dict[str, bytes | None], payload: bytes | None) -> StoredTask:
    """A task from its `RECORD_FIELDS` and, if asked for, its group as it was handed in."""
    return StoredTask(
        task_id=task_id,
        purpose=Purpose(text(values["purpose"])),
        state=TaskState(text(values["state"])),
        body=values["body"] or b"",
        reason=text(values["reason"]),
        cause=text(values["cause"]),
        traceback=text(values["traceback"]),
        attempts=int(values["attempts"] or 0),
        infrastructure_attempts=int(values["infra"] or 0),
        submitted_ms=int(values["submitted"] or 0),
        ended_ms=int(values["ended"] or 0),
        step=int(values["step"] or 0),
        payload=None if payload is None else expand(payload),
    )
