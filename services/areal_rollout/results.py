"""The last step of an episode: its end is reported until the buffer has taken it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from areal.chassis import tracing
from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    LeaseLost,
    NotFound,
    Unavailable,
    WaitTimeout,
    WorkflowError,
)
from areal.protocol.leases import Lease, Return, ReturnCause
from areal.types import Purpose, Trajectory, TrajectoryGroup
from areal_rollout.failures import where_defined
from areal_rollout.interfaces import Buffer

# Errors of the buffer that pass: it is away, or near its memory limit.
RETRYABLE = (Unavailable, CapacityExceeded, WaitTimeout)


class Rejected(StrEnum):
    """Why a task is dropped; the value is the outcome's name."""

    BY_WORKFLOW = "rejected"
    EQUAL_REWARDS = "equal_rewards"
    NO_ANSWER = "no_answer"

    @property
    def reason(self) -> str:
        """The reason for the ledger."""
        if self is Rejected.BY_WORKFLOW:
            return "arun_episode returned None"
        if self is Rejected.NO_ANSWER:
            return "its sessions ended without an answered call"
        return "all samples have the same reward"


@dataclass(frozen=True)
class Rejection:
    """The end of a task that is dropped."""

    why: Rejected
    group: TrajectoryGroup | None = None
    """The group that the workflow made, kept for later inspection."""


# What an episode comes to.
End = TrajectoryGroup | Return | Rejection


class Results:
    """Reports the ends of all episodes of the process."""

    def __init__(self, buffer: Buffer, worker_id: str, timeout_s: float) -> None:
        self._buffer = buffer
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._log = get_logger(__name__)

    async def report(self, lease: Lease, end: End) -> str:
        """Reports an end until the buffer has taken it; returns the outcome's name."""
        with tracing.span("report"):
            return await self._until_taken(lease, end)

    async def _until_taken(self, lease: Lease, end: End) -> str:
        deadline = time.monotonic() + self._timeout_s
        task_id = lease.task.task_id
        backoff = Backoff()
        while True:
            try:
                return await self._send(lease, end)
            except (LeaseLost, NotFound) as error:  # an ended serve task's id may be free again
                self._log.info("end_refused", task_id=task_id, error=str(error))
                return "lost"
            except InvalidInput as error:
                if isinstance(end, Rejection) and end.group is not None:
                    end = Rejection(end.why)
                elif not isinstance(end, Return):
                    detail = f"the ledger refuses the group: {error}"
                    end = Return(ReturnCause.WORKFLOW_ERROR, detail)
                elif end.partial is not bytes:
                    end = replace(end, partial=bytes)
                else:
                    self._log.error("end_refused", task_id=task_id, error=str(error))
                    return "lost"
            except RETRYABLE as error:
                delay = backoff.next()
                if isinstance(error, CapacityExceeded):
                    delay = max(delay, error.retry_after_s or 0.0)
                if time.monotonic() + delay > deadline:
                    self._log.error("end_dropped", task_id=task_id, error=str(error))
                    return "lost"
                await asyncio.sleep(delay)

    async def _send(self, lease: Lease, end: End) -> str:
        task_id, token = lease.task.task_id, lease.token
        if isinstance(end, TrajectoryGroup):
            await self._buffer.complete_task(task_id, token, end, self._worker_id)
            return "completed"
        if isinstance(end, Rejection):
            await self._buffer.reject_task(task_id, token, end.why.reason, end.group)
            return end.why.value
        if end.cause is not ReturnCause.DRAIN:
            self._log.warning(
                "episode_returned", task_id=task_id, cause=end.cause.value, detail=end.detail
            )
        await self._buffer.return_task(task_id, token, end)
        return end.cause.value


def group_of(result: object, lease: Lease, episode: Callable[..., Any]) -> TrajectoryGroup | None:
    """Checks what a workflow returned and stamps the ids; its errors say where `episode` is."""
    if result is None:
        return None
    trajectories = [result] if isinstance(result, Trajectory) else result
    if (
        not isinstance(trajectories, list)
        or not trajectories
        or not all(isinstance(item, Trajectory) for item in trajectories)
    ):
        what = type(result).__name__ if result != [] else "an empty list"
        raise WorkflowError(
            f"arun_episode returned {what}: expected a Trajectory, a list of them, or None"
            f"{where_defined(episode)}"
        )
    pinned = lease.task.policy_version
    if pinned is not None:
        others = {int(v) for t in trajectories for v in t.token_versions} - {-1, pinned}
        if others:
            raise WorkflowError(
                f"policy_version {pinned}: tokens were sampled by version {min(others)}, "
                f"so {pinned} is no longer served"
            )
    task_id = lease.task.task_id
    for index, trajectory in enumerate(trajectories):
        # The token makes ids of a regenerated group differ from those of the stale one.
        trajectory.trajectory_id = f"{task_id}.{lease.token}.{index}"
    return TrajectoryGroup(task_id, trajectories, lease.task.traceparent)


def note_times(group: TrajectoryGroup, lease: Lease, ran_s: float, score_s: float) -> None:
    """Writes down how long a group took, for those who look at it later."""
    if lease.queued_time:
        group.queued_s = max(0.0, time.time() - ran_s - lease.queued_time)
    group.episode_s, group.score_s = ran_s, score_s


def judge(
    group: TrajectoryGroup | None,
    lease: Lease,
    *,
    dynamic_sampling: bool,
    reject_single: bool = False,
) -> TrajectoryGroup | Rejection:
    """Returns the end of an episode that returned `group`.

    With `dynamic_sampling`, several samples to train on that all have the same reward are rejected,
    and with `reject_single` a single sample too.
    """
    if group is None:
        return Rejection(Rejected.NO_ANSWER if lease.attempts else Rejected.BY_WORKFLOW)
    least = 1 if reject_single else 2
    training = lease.task.purpose is Purpose.TRAIN
    if dynamic_sampling and training and len(group.trajectories) >= least:
        rewards = {trajectory.reward for trajectory in group.trajectories}
        return Rejection(Rejected.EQUAL_REWARDS, group) if len(rewards) == 1 else group
    return group
