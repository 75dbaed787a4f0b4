"""Typed client of BufferService: the ledger of tasks, leases, batches and recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal.clients.base import LONG_POLL_MARGIN_S, to_duration
from areal.clients.buffer_reader import MAX_TASKS_PER_CALL
from areal.clients.buffer_trainer import TrainerBufferClient
from areal.clients.hand_ins import HandIns
from areal.clients.submission_trace import submitting
from areal.errors import InvalidInput
from areal.protocol.leases import (
    DeadLetter,
    GroupManifest,
    Lease,
    Registration,
    ReturnCause,
    TakeResult,
    TakeState,
    TaskRecord,
    record_from_pb,
)
from areal.protocol.trajectories import (
    PURPOSE_TO_PB,
    STATE_FROM_PB,
    pack_group,
    task_from_pb,
    task_to_pb,
)
from areal.security import Security
from areal.types import Purpose, Task, TaskState, TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb

__all__ = [
    "BufferClient",
    "DeadLetter",
    "GroupManifest",
    "Lease",
    "Registration",
    "ReturnCause",
    "TakeResult",
    "TakeState",
    "TaskRecord",
]

# A message takes 128 MiB; a journal comes back in one that may hold 32 MiB of other leases.
_MAX_PART_BYTES = 90 * 1024 * 1024


class BufferClient(TrainerBufferClient):
    """All methods raise the class the ledger raised, Unavailable, or WaitTimeout.

    `retry_for`: seconds to retry while the ledger is away or silent; idempotent methods have it.
    """

    def __init__(self, address: str, security: Security | None = None) -> None:
        super().__init__(address, security)
        self._hand_ins = HandIns(
            lambda worker_id: pb.CompleteTasksRequest(worker_id=worker_id), self._complete_tasks
        )
        self._returns = HandIns(
            # The ledger knows a worker by its lease.
            lambda _: pb.ReturnTasksRequest(),
            self._return_tasks,
        )

    async def close(self) -> None:
        """Ends hand-ins under way, closes the channel."""
        await self._hand_ins.close()
        await self._returns.close()
        await super().close()

    # -- submitting ---------------------------------------------------------------------------

    async def submit_tasks(
        self,
        tasks: Sequence[Task],
        *,
        incarnation: int = 0,
        seal: bool = False,
        timeout: float = 60.0,
        retry_for: float = 30.0,
    ) -> list[bool]:
        """Queues tasks, in this order.

        Args:
            tasks: Any number; sent 10,000 at a time.
            incarnation: Of the submitting trainer; 0 for everyone else.
            seal: No more train tasks will come.
            timeout: Seconds for one try of one call.
            retry_for: Seconds to retry while the ledger is away or silent.

        Returns:
            One flag per task; False: its id or dataset position was known already, possibly
            from an earlier try of this very call.

        Raises:
            InvalidInput: A task is malformed; nothing of its call was queued.
            CapacityExceeded: The ledger is near its memory limit and has enough to do.
        """
        accepted: list[bool] = []
        starts = range(0, max(1, len(tasks)), MAX_TASKS_PER_CALL)
        with submitting(tasks, accepted) as traced:
            for start in starts:
                chunk = traced[start : start + MAX_TASKS_PER_CALL]
                request = pb.BufferServiceSubmitTasksRequest(
                    tasks=[task_to_pb(task) for task in chunk],
                    incarnation=incarnation,
                    seal=seal and start == starts[-1],
                )
                response = await self._call(
                    self._stub.SubmitTasks, request, timeout=timeout, retry_for=retry_for
                )
                accepted += [result.accepted for result in response.results]
        return accepted

    async def cancel_tasks(
        self,
        task_ids: Sequence[str] = (),
        *,
        all_of_purpose: Purpose | None = None,
        reason: str = "",
        incarnation: int = 0,
        timeout: float = 60.0,
        retry_for: float = 30.0,
    ) -> int:
        """Cancels named tasks, or all of a purpose, that are queued, running or completed.

        Batched tasks are the trainer's already and stay.

        Returns:
            How many were cancelled.
        """
        request = pb.BufferServiceCancelTasksRequest(
            task_ids=task_ids, reason=reason, incarnation=incarnation
        )
        if all_of_purpose is not None:
            request.all_of_purpose = PURPOSE_TO_PB[all_of_purpose]
        response = await self._call(
            self._stub.CancelTasks, request, timeout=timeout, retry_for=retry_for
        )
        return response.cancelled

    # -- working ------------------------------------------------------------------------------

    async def lease_tasks(
        self, worker_id: str, max_tasks: int, max_wait_s: float, *, boot: int = 0
    ) -> tuple[list[Lease], str]:
        """Leases up to max_tasks, waiting up to max_wait_s (at most 30 s) for the first.

        Not retried here: call it in a loop.

        Args:
            worker_id: Who works on them.
            max_tasks: At most so many.
            max_wait_s: For the first.
            boot: Of a worker whose id outlives its process: larger with each start. The first
                call of a newer life returns the leases of the lives before.

        Returns:
            The leases, and when there are none the reason.

        Raises:
            LeaseLost: A newer life of this worker has begun.
        """
        request = pb.LeaseTasksRequest(
            worker_id=worker_id, max_tasks=max_tasks, max_wait=to_duration(max_wait_s), boot=boot
        )
        response = await self._call(
            self._stub.LeaseTasks, request, timeout=max_wait_s + LONG_POLL_MARGIN_S
        )
        leases = [
            Lease(
                task=task_from_pb(lease.task),
                token=lease.token,
                policy_version=lease.policy_version,
                time_to_live_s=lease.time_to_live.ToMilliseconds() / 1000,
                partial=lease.partial,
                failed_servers=tuple(lease.failed_servers),
                queued_time=lease.queued_time.ToMilliseconds() / 1000,
            )
            for lease in response.leases
        ]
        return leases, response.reason

    async def renew_leases(
        self,
        worker_id: str,
        leases: Sequence[tuple[str, int]],
        *,
        timeout: float = 10.0,
        retry_for: float = 10.0,
    ) -> set[str]:
        """Extends leases given as (task_id, token); returns the ids that are lost: stop them."""
        request = pb.RenewLeasesRequest(
            worker_id=worker_id,
            leases=[pb.LeaseRef(task_id=task_id, token=token) for task_id, token in leases],
        )
        response = await self._call(
            self._stub.RenewLeases, request, timeout=timeout, retry_for=retry_for
        )
        return set(response.lost_task_ids)

    async def complete_task(
        self,
        task_id: str,
        token: int,
        group: TrajectoryGroup,
        worker_id: str,
    ) -> bool:
        """Hands in a finished group; True: recorded now, False: it had been recorded before.

        Calls at the same time share messages; tried again for a minute while the ledger is away.

        Raises:
            LeaseLost: The task was re-leased or has ended; drop the work.
            InvalidInput: The group is malformed, too large, or holds a token sampled below the
                lease's version; return the task.
            CapacityExceeded: Memory is near its limit; keep the lease and try again later.
        """

        def add(request: pb.CompleteTasksRequest) -> int:
            packed = pack_group(group, self._codec)
            _check_size(f"group {task_id!r}", len(packed))
            lease = request.completions.add(group=packed).lease
            lease.task_id, lease.token = task_id, token
            return len(packed)

        return (await self._hand_ins.offer(worker_id, add)).recorded

    async def _complete_tasks(
        self, request: pb.CompleteTasksRequest
    ) -> Sequence[pb.CompletionResult]:
        response = await self._call(self._stub.CompleteTasks, request, timeout=60.0, retry_for=60.0)
        return response.results

    async def reject_task(
        self,
        task_id: str,
        token: int,
        reason: str = "",
        *,
        timeout: float = 30.0,
        retry_for: float = 30.0,
    ) -> None:
        """The workflow chose to drop the task."""
        request = pb.RejectTaskRequest(
            lease=pb.LeaseRef(task_id=task_id, token=token), reason=reason
        )
        await self._call(self._stub.RejectTask, request, timeout=timeout, retry_for=retry_for)

    async def return_task(
        self,
        task_id: str,
        token: int,
        cause: ReturnCause,
        *,
        detail: str = "",
        traceback: str = "",
        partial: Callable[[], bytes] = bytes,
        failed_server: str = "",
        site: str = "",
    ) -> TaskState:
        """Gives a lease back.

        Calls at the same time share messages, in their order; tried again for half a minute while
        the ledger is away.

        Args:
            task_id: The leased task.
            token: Its lease's token.
            cause: Decides which limit counts.
            detail: One line for people.
            traceback: Where, for the dead-letter list.
            partial: Gives the journal for the next attempt when its message is made, so that those
                of many are encoded while the ledger takes the ones before; refused above
                max_group_bytes.
            failed_server: The inference server that failed, which the next attempt avoids.
            site: Of a workflow error: what all tasks that fail alike share, e.g.
                "KeyError at recipe.py:41"; empty: the detail without the row's values.

        Returns:
            QUEUED, or DEAD_LETTERED when a limit was reached.

        Raises:
            LeaseLost: The task was re-leased or has ended.
            InvalidInput: The journal is too large, or another field malformed.
        """

        def add(request: pb.ReturnTasksRequest) -> int:
            journal = partial()
            _check_size(f"journal of task {task_id!r}", len(journal))
            request.returns.add(
                lease=pb.LeaseRef(task_id=task_id, token=token),
                cause=pb.ReturnCause.Value(f"RETURN_CAUSE_{cause.name}"),
                detail=detail,
                traceback=traceback,
                partial=journal,
                failed_server=failed_server,
                site=site,
            )
            # The short fields count too, so that a call holds no more than it may.
            return 256 + len(journal) + len(traceback)

        return STATE_FROM_PB[(await self._returns.offer("", add)).state]

    async def _return_tasks(self, request: pb.ReturnTasksRequest) -> Sequence[pb.ReturnResult]:
        response = await self._call(self._stub.ReturnTasks, request, timeout=30.0, retry_for=30.0)
        return response.results

    # -- looking ------------------------------------------------------------------------------

    async def get_stats(
        self, *, timeout: float = 10.0, retry_for: float = 0.0
    ) -> pb.GetStatsResponse:
        """Counters and gauges of the ledger, as the message."""
        return await self._call(
            self._stub.GetStats, pb.GetStatsRequest(), timeout=timeout, retry_for=retry_for
        )

    async def list_dead_letters(
        self, limit: int = 100, *, timeout: float = 30.0, retry_for: float = 0.0
    ) -> list[DeadLetter]:
        response = await self._call(
            self._stub.ListDeadLetters,
            pb.ListDeadLettersRequest(limit=limit),
            timeout=timeout,
            retry_for=retry_for,
        )
        return [
            DeadLetter(record_from_pb(letter.record), letter.cause, letter.traceback)
            for letter in response.dead_letters
        ]

    async def retry_dead_letters(
        self, task_ids: Sequence[str] = (), *, timeout: float = 60.0, retry_for: float = 0.0
    ) -> int:
        """Queues dead letters (empty: all) again with fresh attempts; returns how many."""
        response = await self._call(
            self._stub.RetryDeadLetters,
            pb.RetryDeadLettersRequest(task_ids=task_ids),
            timeout=timeout,
            retry_for=retry_for,
        )
        return response.retried

    async def drop_dead_letters(
        self, task_ids: Sequence[str] = (), *, timeout: float = 60.0, retry_for: float = 0.0
    ) -> int:
        """Takes dead letters (empty: all) off the list for good; returns how many."""
        response = await self._call(
            self._stub.DropDeadLetters,
            pb.DropDeadLettersRequest(task_ids=task_ids),
            timeout=timeout,
            retry_for=retry_for,
        )
        return response.dropped

    # -- recipes ------------------------------------------------------------------------------

    async def put_recipe(
        self, file_name: str, source: bytes, *, timeout: float = 30.0, retry_for: float = 60.0
    ) -> str:
        """Stores a recipe's source; returns its digest (sha256 hex)."""
        response = await self._call(
            self._stub.PutRecipe,
            pb.PutRecipeRequest(file_name=file_name, source=source),
            timeout=timeout,
            retry_for=retry_for,
        )
        return response.digest

    async def get_recipe(
        self, digest: str, *, timeout: float = 30.0, retry_for: float = 60.0
    ) -> tuple[str, bytes]:
        """Returns (file_name, source); NotFound for an unknown digest."""
        response = await self._call(
            self._stub.GetRecipe,
            pb.GetRecipeRequest(digest=digest),
            timeout=timeout,
            retry_for=retry_for,
        )
        return response.file_name, response.source


def _check_size(what: str, size: int) -> None:
    """Refuses what gRPC would refuse as if the ledger were full, and so retried without success."""
    if size > _MAX_PART_BYTES:
        raise InvalidInput(f"{what} has {size} bytes: at most {_MAX_PART_BYTES} fit a message")
