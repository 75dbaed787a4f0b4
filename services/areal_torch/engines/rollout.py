"""The recipe's interface to generation: submits rows, returns batches.

A batch call of step s: submit rows (as far as the queue needs), wait until a server has confirmed
version s-1, then `TakeBatch(s)` until the ledger has B groups; rank 0 takes the manifest, every
rank fetches its share of the groups. A batch that is ready is taken while version s-1 is still on
its way, and is trained on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from areal import errors
from areal.config.services import RolloutSection
from areal.protocol.leases import Take, TakeState
from areal.runs.evaluation_arguments import check_arguments
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters, Purpose, Task, WorkflowSpec
from areal.workflows.base import RolloutWorkflow
from areal.workflows.prompt_limits import check_prompts
from areal.workflows.specs import describe_workflow, recipe_of
from areal_torch.engines.task_feeder import RowLoader, TaskFeeder
from areal_torch.training import evaluation
from areal_torch.training.ledger import POLL_S
from areal_torch.training.session import TrainerSession, current_session
from areal_torch.training.submission import Submission

# One poll while the ledger refuses rows: so soon may they be offered again.
_HELD_BACK_POLL_S = 1.0
# Described once; a recipe may create a workflow for each step.
_MOST_WORKFLOWS = 64


@dataclass(frozen=True)
class Feeding:
    """The source of a batch's tasks."""

    feeder: TaskFeeder
    spec: WorkflowSpec

    def refill(self) -> None:
        """Submits rows until enough are queued."""
        self.feeder.refill(self.spec)


class RemoteSGLangEngine:
    """Submits rows for rollout, and returns training batches and evaluation results.

    Every rank of the trainer must call the same methods in the same order.

    Example:
        >>> rollout = RemoteSGLangEngine(config.rollout)
        >>> batch = rollout.prepare_batch(loader, RLVRWorkflow("math", config.gconfig))
    """

    def __init__(self, config: RolloutSection) -> None:
        """Connects to the services of the current run.

        Args:
            config: The experiment's `rollout` section.

        Raises:
            InvalidInput: `allocation_mode` has no inference servers.
        """
        self.config = config
        self.session: TrainerSession = current_session()
        if self.session.config.offline:
            raise errors.InvalidInput(
                f"allocation_mode {self.session.config.allocation_mode!r} has no servers: expected "
                "e.g. 'sglang:d1+fsdp:d1' with RemoteSGLangEngine"
            )
        self._feeder: TaskFeeder | None = None
        self._specs: dict[int, tuple[RolloutWorkflow, WorkflowSpec]] = {}

    def prepare_batch(
        self, dataloader: RowLoader | None, workflow: RolloutWorkflow | None = None
    ) -> dict[str, Any]:
        """Returns this rank's share of the next batch of `train_dataset.batch_size` groups.

        The services generate groups for later batches while the trainer uses this one.

        Args:
            dataloader: Supplies the rows to submit, from its current position; usually a
                `StatefulLoader`. None means that the groups come from agents outside the run,
                which open sessions at the gateway.
            workflow: The workflow that turns a row into trajectories. Required unless
                `dataloader` is None.

        Returns:
            A packed batch.

        Raises:
            InvalidInput: The workflow samples at a temperature other than the trainer's, there is a
                `dataloader` but no workflow, the step has a batch already (`upload_weights` was not
                called since), or the prompt of a row leaves no room for an answer (the message
                names the row, from 1).
            WorkflowError: The loader has no rows left.
            WaitTimeout: No batch was complete within 3 x `rollout.request_timeout_s`; the message
                says what was missing.
        """
        self.session.end_evaluation()
        feeding: Feeding | None = None
        if dataloader is not None:
            if workflow is None:
                raise errors.InvalidInput(
                    "prepare_batch: workflow None: expected a workflow for the rows"
                )
            check_sampling(workflow, self.session.config.gconfig.temperature)
            spec = self._describe(workflow)
            if self._feeder is None:
                self._check_prompts(workflow, getattr(dataloader, "rows", ()))
                self._feeder = TaskFeeder(self.session, dataloader)
            feeding = Feeding(self._feeder, spec)
        self.session.begin_step()
        self.session.turn.give()
        if feeding is not None:
            self.session.on_rank0(feeding.refill)
        # A batch that is at hand is computed with while the last version leaves: `upload_weights`
        # waits for a server to confirm that one. For a fresh batch (0) it must be served first,
        # and so it must where servers sleep while the batch is computed with.
        ahead = self.config.max_head_offpolicyness and not self.session.turn.shared
        if not (self.session.publishing.pending and ahead):
            self.session.confirm_version()
        return self._take(feeding)

    def rollout_batch(
        self, data: Iterable[Mapping[str, Any]], workflow: RolloutWorkflow
    ) -> dict[str, Any]:
        """Returns this rank's share of a batch of exactly the given rows, with one group per row.

        The call waits until the tasks of all rows have ended. Rejected and failed tasks are left
        out.

        Args:
            data: The rows, at least one.
            workflow: The workflow that turns a row into trajectories.

        Returns:
            A packed batch.

        Raises:
            WorkflowError: No row produced a group.
            InvalidInput: There are no rows, the workflow samples at a temperature other than the
                trainer's, or the prompt of a row leaves no room for an answer.
            WaitTimeout: No batch was complete within 3 x `rollout.request_timeout_s`; the message
                says what was missing.
        """
        session = self.session
        session.end_evaluation()
        check_sampling(workflow, session.config.gconfig.temperature)
        spec = self._describe(workflow)
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
        self._check_prompts(workflow, [task.data for task in tasks])
        session.turn.give()
        session.confirm_version()  # else servers that are still loading would sample some of it
        submission = Submission(session, tasks, f"step {step}", self.config.batch_timeout_s)
        while not session.on_rank0(submission.proceed):
            session.raise_if_stopped()
            session.save_checkpoint()  # commits, so that payloads can go
            session.turn.give()
        return self._take(None, [task.task_id for task in tasks])

    def record(self, numbers: Mapping[str, float]) -> None:
        """Puts numbers of the recipe's own into the row of the step in progress.

        See `FSDPPPOActor.record`.

        Args:
            numbers: By name, such as `{"my/share_of_tools": 0.5}`.

        Raises:
            InvalidInput: No step is in progress, a name is that of a metric of every step, or a
                value is not a number.
        """
        self.session.note(numbers)

    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow, name: str,
        *, version: int | None = None,
    ) -> float:  # fmt: skip
        """Returns the policy's mean reward on held-out rows, and records it in the run folder.

        Every row has the same weight. A row that the workflow rejects counts as 0. A row without a
        result (its reward function raised, its servers failed) is not in the mean: trainer.json,
        the log and the summary say how many there are, and why.

        The answers are written to evaluations/NAME-vVERSION.jsonl in the run folder. If the current
        step already has a result named `name`, the call returns that result without a new
        evaluation. After a resume, until the first step ends, the call also returns a result
        recorded at step 0, because the initial policy is no longer served.

        Args:
            rows: The held-out rows, at least one.
            workflow: The workflow that turns a row into trajectories.
            name: Name of the result: 1 to 100 letters, digits and `._:-`.
            version: The policy version that must sample every token. None means the version of the
                last finished step, or, while a resumed run replays steps, the served version.

        Raises:
            InvalidInput: There are no rows, `name` has other characters or is that of a figure in
                the run's summary, or the prompt of a row leaves no room for an answer (the message
                names the row, from 1).
            NotFound: `version` is no longer served, or not published yet.
            WorkflowError: No row produced a result.
            WaitTimeout: The evaluation took longer than 3 x `rollout.request_timeout_s`.
        """
        session = self.session
        check_arguments(rows, name)
        session.publishing.settle()
        pinned = session.on_rank0(lambda: evaluation.pinned(session, name, version))
        if (known := evaluation.recorded(session, name, version)) is not None:
            return known
        self._check_prompts(workflow, rows)
        session.turn.give()
        session.confirm_version()
        tasks = evaluation.tasks_of(session, rows, self._describe(workflow), name, pinned)
        figure = evaluation.measure(session, tasks, name, self.config.batch_timeout_s)
        return evaluation.record(session, name, figure)

    def _check_prompts(self, workflow: RolloutWorkflow, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuses rows that no server would take, before the first step."""
        length = self.session.config.model.context_length
        self.session.on_rank0(
            lambda: check_prompts(workflow, rows, lambda: self._tokenizer, length)
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(Path(self.session.config.model.path))

    def _describe(self, workflow: RolloutWorkflow) -> WorkflowSpec:
        """Describes the workflow by digest and stores the recipe's source, once."""
        if id(workflow) not in self._specs:
            spec = describe_workflow(workflow)
            if (recipe := recipe_of(workflow)) is not None:
                self.session.ledger.put_recipe(recipe)
            # Keeps the object, because another one may get the id of a deleted one.
            self._specs[id(workflow)] = workflow, spec
            if len(self._specs) > _MOST_WORKFLOWS:
                del self._specs[next(iter(self._specs))]
        return self._specs[id(workflow)][1]

    def _take(self, feeding: Feeding | None, task_ids: Sequence[str] = ()) -> dict[str, Any]:
        """Waits for the batch of the next step; returns this rank's share of it, packed."""
        from areal_torch.engines.images import pack_groups_with_images

        session = self.session
        since = time.monotonic()
        while True:
            taken = session.on_rank0(lambda: self._poll(feeding, task_ids, since), Take)
            if taken.state is TakeState.TAKEN:
                break
            session.raise_if_stopped()
            if session.publishing.pending:  # no batch to compute with beside it
                session.confirm_version()
                continue
            if taken.state is TakeState.EXHAUSTED:
                raise errors.WorkflowError(
                    f"step {session.step + 1}: no group was accepted ({taken.waiting_for})"
                    if task_ids
                    else f"step {session.step + 1}: the dataset has no rows left; lower "
                    "total_train_steps or let the loader repeat"
                )
            if taken.state is TakeState.CHECKPOINT_FIRST:
                session.save_checkpoint()
                session.turn.give()
        batch = pack_groups_with_images(session.fetch(taken), session.config.model.path)
        session.row["time/wait"] = time.monotonic() - since
        session.status.training()
        return batch

    def _poll(
        self,
        feeding: Feeding | None,
        task_ids: Sequence[str],
        since: float,
    ) -> Take:
        """Asks for the batch once, and sees to the rows that are queued meanwhile (rank 0)."""
        session = self.session
        feeder = feeding.feeder if feeding is not None else None
        full = feeder is not None and feeder.held_back is not None
        at_once = session.publishing.pending
        # `upload_weights` waited for the version before the one that is on its way.
        confirmed = max(session.confirmed_version, session.step - 1) if at_once else None
        taken = session.ledger.take(
            session.step + 1,
            task_ids,
            max_wait_s=0.0 if at_once else _HELD_BACK_POLL_S if full else POLL_S,
            refill_below=feeder.refill_below if feeder is not None else 0,
            confirmed_version=confirmed,
        )
        waiting = taken.state in (TakeState.WAITING, TakeState.CHECKPOINT_FIRST)
        if waiting and time.monotonic() - since > self.config.batch_timeout_s:
            raise errors.WaitTimeout(
                f"batch of step {session.step + 1}: {taken.waiting_for}",
                on=session.ledger.name,
                since=since,
                hint="see `areal status` and the rollout and inference logs"
                + ("; the ledger is full and refuses more tasks" if full else ""),
            )
        if taken.state is TakeState.WAITING and feeding is not None:
            feeding.feeder.refill_if_low(feeding.spec, taken.queued)
        return taken


def check_sampling(workflow: RolloutWorkflow, temperature: float) -> None:
    """Refuses a workflow if all its generation settings have another temperature.

    It checks the workflow's attributes; settings that are created during an episode are not seen.
    If there are several (a policy's and a judge's, say), one has to match.

    Args:
        workflow: The workflow of a batch to train on.
        temperature: The trainer's.

    Raises:
        InvalidInput: One line with both temperatures.
    """
    found = {
        name: 0.0 if value.greedy else value.temperature
        for name, value in vars(workflow).items()
        if isinstance(value, GenerationHyperparameters)
    }
    if found and temperature not in found.values():
        name, other = next(iter(found.items()))
        raise errors.InvalidInput(
            f"{type(workflow).__name__}.{name} samples at temperature {other}: expected the "
            f"trainer's, {temperature}, since otherwise importance weights compare different "
            "distributions (make the workflow with config.gconfig, or set "
            f"gconfig.temperature={other})"
        )
