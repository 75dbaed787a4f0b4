"""Client of RolloutService: submit tasks, watch them end, read their trajectories."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

import grpc

from areal.clients.base import Client, from_rpc_error
from areal.protocol.leases import TaskRecord, record_from_pb
from areal.protocol.trajectories import task_to_pb
from areal.security import Security
from areal.types import Task
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc


class RolloutClient(Client):
    """Typed async client; raises what the service raised, Unavailable, or WaitTimeout."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        super().__init__(address, security)
        self._stub = pb_grpc.RolloutServiceStub(self._channel)

    async def submit_tasks(
        self, tasks: Sequence[Task], *, timeout: float = 60.0, retry_for: float = 30.0
    ) -> list[bool]:
        """Checks and queues tasks, at most 10,000.

        Returns:
            One flag per task; False: its id was known already and nothing changed.

        Raises:
            InvalidInput: Names the bad task, field and value; nothing of the call was queued.
        """
        response = await self._call(
            self._stub.SubmitTasks,
            pb.SubmitTasksRequest(tasks=[task_to_pb(task) for task in tasks]),
            timeout=timeout,
            retry_for=retry_for,
        )
        return [result.accepted for result in response.results]

    async def get_tasks(
        self,
        task_ids: Sequence[str],
        *,
        include_trajectories: bool = False,
        timeout: float = 30.0,
        retry_for: float = 30.0,
    ) -> list[TaskRecord]:
        """Reads records in the order asked; unknown ids are left out."""
        response = await self._call(
            self._stub.GetTasks,
            pb.GetTasksRequest(task_ids=task_ids, include_trajectories=include_trajectories),
            timeout=timeout,
            retry_for=retry_for,
        )
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
        since = time.monotonic()
        call = self._stub.WatchTasks(request, timeout=timeout, metadata=self._metadata)
        try:
            async for response in call:
                yield record_from_pb(response.record)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "WatchTasks", self.address, since) from None
        finally:
            call.cancel()

    async def cancel_tasks(
        self,
        task_ids: Sequence[str],
        *,
        reason: str = "",
        timeout: float = 60.0,
        retry_for: float = 30.0,
    ) -> int:
        """Cancels live tasks; returns how many were."""
        response = await self._call(
            self._stub.CancelTasks,
            pb.CancelTasksRequest(task_ids=task_ids, reason=reason),
            timeout=timeout,
            retry_for=retry_for,
        )
        return response.cancelled
