"""BufferService over gRPC: convert, call the core, convert."""

# ruff: noqa: N802 - the methods are named as in the contract

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from areal.errors import ArealError, InvalidInput, NotFound, name_of
from areal.protocol.leases import TakeState, stats_to_pb, take_to_pb
from areal.protocol.trajectories import PURPOSE_FROM_PB, STATE_TO_PB, GroupCodec
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal.v1.buffer_service_pb2_grpc import BufferServiceServicer
from areal_buffer import validation as check
from areal_buffer.config import BufferConfig
from areal_buffer.ledger import Ledger
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import Completion, MemoryGauge
from areal_buffer.redis_store import RedisStore
from areal_buffer.sessions import SessionStore, check_known, check_open, check_update

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_RESPONSE_BYTES = 96 * 1024 * 1024
_MAX_DEAD_LETTERS = 1000


class BufferService(BufferServiceServicer):
    """One method per RPC."""

    def __init__(
        self,
        ledger: Ledger,
        store: RedisStore,
        sessions: SessionStore,
        memory: MemoryGauge,
        metrics: BufferMetrics,
        config: BufferConfig,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._sessions = sessions
        self._memory = memory
        self._metrics = metrics
        self._config = config
        self._codec = GroupCodec()

    async def SubmitTasks(
        self, request: pb.BufferServiceSubmitTasksRequest, context: Context
    ) -> pb.BufferServiceSubmitTasksResponse:
        """Validates all, then queues them in order."""
        if len(request.tasks) > check.MAX_TASKS_PER_CALL:
            raise InvalidInput(
                f"tasks: got {len(request.tasks)}, at most {check.MAX_TASKS_PER_CALL} a call"
            )
        check.check_number(request.incarnation, "incarnation", 0)
        tasks = [check.check_task(task) for task in request.tasks]
        if not request.incarnation and (placed := [t for t in tasks if t.position is not None]):
            # Each epoch has a map of its positions, for good.
            raise InvalidInput(
                f"task {placed[0].task_id!r} position {placed[0].position}: only a trainer's "
                "tasks have one (incarnation 0)"
            )
        accepted = await self._store.submit(
            tasks,
            incarnation=request.incarnation,
            seal=request.seal,
            limit=self._memory.limit_bytes,
        )
        await self._store.recipes_used({task.workflow.recipe_digest for task in request.tasks})
        return pb.BufferServiceSubmitTasksResponse(
            results=[
                trajectory_pb2.SubmitResult(task_id=task.task_id, accepted=flag)
                for task, flag in zip(tasks, accepted, strict=True)
            ]
        )

    async def LeaseTasks(
        self, request: pb.LeaseTasksRequest, context: Context
    ) -> pb.LeaseTasksResponse:
        worker = check.check_worker_id(request.worker_id)
        if not 1 <= request.max_tasks <= check.MAX_LEASES_PER_CALL:
            raise InvalidInput(
                f"max_tasks {request.max_tasks}: expected 1 to {check.MAX_LEASES_PER_CALL}"
            )
        check.check_number(request.boot, "boot", 0)
        return await self._ledger.lease_tasks(
            worker, request.max_tasks, request.max_wait.ToMilliseconds() / 1000, request.boot
        )

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Context
    ) -> pb.RenewLeasesResponse:
        worker = check.check_worker_id(request.worker_id)
        if len(request.leases) > check.MAX_TASKS_PER_CALL:
            raise InvalidInput(
                f"leases: got {len(request.leases)}, at most {check.MAX_TASKS_PER_CALL} a call"
            )
        leases = [
            (check.check_task_id(each.task_id), check.check_number(each.token, "token", 0))
            for each in request.leases
        ]
        return pb.RenewLeasesResponse(lost_task_ids=await self._store.renew(worker, leases))

    async def CompleteTasks(
        self, request: pb.CompleteTasksRequest, context: Context
    ) -> pb.CompleteTasksResponse:
        """Validates and records groups, each by itself."""
        if (got := len(request.completions)) > check.MAX_TASKS_PER_CALL:
            raise InvalidInput(f"completions: got {got}, at most {check.MAX_TASKS_PER_CALL} a call")
        limit = self._config.max_group_bytes
        checked = [check.check_completion(each, limit, self._codec) for each in request.completions]
        groups = [each for each in checked if isinstance(each, Completion)]
        recorded = iter(await self._ledger.complete_tasks(groups))
        response = pb.CompleteTasksResponse()
        for each in checked:
            result = next(recorded) if isinstance(each, Completion) else each
            if isinstance(result, ArealError):
                response.results.add(error=name_of(result), message=check.line(str(result)))
                continue
            response.results.add(recorded=result)
            if result and isinstance(each, Completion):
                self._metrics.group_completed(each)
        return response

    async def RejectTask(
        self, request: pb.RejectTaskRequest, context: Context
    ) -> pb.RejectTaskResponse:
        """Ends a task by its workflow's choice."""
        task_id, token = self._lease(request.lease)
        if request.group:
            completion = pb.Completion(lease=request.lease, group=request.group)
            check.check_group(completion, self._config.max_group_bytes, self._codec)
        await self._store.reject(task_id, token, check.reason(request.reason), request.group)
        return pb.RejectTaskResponse()

    async def ReturnTasks(
        self, request: pb.ReturnTasksRequest, context: Context
    ) -> pb.ReturnTasksResponse:
        """Validates and returns leases, each by itself."""
        if (got := len(request.returns)) > check.MAX_TASKS_PER_CALL:
            raise InvalidInput(f"returns: got {got}, at most {check.MAX_TASKS_PER_CALL} a call")
        most = self._config.max_group_bytes
        checked = [check.check_return(each, most) for each in request.returns]
        ends = [each for each in checked if isinstance(each, pb.Return)]
        states = iter(await self._store.return_leases(ends, limit=self._memory.limit_bytes))
        response = pb.ReturnTasksResponse()
        for each in checked:
            result = next(states) if isinstance(each, pb.Return) else each
            if isinstance(result, ArealError):
                response.results.add(error=name_of(result), message=check.line(str(result)))
            else:
                response.results.add(state=STATE_TO_PB[result])
        return response

    async def CancelTasks(
        self, request: pb.BufferServiceCancelTasksRequest, context: Context
    ) -> pb.BufferServiceCancelTasksResponse:
        """Cancels by name or by purpose."""
        purpose = None
        if request.all_of_purpose:
            if request.task_ids:
                raise InvalidInput("task_ids and all_of_purpose: expected only one of them")
            purpose = PURPOSE_FROM_PB.get(request.all_of_purpose)
            if purpose is None:
                raise InvalidInput(
                    f"all_of_purpose {request.all_of_purpose}: expected TRAIN or SERVE"
                )
        cancelled = await self._store.cancel(
            check.check_task_ids(request.task_ids),
            purpose,
            reason=check.reason(request.reason),
            incarnation=check.check_number(request.incarnation, "incarnation", 0),
        )
        return pb.BufferServiceCancelTasksResponse(cancelled=cancelled)

    async def GetTasks(
        self, request: pb.BufferServiceGetTasksRequest, context: Context
    ) -> pb.BufferServiceGetTasksResponse:
        """Reads records, as many as a message holds; a result that was read is released later."""
        ids = check.check_task_ids(request.task_ids)
        response = pb.BufferServiceGetTasksResponse(looked_up=len(ids))
        delivered: list[str] = []
        size = at = 0
        async for record in self._store.read(ids, groups=request.include_groups):
            size += record.ByteSize()
            if response.records and size > _MAX_RESPONSE_BYTES:
                response.looked_up = at
                break
            response.records.append(record)
            at = ids.index(record.task.task_id, at) + 1
            if record.HasField("group") and record.state == trajectory_pb2.TASK_STATE_DELIVERED:
                delivered.append(record.task.task_id)
        await self._store.mark_read(delivered)
        return response

    async def WaitTasks(
        self, request: pb.WaitTasksRequest, context: Context
    ) -> pb.WaitTasksResponse:
        ids = check.check_task_ids(request.task_ids, at_least=1)
        ended = await self._ledger.wait_tasks(
            ids,
            request.max_wait.ToMilliseconds() / 1000,
            check.check_number(request.incarnation, "incarnation", 0),
        )
        return pb.WaitTasksResponse(task_ids=ended)

    async def RegisterTrainer(
        self, request: pb.RegisterTrainerRequest, context: Context
    ) -> pb.RegisterTrainerResponse:
        trainer = await self._store.register_trainer(
            check.check_step(request.resume_step, "resume_step", 0),
            check.check_number(request.batch_size, "batch_size", 1),
            check.check_number(request.max_head_offpolicyness, "max_head_offpolicyness", 0),
            check.check_number(request.max_concurrent_rollouts, "max_concurrent_rollouts", 1),
            check.check_digest(request.recipe_digest),
        )
        return pb.RegisterTrainerResponse(
            retried=trainer.retried,
            incarnation=trainer.incarnation,
            last_taken_step=trainer.last_taken_step,
            last_committed_step=trainer.last_committed_step,
        )

    async def TakeBatch(
        self, request: pb.TakeBatchRequest, context: Context
    ) -> pb.TakeBatchResponse:
        take = await self._ledger.take_batch(
            check.check_number(request.incarnation, "incarnation", 1),
            check.check_step(request.step, "step", 1),
            check.check_task_ids(request.task_ids),
            request.max_wait.ToMilliseconds() / 1000,
            with_groups=request.with_groups,
            refill_below=check.check_number(request.refill_below, "refill_below", 0),
            confirmed=check.check_number(request.confirmed_version, "confirmed_version", 0)
            if request.HasField("confirmed_version")
            else None,
        )
        if take.state is TakeState.TAKEN and not take.replay:
            self._metrics.batch_taken(request.step, take)
        return take_to_pb(take)

    async def ConfirmVersion(
        self, request: pb.ConfirmVersionRequest, context: Context
    ) -> pb.ConfirmVersionResponse:
        version = await self._store.confirm(
            check.check_number(request.incarnation, "incarnation", 1),
            check.check_step(request.version, "version", 0),
        )
        return pb.ConfirmVersionResponse(policy_version=version)

    async def FetchGroups(
        self, request: pb.FetchGroupsRequest, context: Context
    ) -> AsyncIterator[pb.FetchGroupsResponse]:
        """Streams payloads as they are stored."""
        incarnation = check.check_number(request.incarnation, "incarnation", 1)
        step = check.check_step(request.step, "step", 1)
        ids = check.check_task_ids(request.task_ids)
        async for payloads in self._store.fetch(incarnation, step, ids):
            yield pb.FetchGroupsResponse(groups=payloads)

    async def FetchDiscarded(
        self, request: pb.FetchDiscardedRequest, context: Context
    ) -> pb.FetchDiscardedResponse:
        """Returns what was not trained on, as much as a message of moderate size holds."""
        total, found = await self._store.discarded(
            check.check_number(request.incarnation, "incarnation", 1),
            check.check_step(request.step, "step", 1),
            check.check_number(request.start, "start", 0),
        )
        return pb.FetchDiscardedResponse(total=total, discarded=found)

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: Context
    ) -> pb.CommitStepResponse:
        step = check.check_step(request.step, "step", 0)
        retained = check.check_number(request.oldest_retained_step, "oldest_retained_step", 0)
        if retained > step:
            raise InvalidInput(
                f"oldest_retained_step {retained}: expected at most the committed step {step}"
            )
        incarnation = check.check_number(request.incarnation, "incarnation", 1)
        committed = await self._store.commit(incarnation, step, retained)
        return pb.CommitStepResponse(last_committed_step=committed)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        memory = self._memory
        stats = replace(
            await self._store.stats(),
            redis_memory_bytes=memory.redis_bytes,
            limit_bytes=memory.limit_bytes,
        )
        return stats_to_pb(stats)

    async def PutRecipe(
        self, request: pb.PutRecipeRequest, context: Context
    ) -> pb.PutRecipeResponse:
        """Stores a recipe under its digest."""
        if len(request.source) > check.MAX_RECIPE_BYTES:
            raise InvalidInput(
                f"recipe {request.file_name[:80]!r} has {len(request.source)} bytes: at most "
                f"{check.MAX_RECIPE_BYTES}"
            )
        digest = hashlib.sha256(request.source).hexdigest()
        await self._store.put_recipe(digest, request.file_name[:200], request.source)
        return pb.PutRecipeResponse(digest=digest)

    async def GetRecipe(
        self, request: pb.GetRecipeRequest, context: Context
    ) -> pb.GetRecipeResponse:
        recipe = await self._store.get_recipe(check.check_task_id(request.digest, "digest"))
        if recipe is None:
            raise NotFound(f"recipe {request.digest}: unknown")
        await self._store.recipes_used([request.digest])
        return pb.GetRecipeResponse(file_name=recipe[0], source=recipe[1])

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        """Returns dead letters, newest first, as many as fit a message."""
        if request.limit < 0:
            raise InvalidInput(f"limit {request.limit}: expected 0 (100) or more")
        response, size = pb.ListDeadLettersResponse(), 0
        async for letter in self._store.dead_letters(min(request.limit or 100, _MAX_DEAD_LETTERS)):
            size += letter.ByteSize()
            if size > _MAX_RESPONSE_BYTES:
                break
            response.dead_letters.append(letter)
        return response

    async def RetryDeadLetters(
        self, request: pb.RetryDeadLettersRequest, context: Context
    ) -> pb.RetryDeadLettersResponse:
        ids = check.check_task_ids(request.task_ids)
        return pb.RetryDeadLettersResponse(retried=await self._store.retry_dead_letters(ids))

    async def DropDeadLetters(
        self, request: pb.DropDeadLettersRequest, context: Context
    ) -> pb.DropDeadLettersResponse:
        """Takes dead letters off the list."""
        ids = check.check_task_ids(request.task_ids)
        return pb.DropDeadLettersResponse(dropped=await self._store.drop_dead_letters(ids))

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        return await self._sessions.open(*check_open(request))

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.GetSessionResponse:
        attempt = check.check_number(request.attempt, "attempt", 0)
        known = check_known(request.known) if request.HasField("known") else None
        return await self._sessions.read(check.check_task_id(request.task_id), attempt, known)

    async def UpdateSession(
        self, request: pb.UpdateSessionRequest, context: Context
    ) -> pb.UpdateSessionResponse:
        return await self._sessions.update(check_update(request))

    @staticmethod
    def _lease(lease: pb.LeaseRef) -> tuple[str, int]:
        return (
            check.check_task_id(lease.task_id, "lease.task_id"),
            check.check_number(lease.token, "lease.token", 1),
        )
