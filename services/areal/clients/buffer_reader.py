"""What everybody asks of BufferService about tasks: their records, and when they have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from areal.clients.base import LONG_POLL_MARGIN_S, Client, to_duration
from areal.errors import CapacityExceeded
from areal.protocol.leases import TaskRecord, record_from_pb
from areal.security import Security
from areal.v1 import buffer_service_pb2 as pb
from areal.v1.buffer_service_pb2_grpc import BufferServiceStub

MAX_TASKS_PER_CALL = 10_000
"""Tasks, or ids of tasks, of one call: the service refuses more."""


class TaskReader(Client):
    """The calls that change nothing."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        super().__init__(address, security)
        self._stub = BufferServiceStub(self._channel)

    async def get_tasks(
        self,
        task_ids: Sequence[str],
        *,
        include_groups: bool = False,
        timeout: float = 30.0,
        retry_for: float = 30.0,
    ) -> list[TaskRecord]:
        """Reads records in the order asked; unknown ids are left out.

        Raises:
            CapacityExceeded: More than one message holds; `read_tasks` has no such limit.
        """
        page = await self._page(task_ids, include_groups, timeout, retry_for)
        if page.looked_up < len(task_ids):
            raise CapacityExceeded(
                f"task_ids: the first {page.looked_up} of {len(task_ids)} fill a message; "
                "ask for fewer at once"
            )
        return [record_from_pb(record) for record in page.records]

    async def read_tasks(
        self,
        task_ids: Sequence[str],
        *,
        include_groups: bool = False,
        timeout: float = 30.0,
        retry_for: float = 30.0,
    ) -> AsyncIterator[TaskRecord]:
        """Yields records in the order asked, however many; one message of them is held at a time.

        Args:
            task_ids: Unknown ones are left out.
            include_groups: With the trajectories that are still kept.
            timeout: Seconds for one try of one message.
            retry_for: Seconds to retry each while the ledger is away or silent.
        """
        at = 0
        while at < len(task_ids):
            some = task_ids[at : at + MAX_TASKS_PER_CALL]
            page = await self._page(some, include_groups, timeout, retry_for)
            at += page.looked_up
            for record in page.records:
                yield record_from_pb(record)

    async def _page(
        self, task_ids: Sequence[str], include_groups: bool, timeout: float, retry_for: float
    ) -> pb.BufferServiceGetTasksResponse:
        request = pb.BufferServiceGetTasksRequest(task_ids=task_ids, include_groups=include_groups)
        return await self._call(self._stub.GetTasks, request, timeout=timeout, retry_for=retry_for)

    async def wait_tasks(
        self,
        task_ids: Sequence[str],
        max_wait_s: float,
        *,
        incarnation: int = 0,
        retry_for: float = 30.0,
    ) -> list[str]:
        """Waits until one of the tasks has ended (train: completed counts).

        Args:
            task_ids: Known ids, at most 10,000; NotFound otherwise.
            max_wait_s: The service waits at most 30 s a call.
            incarnation: Of the trainer that waits: WorkflowError once its run has been stopped.
            retry_for: Seconds to retry while the ledger is away or silent.

        Returns:
            Those that have ended; empty when the wait passed first.
        """
        request = pb.WaitTasksRequest(
            task_ids=task_ids, max_wait=to_duration(max_wait_s), incarnation=incarnation
        )
        response = await self._call(
            self._stub.WaitTasks,
            request,
            timeout=max_wait_s + LONG_POLL_MARGIN_S,
            retry_for=retry_for,
        )
        return list(response.task_ids)
