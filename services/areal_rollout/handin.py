"""The last step of an episode: its ending is offered to the ledger until it is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from areal.protocol.leases import Lease, ReturnCause
from areal.types import Trajectory, TrajectoryGroup
from areal_rollout.interfaces import Ledger

# Errors of the ledger that pass: it is away, or near its memory limit.
RETRYABLE = (Unavailable, CapacityExceeded, WaitTimeout)


@dataclass(frozen=True, slots=True)
class Returned:
    """An ending other than a group or a rejection."""

    cause: ReturnCause
    detail: str
    traceback: str = ""
    failed_server: str = ""
    site: str = ""
    """What all tasks that fail alike share."""
    partial: Callable[[], bytes] = bytes
    """Encodes the journal; by itself: there is none."""


# What an episode comes to; None: the workflow rejects the task.
Ending = TrajectoryGroup | Returned | None


class HandIn:
    """Offers endings of all episodes of the process."""

    def __init__(self, ledger: Ledger, worker_id: str, timeout_s: float) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._log = get_logger("areal.rollout.hand_in")

    async def hand_in(self, lease: Lease, ending: Ending) -> str:
        """Offers an ending to the ledger until it is taken; returns the outcome's name."""
        with tracing.span("hand_in"):
            return await self._until_taken(lease, ending)

    async def _until_taken(self, lease: Lease, ending: Ending) -> str:
        deadline = time.monotonic() + self._timeout_s
        task_id = lease.task.task_id
        backoff = Backoff()
        while True:
            try:
                return await self._offer(lease, ending)
            except (LeaseLost, NotFound) as error:  # an ended serve task's id may be free again
                self._log.info("ending_refused", task_id=task_id, error=str(error))
                return "lost"
            except InvalidInput as error:
                if isinstance(ending, TrajectoryGroup) or ending is None:
                    detail = f"the ledger refuses the group: {error}"
                    ending = Returned(ReturnCause.WORKFLOW_ERROR, detail)
                elif ending.partial is not bytes:
                    ending = replace(ending, partial=bytes)
                else:
                    self._log.error("ending_refused", task_id=task_id, error=str(error))
                    return "lost"
            except RETRYABLE as error:
                delay = backoff.next()
                if isinstance(error, CapacityExceeded):
                    delay = max(delay, error.retry_after_s or 0.0)
                if time.monotonic() + delay > deadline:
                    self._log.error("ending_dropped", task_id=task_id, error=str(error))
                    return "lost"
                await asyncio.sleep(delay)

    async def _offer(self, lease: Lease, ending: Ending) -> str:
        task_id, token = lease.task.task_id, lease.token
        if isinstance(ending, TrajectoryGroup):
            await self._ledger.complete_task(task_id, token, ending, self._worker_id)
            return "completed"
        if ending is None:
            await self._ledger.reject_task(task_id, token, "arun_episode returned None")
            return "rejected"
        if ending.cause is not ReturnCause.DRAIN:
            self._log.warning(
                "episode_returned", task_id=task_id, cause=ending.cause.value, detail=ending.detail
            )
        await self._ledger.return_task(
            task_id,
            token,
            ending.cause,
            detail=ending.detail,
            traceback=ending.traceback,
            partial=ending.partial,
            failed_server=ending.failed_server,
            site=ending.site,
        )
        return ending.cause.value


def group_of(result: object, lease: Lease, where: str = "") -> TrajectoryGroup | None:
    """Checks what a workflow returned and stamps the ids; `where` is in what it raises."""
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
            f"arun_episode returned {what}: expected a Trajectory, a list of them, or None{where}"
        )
    pinned = lease.task.policy_version
    if pinned is not None:
        others = {int(v) for t in trajectories for v in t.token_versions} - {-1, pinned}
        if others:
            raise WorkflowError(
                f"policy_version {pinned}: tokens were sampled by version {min(others)}, "
                f"so {pinned} is served no longer"
            )
    task_id = lease.task.task_id
    for index, trajectory in enumerate(trajectories):
        # The token makes ids of a regenerated group differ from those of the stale one.
        trajectory.trajectory_id = f"{task_id}.{lease.token}.{index}"
    return TrajectoryGroup(task_id, trajectories, lease.task.traceparent)
