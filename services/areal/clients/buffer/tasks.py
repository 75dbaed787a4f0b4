"""Submits, cancels, reads and awaits tasks; reads statistics; stores recipes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from areal.chassis import tracing
from areal.clients.base import to_duration
from areal.clients.buffer.connection import Role
from areal.errors import CapacityExceeded
from areal.protocol.leases import LedgerStats, TaskRecord, record_from_pb, stats_from_pb
from areal.protocol.trajectories import PURPOSE_FROM_PB, PURPOSE_TO_PB, task_to_pb
from areal.types import Purpose, Task
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2

MAX_TASKS_PER_CALL = 10_000
"""Tasks, or ids of tasks, of one call: the service refuses more."""


class BufferTasks(Role):
    """A submitter's calls. `submit` and `read` pass messages on without decoding them."""

    async def submit_tasks(
        self, tasks: Sequence[Task], *, incarnation: int = 0, seal: bool = False
    ) -> list[bool]:
        """Queues tasks, in this order.

        Args:
            tasks: Any number; sent 10,000 at a time.
            incarnation: The submitting trainer's; 0 for all other callers.
            seal: No more train tasks will come.

        Returns:
            One flag per task; False: its id or dataset position was known already, possibly
            from an earlier try of this very call.

        Raises:
            InvalidInput: A task is malformed; nothing of its call was queued.
            CapacityExceeded: The ledger is near its memory limit and has enough to do.
        """
        return await self.submit(
            [task_to_pb(task) for task in tasks], incarnation=incarnation, seal=seal
        )

    async def submit(
        self, tasks: Sequence[trajectory_pb2.Task], *, incarnation: int = 0, seal: bool = False
    ) -> list[bool]:
        """Like `submit_tasks`, for encoded tasks; traced ones get their span as parent."""
        accepted: list[bool] = []
        starts = range(0, max(1, len(tasks)), MAX_TASKS_PER_CALL)
        with _submitting(tasks, accepted):
            for start in starts:
                request = pb.BufferServiceSubmitTasksRequest(
                    tasks=tasks[start : start + MAX_TASKS_PER_CALL],
                    incarnation=incarnation,
                    seal=seal and start == starts[-1],
                )
                response = await self._call(self._stub.SubmitTasks, request)
                accepted += [result.accepted for result in response.results]
        return accepted

    async def cancel_tasks(
        self,
        task_ids: Sequence[str] = (),
        *,
        all_of_purpose: Purpose | None = None,
        reason: str = "",
        incarnation: int = 0,
    ) -> int:
        """Cancels named tasks, or all of a purpose, that are queued, running or completed.

        Batched tasks belong to the trainer and are not cancelled.

        Returns:
            How many were cancelled.
        """
        request = pb.BufferServiceCancelTasksRequest(
            task_ids=task_ids, reason=reason, incarnation=incarnation
        )
        if all_of_purpose is not None:
            request.all_of_purpose = PURPOSE_TO_PB[all_of_purpose]
        return (await self._call(self._stub.CancelTasks, request)).cancelled

    async def get_tasks(
        self, task_ids: Sequence[str], *, include_groups: bool = False
    ) -> list[TaskRecord]:
        """Reads records in the order asked; unknown ids are left out.

        Raises:
            CapacityExceeded: The records do not fit in one message; `read_tasks` has no such limit.
        """
        return [record_from_pb(each) for each in await self.get(task_ids, include_groups)]

    async def get(
        self, task_ids: Sequence[str], include_groups: bool
    ) -> Sequence[trajectory_pb2.TaskRecord]:
        """Like `get_tasks`, but returns undecoded messages."""
        page = await self._page(task_ids, include_groups)
        if page.looked_up < len(task_ids):
            raise CapacityExceeded(
                f"task_ids: the first {page.looked_up} of {len(task_ids)} fill a message; "
                "ask for fewer at once"
            )
        return page.records

    async def read_tasks(
        self, task_ids: Sequence[str], *, include_groups: bool = False
    ) -> AsyncIterator[TaskRecord]:
        """Yields any number of records in the order asked; holds one message of them at a time.

        Args:
            task_ids: Unknown ones are left out.
            include_groups: Include the trajectories that are still kept.
        """
        async for record in self.read(task_ids, include_groups):
            yield record_from_pb(record)

    async def read(
        self, task_ids: Sequence[str], include_groups: bool
    ) -> AsyncIterator[trajectory_pb2.TaskRecord]:
        """Like `read_tasks`, but yields undecoded messages."""
        at = 0
        while at < len(task_ids):
            page = await self._page(task_ids[at : at + MAX_TASKS_PER_CALL], include_groups)
            at += page.looked_up
            for record in page.records:
                yield record

    async def _page(
        self, task_ids: Sequence[str], include_groups: bool
    ) -> pb.BufferServiceGetTasksResponse:
        request = pb.BufferServiceGetTasksRequest(task_ids=task_ids, include_groups=include_groups)
        return await self._call(self._stub.GetTasks, request)

    async def wait_tasks(
        self, task_ids: Sequence[str], max_wait_s: float, *, incarnation: int = 0
    ) -> list[str]:
        """Waits until one of the tasks has ended (train: completed counts).

        Args:
            task_ids: Known ids, at most 10,000; NotFound otherwise.
            max_wait_s: The service waits at most 30 s a call.
            incarnation: The waiting trainer's; it gets WorkflowError once its run has been stopped.

        Returns:
            The tasks that have ended; empty if the wait ended first.
        """
        request = pb.WaitTasksRequest(
            task_ids=task_ids, max_wait=to_duration(max_wait_s), incarnation=incarnation
        )
        return list((await self._call(self._stub.WaitTasks, request, wait_s=max_wait_s)).task_ids)

    async def get_stats(self) -> LedgerStats:
        """Returns counters and gauges of the ledger."""
        return stats_from_pb(await self._call(self._stub.GetStats, pb.GetStatsRequest()))


@contextmanager
def _submitting(tasks: Sequence[trajectory_pb2.Task], accepted: Sequence[bool]) -> Iterator[None]:
    """A span `submit` for each task, until the ledger has answered for all.

    Args:
        tasks: With a traceparent of its own, a task continues with that trace; else with the
            current one; else it begins one. Each gets its span as traceparent: the worker that
            leases it continues from there.
        accepted: The ledger's answers, filled in by the block.
    """
    if not tracing.enabled():
        yield
        return
    spans = [
        tracing.start(
            "submit",
            {
                "areal.task_id": task.task_id,
                "areal.purpose": PURPOSE_FROM_PB.get(task.purpose, ""),
            },
            parent=task.traceparent or None,
            root=True,
        )
        for task in tasks
    ]
    for task, span in zip(tasks, spans, strict=True):
        task.traceparent = tracing.traceparent(span) or task.traceparent
    try:
        yield
    finally:
        for number, span in enumerate(spans):
            if span is not None:
                if number < len(accepted):
                    span.set_attribute("areal.accepted", accepted[number])
                span.end()


class BufferRecipes(Role):
    """Stores recipes for the workers, and finds them."""

    async def put_recipe(self, file_name: str, source: bytes) -> str:
        """Stores a recipe's source; returns its digest (sha256 hex)."""
        request = pb.PutRecipeRequest(file_name=file_name, source=source)
        return (await self._call(self._stub.PutRecipe, request)).digest

    async def get_recipe(self, digest: str) -> tuple[str, bytes]:
        """Returns (file_name, source); NotFound for an unknown digest."""
        response = await self._call(self._stub.GetRecipe, pb.GetRecipeRequest(digest=digest))
        return response.file_name, response.source
