"""A worker's calls of BufferService: lease tasks, and end each lease in one of three ways."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal.chassis.logging import get_logger
from areal.clients.base import to_duration
from areal.clients.buffer.batching import Batching
from areal.clients.buffer.connection import BufferConnection, Role
from areal.errors import InvalidInput
from areal.protocol import routes
from areal.protocol.leases import Lease, Return
from areal.protocol.trajectories import STATE_FROM_PB, GroupCodec, pack_group, task_from_pb
from areal.types import TaskState, TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb

# A message takes 128 MiB; a journal comes back in one that may hold 32 MiB of other leases.
_MAX_PART_BYTES = 90 * 1024 * 1024
_LARGE = 1 << 17
"""Tokens of a group from which it is packed in a thread: the event loop serves other sessions."""
_TOKEN_BYTES = 17
"""Bytes of a token without routes: its id, logprob, versions and mask."""


class BufferWorker(Role):
    """A worker's calls. Completions and returns made at the same time share messages."""

    def __init__(self, connection: BufferConnection) -> None:
        super().__init__(connection)
        self._codec = GroupCodec()
        self._told_routes = False
        self._completions = Batching(
            lambda worker_id: pb.CompleteTasksRequest(worker_id=worker_id), self._complete
        )
        # The ledger knows a worker by its lease.
        self._returns = Batching(lambda _: pb.ReturnTasksRequest(), self._return)

    async def close(self) -> None:
        """Ends calls under way; the connection stays open."""
        await self._completions.close()
        await self._returns.close()

    async def lease_tasks(
        self, worker_id: str, max_tasks: int, max_wait_s: float, *, boot: int = 0
    ) -> tuple[list[Lease], str]:
        """Leases up to max_tasks, waiting up to max_wait_s (at most 30 s) for the first.

        Not retried here: call it in a loop.

        Args:
            worker_id: The worker that runs them.
            max_tasks: Maximum number of leases.
            max_wait_s: Longest wait for the first.
            boot: The incarnation number of a worker whose id outlives its process; larger with each
                start. The first call of a newer incarnation returns the leases of the earlier ones.

        Returns:
            The leases; if there are none, the reason.

        Raises:
            LeaseLost: A newer incarnation of this worker has started.
        """
        request = pb.LeaseTasksRequest(
            worker_id=worker_id, max_tasks=max_tasks, max_wait=to_duration(max_wait_s), boot=boot
        )
        response = await self._call(self._stub.LeaseTasks, request, wait_s=max_wait_s)
        leases = [
            Lease(
                task=task_from_pb(lease.task),
                token=lease.token,
                policy_version=lease.policy_version,
                time_to_live_s=lease.time_to_live.ToMilliseconds() / 1000,
                partial=lease.partial,
                failed_servers=tuple(lease.failed_servers),
                queued_time=lease.queued_time.ToMilliseconds() / 1000,
                attempts=lease.attempts,
            )
            for lease in response.leases
        ]
        return leases, response.reason

    async def renew_leases(self, worker_id: str, leases: Sequence[tuple[str, int]]) -> set[str]:
        """Extends leases given as (task_id, token); returns the ids that are lost: stop them."""
        request = pb.RenewLeasesRequest(
            worker_id=worker_id,
            leases=[pb.LeaseRef(task_id=task_id, token=token) for task_id, token in leases],
        )
        return set((await self._call(self._stub.RenewLeases, request)).lost_task_ids)

    async def complete_task(
        self,
        task_id: str,
        token: int,
        group: TrajectoryGroup,
        worker_id: str,
    ) -> bool:
        """Completes a task with its group; returns False if it had been recorded before.

        Calls at the same time share messages. They are retried for a minute while the ledger is
        down.

        Raises:
            LeaseLost: The task was re-leased or has ended; drop the work.
            InvalidInput: The group is malformed, too large, or has a token from a version
                older than the lease requires; return the task.
            CapacityExceeded: Memory is near its limit; keep the lease and try again later.
        """
        self._tell_routes(task_id, group)
        large = await asyncio.to_thread(pack_group, group) if _is_large(group) else b""

        def add(request: pb.CompleteTasksRequest) -> int:
            packed = large or pack_group(group, self._codec)
            _check_size(f"group {task_id!r}", len(packed))
            lease = request.completions.add(group=packed).lease
            lease.task_id, lease.token = task_id, token
            return len(packed)

        return (await self._completions.offer(worker_id, add)).recorded

    def _tell_routes(self, task_id: str, group: TrajectoryGroup) -> None:
        """Says once that a group is sent without its routes."""
        size = routes.bytes_of(group.trajectories)
        if size > routes.MAX_BYTES and not self._told_routes:
            self._told_routes = True
            get_logger(__name__).warning(
                "routes_missing",
                cause=f"routes of the group of task {task_id!r} take {size >> 20} MiB, more than "
                f"{routes.MAX_BYTES >> 20}, so it is trained on with the trainer's own choice of "
                "experts, as are all such groups; expected a smaller gconfig.n_samples or "
                "gconfig.max_new_tokens, or rollout.router_replay=false",
            )

    async def _complete(self, request: pb.CompleteTasksRequest) -> Sequence[pb.CompletionResult]:
        return (await self._call(self._stub.CompleteTasks, request)).results

    async def reject_task(
        self, task_id: str, token: int, reason: str = "", group: TrajectoryGroup | None = None
    ) -> None:
        """Rejects a task that its workflow chose to drop.

        Raises:
            LeaseLost: The task was re-leased or has ended.
            InvalidInput: The group is malformed or too large; reject the task without it.
        """
        request = pb.RejectTaskRequest(
            lease=pb.LeaseRef(task_id=task_id, token=token), reason=reason
        )
        if group is not None:
            if _is_large(group):
                request.group = await asyncio.to_thread(pack_group, group)
            else:
                request.group = pack_group(group, self._codec)
            _check_size(f"group {task_id!r}", len(request.group))
        await self._call(self._stub.RejectTask, request)

    async def return_task(self, task_id: str, token: int, end: Return) -> TaskState:
        """Returns a lease: its task is queued again, or dead-lettered.

        Calls at the same time share messages, in their order. They are retried for half a minute
        while the ledger is down.

        Returns:
            QUEUED, or DEAD_LETTERED when a limit was reached.

        Raises:
            LeaseLost: The task was re-leased or has ended.
            InvalidInput: The journal is too large, or another field malformed.
        """

        def add(request: pb.ReturnTasksRequest) -> int:
            journal = end.partial()
            _check_size(f"journal of task {task_id!r}", len(journal))
            request.returns.add(
                lease=pb.LeaseRef(task_id=task_id, token=token),
                cause=pb.ReturnCause.Value(f"RETURN_CAUSE_{end.cause.name}"),
                detail=end.detail,
                traceback=end.traceback,
                partial=journal,
                failed_server=end.failed_server,
                site=end.site,
            )
            # The short fields count too, so that a call holds no more than it may.
            return 256 + len(journal) + len(end.traceback)

        return STATE_FROM_PB[(await self._returns.offer("", add)).state]

    async def _return(self, request: pb.ReturnTasksRequest) -> Sequence[pb.ReturnResult]:
        return (await self._call(self._stub.ReturnTasks, request)).results


def _is_large(group: TrajectoryGroup) -> bool:
    tokens = sum(len(each.input_ids) for each in group.trajectories)
    return tokens + routes.bytes_of(group.trajectories) // _TOKEN_BYTES >= _LARGE


def _check_size(what: str, size: int) -> None:
    """Refuses what gRPC would refuse as if the ledger were full, and so retried without success."""
    if size > _MAX_PART_BYTES:
        raise InvalidInput(f"{what} has {size} bytes: at most {_MAX_PART_BYTES} fit in a message")
