"""Client of RolloutService: submit tasks, watch them end, read their trajectories."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import ClassVar

from areal.clients.base import CallPolicy, Client, Policies
from areal.protocol.leases import TaskRecord, record_from_pb
from areal.protocol.trajectories import task_to_pb
from areal.types import Task
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc


class RolloutClient(Client):
    """Submits and watches tasks; needs nothing else of the stack."""

    POLICIES: ClassVar[Policies] = {
        "SubmitTasks": CallPolicy(60.0, 30.0),
        "GetTasks": CallPolicy(30.0, 30.0),
        "CancelTasks": CallPolicy(60.0, 30.0),
    }
    SERVING: ClassVar[bool] = True

    @cached_property
    def _stub(self) -> pb_grpc.RolloutServiceAsyncStub:
        return pb_grpc.RolloutServiceStub(self._channel)

    async def submit_tasks(self, tasks: Sequence[Task]) -> list[bool]:
        """Checks and queues tasks, at most 10,000.

        Returns:
            One flag per task; False: its id was known already and nothing changed.

        Raises:
            InvalidInput: Names the bad task, field and value; nothing of the call was queued.
        """
        request = pb.SubmitTasksRequest(tasks=[task_to_pb(task) for task in tasks])
        response = await self.call(self._stub.SubmitTasks, request)
        return [result.accepted for result in response.results]

    async def get_tasks(
        self, task_ids: Sequence[str], *, include_trajectories: bool = False
    ) -> list[TaskRecord]:
        """Reads records in the order asked; unknown ids are left out."""
        request = pb.GetTasksRequest(task_ids=task_ids, include_trajectories=include_trajectories)
        response = await self.call(self._stub.GetTasks, request)
        return [record_from_pb(record) for record in response.records]

    async def watch_tasks(
        self,
        task_ids: Sequence[str],
        *,
        include_trajectories: bool = False,
        timeout: float = 3600.0,
    ) -> AsyncIterator[TaskRecord]:
        """Yields each task once, when it has ended (train tasks: when completed).

        Raises:
            NotFound: One of them is unknown.
            Unavailable: The service went away; watch the remaining ones again.
            WaitTimeout: Not all have ended within `timeout` seconds.
        """
        request = pb.WatchTasksRequest(task_ids=task_ids, include_trajectories=include_trajectories)
        stream = self.stream(self._stub.WatchTasks, request, timeout_s=timeout)
        async with aclosing(stream) as responses:
            async for response in responses:
                yield record_from_pb(response.record)

    def call_session(
        self, request: pb.CallSessionRequest, *, wait_s: float
    ) -> AsyncGenerator[pb.CallSessionResponse]:
        """Answers an agent's HTTP request; its own errors are in the first message's status.

        Further messages have further parts of the body. Its agent tries again itself. Closing it
        stops the generation.

        Args:
            request: The request as it arrived.
            wait_s: Longest time for a generation, in seconds.
        """
        return self.stream(self._stub.CallSession, request, timeout_s=wait_s + 30.0)

    async def cancel_tasks(self, task_ids: Sequence[str], *, reason: str = "") -> int:
        """Cancels live tasks; returns how many were."""
        request = pb.CancelTasksRequest(task_ids=task_ids, reason=reason)
        return (await self.call(self._stub.CancelTasks, request)).cancelled
