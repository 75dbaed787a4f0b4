"""RolloutService: checks workflows; all else are the buffer's own messages, passed on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from areal.clients.buffer.tasks import BufferTasks
from areal.errors import InvalidInput, NotFound
from areal.protocol.trajectories import workflow_from_pb
from areal.types import WorkflowSpec
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal.v1 import trajectory_pb2
from areal_rollout.sessions import Sessions

_MAX_TASKS = 10_000
_WAIT_S = 20.0

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutService(pb_grpc.RolloutServiceServicer):
    """One method per RPC."""

    def __init__(
        self,
        buffer: BufferTasks,
        check_workflow: Callable[[WorkflowSpec], Awaitable[object]],
        sessions: Sessions,
    ) -> None:
        """Takes what it calls.

        Args:
            buffer: Keeps the tasks.
            check_workflow: Builds a workflow, or raises InvalidInput.
            sessions: Answers outside agents.
        """
        self._buffer = buffer
        self._check_workflow = check_workflow
        self._sessions = sessions

    async def SubmitTasks(  # noqa: N802
        self, request: pb.SubmitTasksRequest, context: Context
    ) -> pb.SubmitTasksResponse:
        """Checks all tasks, then queues all."""
        _limit(request.tasks, "tasks")
        for index, task in enumerate(request.tasks):
            await self._check(task, index)
        accepted = await self._buffer.submit(request.tasks)
        return pb.SubmitTasksResponse(
            results=[
                trajectory_pb2.SubmitResult(task_id=task.task_id, accepted=flag)
                for task, flag in zip(request.tasks, accepted, strict=True)
            ]
        )

    async def _check(self, task: trajectory_pb2.Task, index: int) -> None:
        task.workflow.name = task.workflow.name or "rlvr"
        try:
            await self._check_workflow(workflow_from_pb(task.workflow))
        except InvalidInput as error:
            raise InvalidInput(f"tasks[{index}] {task.task_id[:80]!r}: {error}") from None

    async def GetTasks(  # noqa: N802
        self, request: pb.GetTasksRequest, context: Context
    ) -> pb.GetTasksResponse:
        """Reads records in the order asked; unknown ids are left out."""
        _limit(request.task_ids, "task_ids")
        records = await self._buffer.get(request.task_ids, request.include_trajectories)
        return pb.GetTasksResponse(records=records)

    async def WatchTasks(  # noqa: N802
        self, request: pb.WatchTasksRequest, context: Context
    ) -> AsyncIterator[pb.WatchTasksResponse]:
        """Yields each task once, when it has ended."""
        _limit(request.task_ids, "task_ids")
        waiting = dict.fromkeys(request.task_ids)
        known = {record.task.task_id async for record in self._buffer.read(list(waiting), False)}
        missing = waiting.keys() - known
        if missing:
            raise NotFound(f"task {min(missing)!r}: no such task")
        while waiting:
            ended = await self._buffer.wait_tasks(list(waiting), _WAIT_S)
            async for record in self._buffer.read(ended, request.include_trajectories):
                waiting.pop(record.task.task_id, None)
                yield pb.WatchTasksResponse(record=record)

    async def CancelTasks(  # noqa: N802
        self, request: pb.CancelTasksRequest, context: Context
    ) -> pb.CancelTasksResponse:
        _limit(request.task_ids, "task_ids")
        cancelled = await self._buffer.cancel_tasks(
            list(request.task_ids), reason=request.reason or "cancelled by a client"
        )
        return pb.CancelTasksResponse(cancelled=cancelled)

    async def CallSession(  # noqa: N802
        self, request: pb.CallSessionRequest, context: Context
    ) -> AsyncIterator[pb.CallSessionResponse]:
        """Serves one HTTP request of an agent."""
        reply = await self._sessions.serve(
            request.session_id, request.method, request.path, request.headers, request.content
        )
        yield pb.CallSessionResponse(
            status=reply.status,
            body=reply.body,
            stream=reply.stream,
            headers=reply.headers,
            receipt=reply.receipt,
        )
        if reply.parts is not None:
            async with aclosing(reply.parts) as parts:
                async for part in parts:
                    yield pb.CallSessionResponse(body=part)


def _limit(items: Sequence[object], field: str) -> None:
    if not items:
        raise InvalidInput(f"{field}: empty, expected at least one")
    if len(items) > _MAX_TASKS:
        raise InvalidInput(f"{field}: {len(items)} items, expected at most {_MAX_TASKS}")
