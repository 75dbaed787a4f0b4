"""The trainer's calls of BufferService: register, take a batch, fetch its groups, commit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from areal.clients.base import persist, to_duration
from areal.clients.buffer.connection import BufferConnection, Role
from areal.clients.buffer.tasks import BufferRecipes, BufferTasks
from areal.errors import NotFound
from areal.protocol.leases import Discarded, Registration, Take, take_from_pb
from areal.protocol.trajectories import GroupCodec, unpack_group
from areal.types import TrajectoryGroup
from areal.v1 import buffer_service_pb2 as pb


class BufferTrainer(Role):
    """Rank 0's calls; `tasks` and `recipes` are its two other roles."""

    def __init__(self, connection: BufferConnection) -> None:
        super().__init__(connection)
        self.tasks = BufferTasks(connection)
        self.recipes = BufferRecipes(connection)
        self._codec = GroupCodec()
        # (incarnation, step) and groups that came with its batch and were not asked for yet.
        self._came: tuple[tuple[int, int], dict[str, TrajectoryGroup]] = ((0, 0), {})

    async def register_trainer(
        self,
        *,
        resume_step: int,
        batch_size: int,
        max_head_offpolicyness: int,
        max_concurrent_rollouts: int,
        recipe_digest: str = "",
    ) -> Registration:
        """Registers a trainer that starts or resumes; fences off the previous one.

        If `recipe_digest` differs from the trial's last one, or the run was stopped by errors of
        its recipe, the tasks that such errors ended are queued again, and all open tasks run with
        this recipe.

        Raises:
            WrongStep: The batches after resume_step were released, or were never taken.
        """
        request = pb.RegisterTrainerRequest(
            resume_step=resume_step,
            batch_size=batch_size,
            max_head_offpolicyness=max_head_offpolicyness,
            max_concurrent_rollouts=max_concurrent_rollouts,
            recipe_digest=recipe_digest,
        )
        response = await self._call(self._stub.RegisterTrainer, request)
        return Registration(
            response.incarnation,
            response.last_taken_step,
            response.last_committed_step,
            response.retried,
        )

    async def take_batch(
        self,
        incarnation: int,
        step: int,
        max_wait_s: float,
        *,
        task_ids: Sequence[str] = (),
        with_groups: bool = False,
        refill_below: int = 0,
        confirmed_version: int | None = None,
    ) -> Take:
        """Takes a step's batch; idempotent. Opens admission for a served version even if it waits.

        Args:
            incarnation: The value from register_trainer.
            step: Finished steps + 1.
            max_wait_s: The service waits at most 30 s a call.
            task_ids: Take exactly these, once all have ended; empty: the oldest B.
            with_groups: The answer includes the groups, so a trainer of one rank does not need
                `fetch_groups`.
            refill_below: Answers `waiting` at once while fewer train tasks than this are queued
                and the rows are not sealed. 0: waits on.
            confirmed_version: The newest version that a server serves, while version step - 1 is on
                its way. Groups are leased from it until `confirm_version` names a newer one. None:
                step - 1.

        Raises:
            StaleIncarnation: A newer trainer has registered.
            WrongStep: Not the next step, nor one whose batch is still kept.
            WorkflowError: Every task of task_ids ended without a group; or the run was stopped
                because too many tasks ended by errors of the recipe.
        """
        request = pb.TakeBatchRequest(
            incarnation=incarnation,
            step=step,
            max_wait=to_duration(max_wait_s),
            task_ids=task_ids,
            with_groups=with_groups,
            refill_below=refill_below,
            confirmed_version=confirmed_version,
        )
        response = await self._call(self._stub.TakeBatch, request, wait_s=max_wait_s)
        came = [unpack_group(payload, self._codec) for payload in response.first_groups]
        self._came = ((incarnation, step), {group.task_id: group for group in came})
        return take_from_pb(response)

    async def confirm_version(self, incarnation: int, version: int) -> int:
        """Allows leases from a version, because a server serves it; returns the ledger's version.

        Raises:
            StaleIncarnation: A newer trainer has registered.
            WrongStep: The batch that the version was made of was never taken.
        """
        request = pb.ConfirmVersionRequest(incarnation=incarnation, version=version)
        return (await self._call(self._stub.ConfirmVersion, request)).policy_version

    async def fetch_groups(
        self, incarnation: int, step: int, task_ids: Sequence[str]
    ) -> list[TrajectoryGroup]:
        """Returns the groups of a taken step, in the order asked; arrays are read-only.

        Raises:
            StaleIncarnation: A newer trainer has registered.
            NotFound: An id is not part of that step's batch, or its payload was released.
        """
        of, groups = self._came
        if of == (incarnation, step):
            self._came = ((0, 0), {})
        else:
            groups = {}
        policy = self.connection.policy("FetchGroups")

        async def missing() -> None:
            wanted = [task_id for task_id in task_ids if task_id not in groups]
            if not wanted:
                return
            request = pb.FetchGroupsRequest(incarnation=incarnation, step=step, task_ids=wanted)
            stream = self.connection.stream(
                self._stub.FetchGroups, request, timeout_s=policy.timeout_s
            )
            async with aclosing(stream) as responses:
                async for response in responses:
                    for payload in response.groups:
                        group = unpack_group(payload, self._codec)
                        groups[group.task_id] = group

        await persist(missing, policy.retry_s)
        absent = [task_id for task_id in task_ids if task_id not in groups]
        if absent:
            raise NotFound(f"step {step}: the ledger sent no group for task {absent[0]!r}")
        return [groups[task_id] for task_id in task_ids]

    async def fetch_discarded(
        self, incarnation: int, step: int, start: int = 0
    ) -> tuple[list[Discarded], int]:
        """Returns what ended untrained before a step's batch was taken, and how much there is.

        Args:
            incarnation: The value from register_trainer.
            step: A step that was taken, or the one to take next.
            start: How many to pass over.

        Raises:
            StaleIncarnation: A newer trainer has registered.
            WrongStep: The step was released.
        """
        request = pb.FetchDiscardedRequest(incarnation=incarnation, step=step, start=start)
        response = await self._call(self._stub.FetchDiscarded, request)
        found = [
            Discarded(
                each.task_id,
                each.token,
                each.outcome,
                each.reason,
                unpack_group(each.group, self._codec) if each.group else None,
            )
            for each in response.discarded
        ]
        return found, response.total

    async def commit_step(self, incarnation: int, step: int, oldest_retained_step: int) -> int:
        """Commits all steps up to `step`, now in a checkpoint; returns the last committed step.

        Payloads of steps up to oldest_retained_step (the oldest checkpoint kept) are released.

        Raises:
            StaleIncarnation: A newer trainer has registered.
            WrongStep: Above the last taken step.
        """
        request = pb.CommitStepRequest(
            incarnation=incarnation, step=step, oldest_retained_step=oldest_retained_step
        )
        return (await self._call(self._stub.CommitStep, request)).last_committed_step
