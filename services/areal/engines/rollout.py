"""The generation side as a recipe sees it: submit rows, get batches.

A batch call of step s: submit rows (as far as the queue needs), wait until a server has confirmed
version s-1, then `TakeBatch(s)` until the ledger has B groups; rank 0 takes the manifest, every
rank fetches its share of the groups.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from areal import errors
from areal.chassis.logging import get_logger
from areal.clients.buffer import TakeResult, TakeState
from areal.config.services import RolloutConfig
from areal.engines.row_supply import RowSupply
from areal.engines.sampling import check_sampling
from areal.protocol.trajectories import STATE_FROM_PB
from areal.training import evaluation
from areal.training.session import TrainerSession, current_session
from areal.types import (
    LIVE_STATES,
    Purpose,
    StopReason,
    Task,
    TaskState,
    TrajectoryGroup,
    WorkflowSpec,
)
from areal.workflows.base import RolloutWorkflow
from areal.workflows.specs import describe_workflow, recipe_of

# One long poll; the ranks meet after each, so none idles in a collective for longer.
POLL_S = 10.0
# The same while the ledger refuses rows: so soon may they be offered again.
_HELD_BACK_POLL_S = 1.0


class RowLoader(Protocol):
    """A resumable source of rows (`areal.datasets.loader.StatefulLoader`)."""

    def __iter__(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]: ...

    def seek(self, epoch: int, cursor: int) -> None:
        """Goes to a place; the next item is (epoch, cursor)."""
        ...


class RemoteSGLangEngine:
    """Rollouts on the inference servers, through the rollout service and the ledger."""

    def __init__(self, config: RolloutConfig) -> None:
        """Joins the trainer session around the recipe.

        Args:
            config: The experiment's rollout section.
        """
        self.config = config
        self.session: TrainerSession = current_session()
        self._rows: Iterator[tuple[int, int, Mapping[str, Any]]] | None = None
        self._sealed = False
        # (epoch, index, task_id) of what was submitted and may not have ended, oldest first.
        self._open: deque[tuple[int, int, str]] = deque()
        self._next: list[int] | None = None
        # Drawn from the rows, and refused by a ledger that was full.
        self._held_back: list[Task] | None = None
        self._supply = RowSupply(self._batch_size, config.max_head_offpolicyness)
        self._specs: dict[int, WorkflowSpec] = {}
        self._log = get_logger("areal.engines.rollout")

    # -- batches -------------------------------------------------------------------------------

    def prepare_batch(self, dataloader: RowLoader, workflow: RolloutWorkflow) -> dict[str, Any]:
        """The next batch of B groups; generation of later ones continues meanwhile.

        Args:
            dataloader: Rows to submit; iterated from where it stands.
            workflow: How a row becomes trajectories; a class of the recipe or of the library.

        Returns:
            This rank's share, packed (see `areal.algorithms.packing`).

        Raises:
            InvalidInput: The workflow samples at another temperature than the trainer's.
            WaitTimeout: No batch within rollout.batch_timeout_s; says what was missing.
        """
        check_sampling(workflow, self.session.config.gconfig.temperature)
        spec = self._describe(workflow)
        if self._rows is None:
            self._start_rows(dataloader)
        self.session.begin_step()
        self.session.on_rank0(lambda: self._refill(spec))
        return self._take(task_ids=[], refill=lambda: self._refill(spec))

    def rollout_batch(
        self, data: Iterable[Mapping[str, Any]], workflow: RolloutWorkflow
    ) -> dict[str, Any]:
        """Rolls out exactly these rows and returns the accepted groups when all have ended.

        Raises:
            WorkflowError: No row was accepted.
            InvalidInput | WaitTimeout: As for `prepare_batch`.
        """
        check_sampling(workflow, self.session.config.gconfig.temperature)
        spec = self._describe(workflow)
        session = self.session
        session.begin_step()
        step = session.step + 1
        tasks = [
            Task(
                task_id=f"s{step}-{index}",
                purpose=Purpose.TRAIN,
                workflow=spec,
                data=dict(row),
            )
            for index, row in enumerate(data)
        ]
        if not tasks:
            raise errors.InvalidInput("rollout_batch(data): expected at least one row, got none")
        self._submit_all(tasks, f"step {step}")
        return self._take(task_ids=[task.task_id for task in tasks], refill=None)

    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow, name: str,
        *, version: int | None = None,
    ) -> float:  # fmt: skip
        """Mean reward of the current policy on held-out rows, recorded under `name`.

        `version` must sample every token; None: that of the last finished step, or what is served
        where a resumed run replays. What was recorded at this very step is returned as it is; so
        is the initial policy's figure before a resumed run's first step: it is served no longer.

        Raises:
            NotFound: `version` is served no longer, or not published yet.
            WorkflowError: No row was delivered.
            WaitTimeout: As for `prepare_batch`.
        """
        session = self.session
        pinned = session.on_rank0(lambda: evaluation.pinned(session, name, version))
        if (known := evaluation.recorded(session, name, version)) is not None:
            return known
        session.on_rank0(session.confirm_version)
        tasks = evaluation.tasks_of(session, rows, self._describe(workflow), name, pinned)
        mean = evaluation.mean_reward(session, tasks, name, self.config.batch_timeout_s)
        return evaluation.record(session, name, mean)

    # -- rank 0 --------------------------------------------------------------------------------

    def _start_rows(self, dataloader: RowLoader) -> None:
        """Goes to where the checkpoint was; ids between there and the crash are seen (L6)."""
        session = self.session
        if session.resumed is not None and (cursor := session.resumed.extra.get("dataset")):
            dataloader.seek(*cursor)
            self._next = list(cursor)
        self._rows = iter(dataloader)
        session.checkpoint_extra["dataset"] = self._cursor

    def _cursor(self) -> list[int] | None:
        """The lowest (epoch, index) that has not ended, or was never submitted."""
        session = self.session
        if session.rank != 0:
            return None
        while self._open:
            head = list(itertools.islice(self._open, 500))
            records = session.ask_buffer(
                session.buffer.get_tasks([task_id for _, _, task_id in head]), "task states"
            )
            live = {
                record.task.task_id
                for record in records
                if record.state in LIVE_STATES and not 0 < record.step <= session.step
            }
            for _, _, task_id in head:
                if task_id in live:
                    return list(self._open[0][:2])
                self._open.popleft()
        return self._next

    @property
    def _batch_size(self) -> int:
        return self.session.config.train_dataset.batch_size

    def _describe(self, workflow: RolloutWorkflow) -> WorkflowSpec:
        """Describes the workflow by digest and stores the recipe's source, once."""
        known = self._specs.get(id(workflow))
        if known is not None:
            return known
        spec = describe_workflow(workflow)
        recipe = recipe_of(workflow)
        if recipe is not None:
            session = self.session
            session.on_rank0(
                lambda: session.ask_buffer(
                    session.buffer.put_recipe(recipe.file_name, recipe.source),
                    "storing the recipe",
                )
            )
        self._specs[id(workflow)] = spec
        return spec

    def _send(self, tasks: list[Task], *, seal: bool = False) -> int:
        session = self.session
        accepted = session.ask_buffer(
            session.buffer.submit_tasks(tasks, incarnation=session.incarnation, seal=seal),
            f"submission of {len(tasks)} tasks",
        )
        return sum(accepted)

    def _refill(self, spec: WorkflowSpec) -> None:
        """Submits rows until enough are queued; ids seen before do not count (L6)."""
        stats = self.session.ask_buffer(self.session.buffer.get_stats(), "ledger statistics")
        counts = {STATE_FROM_PB[count.state]: count.tasks for count in stats.train_counts}
        self._supply.observe(counts)
        self._top_up(spec, self._supply.target - counts[TaskState.QUEUED])

    def _top_up(self, spec: WorkflowSpec, missing: int) -> None:
        # Messages stay as large as where every row is accepted.
        most = (self.config.max_head_offpolicyness + 2) * self._batch_size
        while missing > 0 and (self._held_back is not None or not self._sealed):
            tasks = self._held_back or self._draw(spec, min(missing, most))
            try:
                accepted = self._send(tasks, seal=self._sealed)
            except errors.CapacityExceeded as error:
                # Then it has enough to do: these go with a later poll, `_poll` has the deadline.
                if self._held_back is None:
                    self._log.warning("submission_held_back", tasks=len(tasks), cause=str(error))
                self._held_back = tasks
                self._next = list(tasks[0].position or ()) if tasks else self._next
                return
            self._held_back = None
            for task in tasks:
                epoch, index = task.position or (0, 0)
                self._open.append((epoch, index, task.task_id))
                self._next = [epoch, index + 1]
            missing -= accepted

    def _draw(self, spec: WorkflowSpec, count: int) -> list[Task]:
        """The next rows as tasks; fewer than asked, and sealed, when the rows end."""
        assert self._rows is not None
        tasks = [
            Task(
                task_id=f"e{epoch}-{index}",
                purpose=Purpose.TRAIN,
                workflow=spec,
                data=dict(row),
                position=(epoch, index),
            )
            for epoch, index, row in itertools.islice(self._rows, count)
        ]
        self._sealed = len(tasks) < count
        return tasks

    def _submit_all(self, tasks: list[Task], what: str) -> None:
        """Submits tasks that the run cannot do without; all ranks wait while there is no room.

        Raises:
            WaitTimeout: The ledger was full for rollout.batch_timeout_s.
        """
        session = self.session
        since, told = time.monotonic(), False

        def attempt() -> bool:
            nonlocal told
            try:
                self._send(tasks)
            except errors.CapacityExceeded as error:
                if error.retry_after_s is None:
                    raise
                if not told:
                    self._log.warning("submission_held_back", tasks=len(tasks), cause=str(error))
                told = True
                if time.monotonic() - since > self.config.batch_timeout_s:
                    raise errors.WaitTimeout(
                        f"room for {len(tasks)} tasks of {what}: {error}",
                        on=f"buffer {session.buffer.address}",
                        since=since,
                        hint="raise buffer.max_memory_mb, or checkpoint more often",
                    ) from None
                pause = asyncio.sleep(min(error.retry_after_s, POLL_S))
                session.ask_buffer(pause, f"room for {len(tasks)} tasks of {what}")
                return False
            return True

        while not session.on_rank0(attempt):
            session.raise_if_stopped()
            session.save_checkpoint()  # commits, so that payloads can go

    def _poll(
        self, task_ids: list[str], refill: Callable[[], None] | None, since: float
    ) -> TakeResult:
        session = self.session
        step, alone = session.step + 1, session.world_size == 1
        held_back = self._held_back is not None
        more = refill is not None and not self._sealed and not held_back
        taken: TakeResult = session.ask_buffer(
            session.buffer.take_batch(
                session.incarnation,
                step,
                _HELD_BACK_POLL_S if held_back else POLL_S,
                task_ids=task_ids,
                with_groups=alone,
                refill_below=self._supply.watermark if more else 0,
            ),
            f"batch of step {step}",
        )
        waiting = taken.state in (TakeState.WAITING, TakeState.CHECKPOINT_FIRST)
        if waiting and time.monotonic() - since > self.config.batch_timeout_s:
            raise errors.WaitTimeout(
                f"batch of step {step}: {taken.waiting_for}",
                on=f"buffer {session.buffer.address}",
                since=since,
                hint="see `areal status` and the rollout and inference logs"
                + ("; the ledger is full and refuses more tasks" if self._held_back else ""),
            )
        due = self._batch_size if held_back else self._supply.watermark
        if taken.state is TakeState.WAITING and refill is not None and taken.queued < due:
            refill()
        return taken

    # -- all ranks -----------------------------------------------------------------------------

    def _take(self, task_ids: list[str], refill: Callable[[], None] | None) -> dict[str, Any]:
        session = self.session
        since = time.monotonic()
        session.on_rank0(session.confirm_version)
        while True:
            taken = session.on_rank0(lambda: self._poll(task_ids, refill, since), TakeResult)
            if taken.state is TakeState.TAKEN:
                break
            session.raise_if_stopped()
            if taken.state is TakeState.EXHAUSTED:
                raise errors.WorkflowError(
                    f"step {session.step + 1}: no group was accepted ({taken.waiting_for})"
                    if task_ids
                    else f"step {session.step + 1}: the dataset has no rows left; lower "
                    "total_train_steps or let the loader repeat"
                )
            if taken.state is TakeState.CHECKPOINT_FIRST:
                session.save_checkpoint()
        session.trace.taking()
        batch = self._fetch(taken)
        session.row["wait_seconds"] = time.monotonic() - since
        session.status.training()
        return batch

    def _fetch(self, taken: TakeResult) -> dict[str, Any]:
        """This rank's groups, packed; adds the batch's figures to the step's row."""
        from areal.algorithms.packing import assign_groups

        session = self.session
        shares = assign_groups([sum(g.lengths) for g in taken.groups], session.world_size)
        mine = [taken.groups[i].task_id for i in shares[session.rank]]
        groups: list[TrajectoryGroup] = session.ask_buffer(
            session.buffer.fetch_groups(session.incarnation, session.step + 1, mine),
            f"{len(mine)} groups of step {session.step + 1}",
        )
        session.batch_tasks = mine
        session.took_batch([g.task_id for g in taken.groups], replay=taken.replay)
        session.trace.took(groups, taken)
        staleness = [session.step - g.head_version for g in taken.groups]
        session.row.update(
            groups=len(taken.groups),
            samples=sum(len(g.lengths) for g in taken.groups),
            tokens_total=sum(sum(g.lengths) for g in taken.groups),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            replay=taken.replay,
            queued=taken.queued,
        )
        return pack_groups(groups)


def pack_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Joins groups into one packed batch of tensors.

    An empty share (more ranks than groups) gives an empty batch: the engine still takes part in
    every collective.
    """
    import torch

    from areal.algorithms.packing import pack

    sequences = []
    group_index = []
    truncated = []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            sequences.append(
                {
                    # Arrays from the wire are read-only views; torch wants to own its memory.
                    "input_ids": torch.tensor(trajectory.input_ids, dtype=torch.int64),
                    "loss_mask": torch.tensor(trajectory.loss_mask),
                    "behavior_logprobs": torch.tensor(trajectory.behavior_logprobs),
                    "token_versions": torch.tensor(trajectory.token_versions, dtype=torch.int64),
                    "rewards": torch.tensor(trajectory.rewards),
                }
            )
            group_index.append(number)
            truncated.append(trajectory.finish_reason in (StopReason.LENGTH, StopReason.ABORT))
    if not sequences:
        return _empty_batch()
    batch: dict[str, Any] = pack(sequences, group_index)
    batch["truncated"] = torch.tensor(truncated)
    return batch


def _empty_batch() -> dict[str, Any]:
    import torch

    return {
        "cu_seqlens": torch.zeros(1, dtype=torch.int32),
        "group_index": torch.zeros(0, dtype=torch.int64),
        "truncated": torch.zeros(0, dtype=torch.bool),
        "input_ids": torch.zeros(0, dtype=torch.int64),
        "loss_mask": torch.zeros(0, dtype=torch.bool),
        "behavior_logprobs": torch.zeros(0),
        "token_versions": torch.zeros(0, dtype=torch.int64),
        "rewards": torch.zeros(0),
    }
