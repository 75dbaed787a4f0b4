"""RolloutService's task calls in protobuf messages, as the REST mirror needs them."""

from __future__ import annotations

from collections.abc import Sequence

from areal.clients.base import Client
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal.v1 import trajectory_pb2

_TIMEOUT_S = 30.0


class RolloutCalls(Client):
    """Raises the class the servicer raised, Unavailable or WaitTimeout."""

    async def submit(
        self, tasks: Sequence[trajectory_pb2.Task]
    ) -> list[trajectory_pb2.SubmitResult]:
        """Queues tasks; idempotent by task_id."""
        stub = pb_grpc.RolloutServiceStub(self._channel)
        request = pb.SubmitTasksRequest(tasks=tasks)
        return list((await self._call(stub.SubmitTasks, request, timeout=_TIMEOUT_S)).results)

    async def get(
        self, task_ids: Sequence[str], *, include_trajectories: bool
    ) -> list[trajectory_pb2.TaskRecord]:
        """Records of the known ones among the ids."""
        stub = pb_grpc.RolloutServiceStub(self._channel)
        request = pb.GetTasksRequest(task_ids=task_ids, include_trajectories=include_trajectories)
        return list((await self._call(stub.GetTasks, request, timeout=_TIMEOUT_S)).records)

    async def cancel(self, task_ids: Sequence[str], reason: str) -> int:
        """Cancels live tasks; returns how many."""
        stub = pb_grpc.RolloutServiceStub(self._channel)
        request = pb.CancelTasksRequest(task_ids=task_ids, reason=reason)
        return (await self._call(stub.CancelTasks, request, timeout=_TIMEOUT_S)).cancelled
