"""The ledger for a trainer's ranks: rank 0 calls the buffer, all get its answer or error.

Every call is synchronous, and all ranks make the same calls in the same order, except `fetch` and
`commit`. While a call waits, it is listed as the wait `call` on the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from areal.clients.buffer.trainer import BufferTrainer
from areal.config.experiment import GRPOConfig
from areal.protocol.leases import Discarded, Registration, Take, TaskRecord
from areal.recipe import Recipe
from areal.types import Purpose, Task, TaskState, TrajectoryGroup
from areal_torch.training.bridge import CALL_S, AsyncBridge
from areal_torch.training.ranks import Ranks

T = TypeVar("T")

POLL_S = 10.0
"""One long poll; the ranks meet after each, so none idles in a collective for longer."""


class TrainerLedger:
    """The calls of one incarnation of a trainer: submit, take, commit."""

    def __init__(self, ranks: Ranks, bridge: AsyncBridge, buffer: BufferTrainer) -> None:
        """Makes no call yet; the first one is `register`."""
        self.buffer = buffer
        self.name = f"buffer {buffer.connection.address}"
        """Name shown in waits and errors."""
        self.incarnation = 0
        self._ranks = ranks
        self._bridge = bridge

    def ask(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        timeout: float = CALL_S,
        *,
        shape: Any = Any,
    ) -> T:
        """Runs a call of the buffer's client on rank 0; `shape` as in `Ranks.on_rank0`."""
        return self._ranks.on_rank0(
            lambda: self._bridge.call(make(), what, timeout, on=self.name), shape
        )

    def register(self, config: GRPOConfig, resume_step: int, recipe_digest: str) -> Registration:
        """Begins a new incarnation, which continues after `resume_step` (rank 0).

        Raises:
            WrongStep: Batches after that step were released, or it was never taken.
        """
        registered = self.ask(
            lambda: self.buffer.register_trainer(
                resume_step=resume_step,
                batch_size=config.train_dataset.batch_size,
                max_head_offpolicyness=config.rollout.max_head_offpolicyness,
                max_concurrent_rollouts=config.rollout.max_concurrent_rollouts,
                recipe_digest=recipe_digest,
            ),
            "registration with the buffer",
            shape=Registration,
        )
        self.incarnation = registered.incarnation
        return registered

    def put_recipe(self, recipe: Recipe) -> None:
        """Stores a recipe, from which workers rebuild its workflows and rewards."""
        self.ask(
            lambda: self.buffer.recipes.put_recipe(recipe.file_name, recipe.source),
            "storing the recipe",
        )

    def submit(self, tasks: Sequence[Task], *, seal: bool = False) -> int:
        """Queues tasks; `seal` says that no more rows follow.

        Returns:
            The number of tasks that were new to the ledger.

        Raises:
            CapacityExceeded: The ledger is full; with `retry_after_s`, only for now.
        """
        accepted = self.ask(
            lambda: self.buffer.tasks.submit_tasks(tasks, incarnation=self.incarnation, seal=seal),
            f"submission of {len(tasks)} tasks",
        )
        return sum(accepted)

    def train_counts(self) -> dict[TaskState, int]:
        """Returns how many of the trial's train tasks are in each state."""

        async def ask() -> dict[TaskState, int]:
            return (await self.buffer.tasks.get_stats()).train_counts

        return self.ask(ask, "ledger statistics", shape=dict[TaskState, int])

    def states(self, task_ids: Sequence[str]) -> dict[str, tuple[TaskState, int]]:
        """Returns state and step (0: in no batch) of each task that the ledger knows."""

        async def ask() -> dict[str, tuple[TaskState, int]]:
            records = await self.buffer.tasks.get_tasks(task_ids)
            return {record.task.task_id: (record.state, record.step) for record in records}

        return self.ask(ask, "task states", shape=dict[str, tuple[TaskState, int]])

    def take(
        self,
        step: int,
        task_ids: Sequence[str] = (),
        *,
        max_wait_s: float = POLL_S,
        refill_below: int = 0,
        confirmed_version: int | None = None,
    ) -> Take:
        """Asks for the batch of a step; see `BufferTrainer.take_batch`."""
        return self.ask(
            lambda: self.buffer.take_batch(
                self.incarnation,
                step,
                max_wait_s,
                task_ids=task_ids,
                with_groups=self._ranks.world_size == 1,
                refill_below=refill_below,
                confirmed_version=confirmed_version,
            ),
            f"batch of step {step}",
            shape=Take,
        )

    def fetch(self, step: int, task_ids: Sequence[str]) -> list[TrajectoryGroup]:
        """Returns groups of a taken batch, in the order asked (this rank alone)."""
        return self._bridge.call(
            self.buffer.fetch_groups(self.incarnation, step, task_ids),
            f"{len(task_ids)} groups of step {step}",
            on=self.name,
        )

    def discarded(self, step: int) -> Iterator[list[Discarded]]:
        """Yields, in any thread, what ended untrained before a step's batch was taken."""
        start, total = 0, 1
        while start < total:
            found, total = self._bridge.call(
                self.buffer.fetch_discarded(self.incarnation, step, start),
                f"what was not trained on before step {step}",
                on=self.name,
            )
            if not found:
                return
            yield found
            start += len(found)

    def wait_ended(self, task_ids: Sequence[str], max_wait_s: float, what: str) -> list[str]:
        """Returns those of at most 10,000 tasks that have ended; waits for the first of them.

        Raises:
            NotFound: A task was released, or never submitted.
        """
        return self.ask(
            lambda: self.buffer.tasks.wait_tasks(
                task_ids, max_wait_s, incarnation=self.incarnation
            ),
            what,
        )

    def read_results(
        self,
        task_ids: Sequence[str],
        visit: Callable[[TaskRecord], None],
        what: str,
        timeout: float,
    ) -> None:
        """Calls `visit` (on rank 0) with each record and its group, one message at a time."""

        async def read() -> None:
            async for record in self.buffer.tasks.read_tasks(task_ids, include_groups=True):
                visit(record)

        self.ask(read, what, timeout)

    def pause(self, seconds: float, what: str) -> None:
        """Waits a moment until the buffer can do `what`."""
        self.ask(lambda: asyncio.sleep(seconds), what)

    def commit(self, step: int, oldest_retained_step: int) -> None:
        """Commits the complete checkpoint of `step` (rank 0, in any thread)."""
        self._bridge.call(
            self.buffer.commit_step(
                incarnation=self.incarnation, step=step, oldest_retained_step=oldest_retained_step
            ),
            f"commit of step {step}",
            on=self.name,
        )

    def cancel_train_tasks(self, reason: str) -> int:
        """Cancels all train tasks that no step needs any longer; returns how many were live."""
        return self.ask(
            lambda: self.buffer.tasks.cancel_tasks(
                all_of_purpose=Purpose.TRAIN, reason=reason, incarnation=self.incarnation
            ),
            "cancelling surplus tasks",
        )
