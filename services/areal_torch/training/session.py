"""What the engines of one trainer share: services, step counter, checkpoints, metrics.

    RemoteSGLangEngine ── take batch of step s = finished + 1 ──┐
                                                                 v
                                                          TrainerSession ── ledger (buffer)
                                                                 ^      └── weight-sync
    FSDPPPOActor ── publish version s, finish step s ───────────┘

`areal_trainer` opens a session around the recipe's `main`; engines find it by `current_session()`.
`ledger` has the buffer's calls (submit, take, …); publishing and steps are here. `waits` lists what
a call waits for.

| wait                     | on          | unblocked by            | deadline                |
|--------------------------|-------------|-------------------------|-------------------------|
| version s-1 published    | its threads | background_publish.py   | by the model's bytes    |
| version s-1 confirmed    | weight-sync | one server confirmed it | rollout.setup_timeout_s |
| batch of step s          | buffer      | B groups are complete   | 3 x request_timeout_s   |
| checkpoint being written | this disk   | checkpoint_writer.py    | 600 s and 1 s a 64 MiB  |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal import errors
from areal.chassis.logging import get_logger
from areal.chassis.waits import Waits
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.trainer import BufferTrainer
from areal.clients.weight_sync import WeightSyncClient
from areal.config.allocation import Layout, Sharing, parse_allocation
from areal.config.experiment import GRPOConfig
from areal.config.services import rollouts_url
from areal.protocol.leases import Discarded, Take
from areal.recipe import Recipe, called_at
from areal.runs.checkpoints import Checkpoint, CheckpointFolder
from areal.runs.metric_names import plain_numbers
from areal.runs.rollouts.writer import RolloutWriter
from areal.runs.run_files import EVALUATIONS, RunFiles, best_step
from areal.runs.status import ProgressLog, TrainerStatus
from areal.security import Security
from areal.types import TrajectoryGroup
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s
from areal.weights.servers import SyncStatus
from areal_torch.training.background_publish import BackgroundPublish
from areal_torch.training.batch_rewards import describe_rewards
from areal_torch.training.bridge import CALL_S, RETRY_S, AsyncBridge
from areal_torch.training.checkpoint_writer import Checkpointable, CheckpointWriter
from areal_torch.training.gpu_turn import GpuTurn
from areal_torch.training.ledger import TrainerLedger
from areal_torch.training.ranks import Ranks
from areal_torch.training.step_trace import StepTrace
from areal_torch.training.tracker import StepTracker
from areal_torch.training.turn_lease import TurnLease

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


class TrainerStopped(BaseException):
    """SIGTERM was received; unwinds the recipe so that the session can save and leave."""


class EvaluationEnded(BaseException):
    """A recipe that only evaluates has asked for its first batch; unwinds it."""


_CURRENT: ContextVar[TrainerSession] = ContextVar("areal_trainer_session")


def current_session() -> TrainerSession:
    """Returns the session around the running recipe.

    Raises:
        InvalidInput: The recipe was not started by `areal run` or `areal-trainer`.
    """
    session = _CURRENT.get(None)
    if session is None:
        raise errors.InvalidInput(
            "no trainer session: start this recipe with `areal run RECIPE` (or areal-trainer)"
        )
    return session


class TrainerSession(Ranks):
    """A trainer's session, between registration and its last commit."""

    only_evaluates = False
    """Whether the recipe ends when it asks for a batch (`areal eval`)."""
    noted: frozenset[str] = frozenset()
    """Names in the row of the step in progress that the recipe has recorded."""

    def __init__(self, config: GRPOConfig, *, rank: int = 0, world_size: int = 1) -> None:
        """Connects lazily; `open()` registers.

        Args:
            config: The resolved experiment.
            rank: This process's rank.
            world_size: Trainer processes.
        """
        super().__init__(rank, world_size)
        self.config = config
        self.security = Security.load(config.security)
        self.waits = Waits()
        self.bridge = AsyncBridge(self.waits)
        self.trace = StepTrace(rank)
        buffer, self.weight_sync = self.bridge.call(self._connect(), "opening channels")
        self.ledger = TrainerLedger(self, self.bridge, buffer)
        self.folder = CheckpointFolder(config.run_dir / "checkpoints", config.checkpoint.keep)
        self.status = TrainerStatus(config.total_train_steps, world_size)
        self.step = 0
        """Number of finished steps."""
        self.resumed: Checkpoint | None = None
        self.published_version = 0
        self.served_version = 0
        """The version that servers are brought to: one more than stored if the previous trainer
        died before storing it."""
        self.confirmed_version = -1
        """The newest of this incarnation that a server is known to have confirmed (rank 0)."""
        self.pair_cost = 0.0
        """The model's cost of long sequences; see `areal_torch.algorithms.packing.cost`."""
        self.row: dict[str, Any] = {}
        """The metrics row of the step in progress."""
        self.batch_tasks: list[str] = []
        """The task of each group of this rank's share, by `group_index`."""
        self.checkpoint_extra: dict[str, Callable[[], Any]] = {}
        """Named providers of what a checkpoint carries beside tensors (the dataset cursor)."""
        self.before_first_step: Callable[[], None] | None = None
        """Called before the first step: restores what a resumed run must not have changed before
        its loop."""
        self.batch_at = ""
        """Where the recipe took the batch of the step in progress; "": it has not taken one yet."""
        self.stop_requested = False
        self.waits.watch(self.status.waits)
        self._checkpoints = CheckpointWriter(self, self.folder, self._commit)
        self.waits.watch(self._checkpoints.waits)
        self.publishing = BackgroundPublish(self)
        self.waits.watch(self.publishing.waits)
        self._layout = Layout.parse(config.actor.layout or f"d{world_size}")
        # Ranks that share matrices or the tokens of a sequence train on the same groups.
        writes = rank % self._layout.per_share == 0
        self._rollouts = RolloutWriter(
            config.run_dir / "rollouts",
            rank,
            int(config.checkpoint.rollouts_gib * 2**30) if writes else 0,
            config.model.path,
            mirror=rollouts_url(config.weight_sync.path),
        )
        self._batch: list[TrajectoryGroup] = []
        """This rank's share of the step in progress."""
        self.advantages: Callable[[], NDArray[np.float32]] | None = None
        """Advantages of the batch's tokens, float32 [T]; the actor sets them."""
        self._files: RunFiles | None = None
        self._tracker: StepTracker | None = None
        self._progress = ProgressLog(config.total_train_steps)
        self._step_started = time.monotonic()
        self._log = get_logger(__name__)

    async def _connect(self) -> tuple[BufferTrainer, WeightSyncClient]:
        """Channels belong to the loop they are opened in: the bridge's."""
        endpoints = self.config.endpoints
        buffer = BufferConnection(endpoints.buffer, self.security, retry_s=RETRY_S)
        weight_sync = WeightSyncClient(endpoints.weight_sync, self.security, retry_s=RETRY_S)
        return BufferTrainer(buffer), weight_sync

    @cached_property
    def turn(self) -> GpuTurn:
        """Returns whose turn it is on GPUs that trainer and servers share."""
        turns = parse_allocation(self.config.allocation_mode).sharing is Sharing.ALTERNATING
        lease = TurnLease(self.bridge, self.weight_sync, lambda: self.incarnation)
        return GpuTurn(self, lease if turns else None, self.config.setup_timeout_s)

    @property
    def incarnation(self) -> int:
        """Grows with each start of this trial's trainer; 0 before `open`."""
        return self.ledger.incarnation

    # -- opening and closing -------------------------------------------------------------------

    def open(self) -> None:
        """Finds the checkpoint to resume from and registers with the ledger (all ranks)."""
        self.resumed = self._newest_whole()
        self.on_rank0(self._start_tracker)
        self.ledger.incarnation, self.served_version, unstored = self.on_rank0(
            self._register, tuple[int, int, bool]
        )
        # One that its trainer's death left unstored is made, and published, again.
        self.published_version = self.served_version - int(unstored)
        self.step = self._checkpoints.last_step = self.resumed.step if self.resumed else 0
        if self.rank == 0:
            files = self._files = RunFiles(self.config.run_dir, self.step)
            self.folder.find_best = lambda steps: best_step(
                files.results.get(EVALUATIONS) or [], steps
            )
            self.status.opened(self.incarnation, self.step, files.rows, files.evaluations())
        self._log.info(
            "registered", incarnation=self.incarnation, resume_step=self.step, rank=self.rank
        )

    def _start_tracker(self) -> None:
        self._tracker = StepTracker(self.config, self.resumed.step if self.resumed else 0)

    def _newest_whole(self) -> Checkpoint | None:
        """Returns the checkpoint to resume from; each rank checks a share of its files."""
        listed = self.on_rank0(self.folder.list, list[Checkpoint])
        for each in reversed(listed):
            if self.all_ranks(self.folder.intact(each.path, self.rank, self.world_size)):
                return each
        return None

    def _register(self) -> tuple[int, int, bool]:
        """The incarnation, the version served, whether it is unstored."""
        newest = self.resumed
        digest = ""
        if self.config.recipe:  # from the registration on workers are given tasks under it
            recipe = Recipe.read(Path(self.config.recipe))
            self.ledger.put_recipe(recipe)
            digest = recipe.digest
        try:
            registered = self.ledger.register(self.config, newest.step if newest else 0, digest)
        except errors.WrongStep as error:
            raise errors.InvalidInput(
                f"{error}; the newest complete checkpoint in {str(self.folder.root)!r} is "
                f"{newest.path.name if newest else 'none'}: restore a newer one, or choose "
                "another trial_name"
            ) from None
        if registered.retried:
            self._log.info("failed_tasks_retried", tasks=registered.retried)
        self.folder.clean()
        self._rollouts.resume(newest.step if newest else 0)
        if newest is not None:  # perhaps it was killed between its checkpoint and the commit
            self._commit(newest.step)
        self.turn.free()  # the previous incarnation may have died in its turn
        versions = self._wait_confirmed(0, "the first inference server to serve")
        return registered.incarnation, versions.current_version, versions.unstored

    @contextlib.contextmanager
    def active(self) -> Iterator[TrainerSession]:
        """Makes this the current session; on a clean exit (or SIGTERM) saves and commits."""
        token = _CURRENT.set(self)
        try:
            try:
                yield self
            except TrainerStopped:
                self._log.info("stopping", step=self.step)
                self.save_checkpoint()
                self.publishing.settle()
                raise
            self.save_checkpoint()
            self.publishing.settle()
            self._finish()
        finally:
            _CURRENT.reset(token)

    def _finish(self) -> None:
        """The recipe has returned, and its last step is saved."""
        cancelled = self.ledger.cancel_train_tasks("run finished")
        self._rollouts.keep(
            [],
            step=self.step + 1,
            incarnation=self.incarnation,
            advantages=None,
            discarded=self._discarded(self.step + 1),
        )
        self._rollouts.settle()
        if self.rank == 0:
            self._log.info("finished", step=self.step, surplus_cancelled=cancelled)

    def close(self) -> None:
        self.trace.end()
        with contextlib.suppress(errors.ArealError):
            if self.rank == 0 and self.incarnation:
                self.turn.free(timeout=2)
        with contextlib.suppress(errors.ArealError):
            self.bridge.call(self.ledger.buffer.connection.close(), "closing", timeout=2)
            self.bridge.call(self.weight_sync.close(), "closing", timeout=2)
        self._checkpoints.close()
        self._rollouts.close()
        if self._files is not None:
            self._files.close()
        if self._tracker is not None:
            self._tracker.close()
        self.bridge.close()

    # -- what weight-sync is asked -------------------------------------------------------------

    def _ask_weight_sync(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        timeout: float = CALL_S,
    ) -> T:
        on = f"weight-sync {self.weight_sync.address}"
        return self.bridge.call(make(), what, timeout, on=on)

    def _wait_confirmed(self, version: int, what: str) -> SyncStatus:
        limit = self.config.setup_timeout_s
        return self._ask_weight_sync(
            lambda: self.weight_sync.wait_confirmed(version, timeout=limit), what, limit + 5
        )

    def confirm_version(self) -> None:
        """Waits until one server has confirmed the weights of the last finished step (L5).

        The weights may still be on their way. With GPUs in turns, it is the servers' turn then,
        unless one has confirmed them before.
        """

        def wait() -> None:
            if self.step <= self.published_version:
                self._wait_confirmed(self.step, f"a server to confirm version {self.step}")
                self.confirmed_version = max(self.confirmed_version, self.step)

        started = time.monotonic()
        self.publishing.settle()
        if self.turn.shared and self.on_rank0(lambda: self.confirmed_version < self.step):
            self.turn.give()
        self.on_rank0(wait)
        waited = self.row.get("time/confirm", 0.0) + time.monotonic() - started
        self.row["time/confirm"] = waited

    def publish(self, version: PolicyVersion) -> None:
        """Announces weights that are complete (rank 0, in any thread)."""
        self._ask_weight_sync(
            lambda: self.weight_sync.publish_version(version),
            f"publishing version {version.version}",
            RETRY_S + patience_s(version.size_bytes),
        )
        self.published_version = self.served_version = version.version
        self.bridge.start(self._tell_confirmed(version.version))

    async def _tell_confirmed(self, version: int) -> None:
        """The ledger leases groups from a version once a server serves it, and not before.

        So nothing waits for a version that this process takes with it when it dies.
        """
        try:
            limit = self.config.setup_timeout_s
            await self.weight_sync.wait_confirmed(version, timeout=limit)
            self.confirmed_version = version
            await self.ledger.buffer.confirm_version(self.incarnation, version)
        except errors.ArealError as error:  # the next batch, or `confirm_version`, says so again
            self._log.warning("confirmation_not_reported", version=version, cause=str(error))

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        """Announces weights that are about to be broadcast (rank 0, in any thread)."""
        return self._ask_weight_sync(
            lambda: self.weight_sync.offer_version(version, offer),
            f"offering version {version.version}",
        )

    # -- steps ---------------------------------------------------------------------------------

    def attach(self, actor: Checkpointable) -> None:
        """Sets the actor whose state a checkpoint holds.

        Raises:
            InvalidInput: An actor is attached already.
        """
        if self._checkpoints.actor is not None:
            raise errors.InvalidInput(
                "a second trainable actor: expected one, because a checkpoint contains one "
                "(a frozen model is FSDPPPOActor(config.ref))"
            )
        self._checkpoints.actor = actor

    @property
    def actor(self) -> Checkpointable | None:
        """The actor that was attached."""
        return self._checkpoints.actor

    def end_evaluation(self) -> None:
        """Ends a recipe that only evaluates; called when it asks for a batch.

        Raises:
            InvalidInput: It has not evaluated anything.
        """
        if not self.only_evaluates:
            return
        if not self.result(EVALUATIONS):
            raise errors.InvalidInput(
                f"{called_at()}: areal eval: main asks for a batch before it has evaluated: "
                "expected rollout.evaluate(rows, workflow, name=NAME) before the training loop"
            )
        raise EvaluationEnded

    def begin_step(self) -> None:
        """Starts the clock and row of the next step.

        Raises:
            InvalidInput: The step has a batch already, so its weights were never uploaded.
        """
        if self.batch_at:
            raise errors.InvalidInput(
                f"{called_at()}: step {self.step + 1} has a batch already, taken at "
                f"{self.batch_at}: expected upload_weights, which ends a step, in between"
            )
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        self._step_started = time.monotonic()
        self.row = {"step": self.step + 1, "incarnation": self.incarnation}
        self.noted = frozenset()
        self._batch, self.advantages = [], None
        self.status.waiting(f"batch of step {self.step + 1}")
        self.trace.begin(self.step + 1)

    def fetch(self, taken: Take) -> list[TrajectoryGroup]:
        """Returns this rank's share of a taken batch; describes the batch in the step's row."""
        from areal_torch.algorithms.packing import assign_groups, cost

        self.trace.taking()
        costs = [cost(g.lengths, self.pair_cost) for g in taken.groups]
        shares = assign_groups(costs, self._layout.data)
        mine = [taken.groups[i].task_id for i in shares[self.rank // self._layout.per_share]]
        groups = self.ledger.fetch(self.step + 1, mine)
        self.batch_at = called_at()
        self.batch_tasks, self._batch = mine, groups
        if self._files is not None:
            self._files.append_batch(
                step=self.step + 1,
                incarnation=self.incarnation,
                replay=taken.replay,
                task_ids=[g.task_id for g in taken.groups],
            )
        self.trace.took(groups, taken)
        staleness = [self.step - g.head_version for g in taken.groups]
        self.row |= {
            "groups": len(taken.groups),
            "samples": sum(len(g.lengths) for g in taken.groups),
            "tokens_total": sum(sum(g.lengths) for g in taken.groups),
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
            "replay": taken.replay,
            "queued": taken.queued,
            **describe_rewards(groups, self.world_size),
        }
        return groups

    def finish_step(self) -> None:
        """Ends step `self.step + 1`: writes its row, saves and commits if due, stops if asked."""
        self.trace.end()
        self.batch_at = ""
        self.step += 1
        self._rollouts.keep(
            self._batch,
            step=self.step,
            incarnation=self.incarnation,
            advantages=self.advantages,
            discarded=self._discarded(self.step),
        )
        self._checkpoints.settle(wait=False)
        frequency = self.config.checkpoint.freq_steps
        if frequency and self.step % frequency == 0:
            started = time.monotonic()
            self._snapshot()
            self.row["time/checkpoint"] = time.monotonic() - started
        if self.rank == 0 and self._files is not None:
            self.row["policy_version"] = self.step
            self.row["time/step"] = time.monotonic() - self._step_started
            self.row["time"] = time.time()
            self._files.append_row(self.row)
            if self._tracker is not None:
                self._tracker.log(self.step, self.row)
            self.status.finished_step(self.step, self.row)
            self._progress.finished_step(self.row)
            for finding in self._files.new_findings():
                self._log.warning("may_not_learn", step=self.step, **finding.as_dict())
        # Not before its row: a run that resumes from it finds all rows up to it.
        self._checkpoints.seal()
        self.raise_if_stopped()

    def _discarded(self, step: int) -> Callable[[], Iterator[list[Discarded]]] | None:
        """Returns what ended untrained before a step's batch; called by a thread of rank 0."""
        return (lambda: self.ledger.discarded(step)) if self.rank == 0 else None

    def raise_if_stopped(self) -> None:
        """Unwinds the recipe on every rank once one has seen SIGTERM."""
        if self.any_rank(self.stop_requested):
            raise TrainerStopped

    def record(self, name: str, value: Any, tracked: Mapping[str, float] | None = None) -> None:
        """Writes one named result into trainer.json (rank 0).

        A tracker gets it under the same name, or gets `tracked` instead.
        """
        if self._files is not None:
            self._files.record(name, value)
            self._log.info("result", **{name: value})
            if self._tracker is not None:
                self._tracker.log(self.step, {name: value} if tracked is None else tracked)

    def result(self, name: str) -> Any:
        """Returns a recorded result, even of an earlier incarnation; the same on every rank."""
        return self.on_rank0(lambda: self._files.results.get(name) if self._files else None)

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Puts a recipe's own numbers into the row of the step in progress (that of rank 0 counts).

        Raises:
            InvalidInput: No step is in progress, or a name or value cannot be in a row.
        """
        who = f"{called_at()}: record"
        if not self.batch_at:
            raise errors.InvalidInput(
                f"{who}: no step has a batch: expected a call between prepare_batch and "
                "upload_weights, whose row it is for"
            )
        found = plain_numbers(numbers, who)
        if taken := found.keys() & (self.row.keys() - self.noted):
            raise errors.InvalidInput(
                f"{who}: {min(taken)!r} is in the step's row already, as a statistic of the loss "
                "or of the batch: expected another name"
            )
        self.noted = self.noted.union(found)
        self.row.update(found)

    def check_batch(self) -> None:
        """Raises InvalidInput at the end of a step that has no batch."""
        if not self.batch_at:
            raise errors.InvalidInput(
                f"{called_at()}: upload_weights: step {self.step + 1} has no batch: expected "
                "prepare_batch first, since each call of upload_weights ends a step"
            )

    def check_complete(self, main: str, ended: object) -> None:
        """Refuses the end of a recipe's `main` before its last step; saves the steps it has taken.

        Args:
            main: The function's file and line.
            ended: What it returned. A sentence is the reason for an early end, and is recorded.

        Raises:
            InvalidInput: A step has no end, or steps are missing. A recipe that trains no model,
                such as one that only evaluates, has no steps to take.
        """
        planned = self.config.total_train_steps
        if self.batch_at:
            raise errors.InvalidInput(
                f"{self.batch_at}: main ended in step {self.step + 1}, whose batch was taken here: "
                "expected upload_weights, which ends a step"
            )
        if self.step >= planned or self.actor is None or self.only_evaluates:
            return
        if isinstance(ended, str) and ended:
            self.record("ended_early", ended)
            return
        self.save_checkpoint()
        self.publishing.settle()
        raise errors.InvalidInput(
            f"{main}: main ended after {self.step} of {planned} steps (total_train_steps): "
            "expected all of them; to end earlier on purpose, return the reason as a string"
        )

    # -- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Saves the current step unless saved already; returns once it is committed."""
        self._checkpoints.settle(wait=True)
        self._snapshot()
        self._checkpoints.seal()
        self._checkpoints.settle(wait=True)

    def _commit(self, step: int) -> None:
        self.ledger.commit(step, self.folder.list()[-self.folder.keep :][0].step)

    def _snapshot(self) -> None:
        """Begins a checkpoint of the current step, unless there is one."""
        self._rollouts.settle()  # what it commits is kept
        self._checkpoints.snapshot(
            self.step,
            self.incarnation,
            lambda: {
                "step": self.step,
                "incarnation": self.incarnation,
                "resumed_from": self.resumed.step if self.resumed else 0,
                **{name: provide() for name, provide in self.checkpoint_extra.items()},
            },
        )
