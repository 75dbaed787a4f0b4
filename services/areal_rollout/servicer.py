"""RolloutService: converts, checks, and lets the ledger do the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from areal.clients.buffer import BufferClient
from areal.errors import InvalidInput, NotFound
from areal.protocol.leases import record_to_pb
from areal.protocol.trajectories import task_from_pb
from areal.types import Task, WorkflowSpec
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal.v1 import trajectory_pb2
from areal_rollout.workflows import default_workflow

_MAX_TASKS = 10_000
_WAIT_S = 20.0

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """One method per RPC."""

    def __init__(
        self, ledger: BufferClient, check_workflow: Callable[[WorkflowSpec], Awaitable[object]]
    ) -> None:
        """Takes what it calls.

        Args:
            ledger: Keeps the tasks.
            check_workflow: Builds a workflow, or raises InvalidInput.
        """
        self._ledger = ledger
        self._check_workflow = check_workflow

    async def SubmitTasks(  # noqa: N802
        self, request: pb.SubmitTasksRequest, context: Context
    ) -> pb.SubmitTasksResponse:
        """Checks all tasks, then queues all."""
        _limit(request.tasks, "tasks")
        tasks = [await self._checked(message, at) for at, message in enumerate(request.tasks)]
        accepted = await self._ledger.submit_tasks(tasks)
        return pb.SubmitTasksResponse(
            results=[
                trajectory_pb2.SubmitResult(task_id=task.task_id, accepted=flag)
                for task, flag in zip(tasks, accepted, strict=True)
            ]
        )

    async def _checked(self, message: trajectory_pb2.Task, index: int) -> Task:
        task = task_from_pb(message)
        task = replace(task, workflow=default_workflow(task.workflow))
        try:
            await self._check_workflow(task.workflow)
        except InvalidInput as error:
            raise InvalidInput(f"tasks[{index}] {task.task_id!r}: {error}") from None
        return task

    async def GetTasks(  # noqa: N802
        self, request: pb.GetTasksRequest, context: Context
    ) -> pb.GetTasksResponse:
        """Reads records in the order asked; unknown ids are left out."""
        _limit(request.task_ids, "task_ids")
        records = await self._ledger.get_tasks(
            list(request.task_ids), include_groups=request.include_trajectories
        )
        return pb.GetTasksResponse(records=[record_to_pb(record) for record in records])

    async def WatchTasks(  # noqa: N802
        self, request: pb.WatchTasksRequest, context: Context
    ) -> AsyncIterator[pb.WatchTasksResponse]:
        """Each task once, when it has ended."""
        _limit(request.task_ids, "task_ids")
        waiting = dict.fromkeys(request.task_ids)
        known = {record.task.task_id async for record in self._ledger.read_tasks(list(waiting))}
        missing = waiting.keys() - known
        if missing:
            raise NotFound(f"task {min(missing)!r}: no such task")
        while waiting:
            ended = await self._ledger.wait_tasks(list(waiting), _WAIT_S)
            async for record in self._ledger.read_tasks(
                ended, include_groups=request.include_trajectories
            ):
                waiting.pop(record.task.task_id, None)
                yield pb.WatchTasksResponse(record=record_to_pb(record))

    async def CancelTasks(  # noqa: N802
        self, request: pb.CancelTasksRequest, context: Context
    ) -> pb.CancelTasksResponse:
        _limit(request.task_ids, "task_ids")
        cancelled = await self._ledger.cancel_tasks(
            list(request.task_ids), reason=request.reason or "cancelled by a client"
        )
        return pb.CancelTasksResponse(cancelled=cancelled)


def _limit(items: Sequence[object], field: str) -> None:
    if not items:
        raise InvalidInput(f"{field}: empty, expected at least one")
    if len(items) > _MAX_TASKS:
        raise InvalidInput(f"{field}: {len(items)} items, expected at most {_MAX_TASKS}")
