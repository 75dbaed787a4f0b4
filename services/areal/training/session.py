"""What the engines of one trainer share: services, step counter, checkpoints, metrics.

    RemoteSGLangEngine ── take batch of step s = finished + 1 ──┐
                                                                 v
                                                          TrainerSession ── buffer (ledger)
                                                                 ^      └── weight-sync
    FSDPPPOActor ── publish version s, finish step s ───────────┘

`areal_trainer` opens a session around the recipe's `main`; engines find it by `current_session()`.
Its verbs (submit, take, publish, …) are synchronous: rank 0 asks the service, every rank gets the
answer or the error, so every rank makes the same calls in the same order. Only `fetch` is each
rank's own. What a call waits for is in `waits`, named.

| wait                     | on          | unblocked by            | deadline                |
|--------------------------|-------------|-------------------------|-------------------------|
| version s-1 confirmed    | weight-sync | one server confirmed it | rollout.setup_timeout_s |
| batch of step s          | buffer      | B groups are complete   | 3 x request_timeout_s   |
| checkpoint being written | this disk   | checkpoint_writer.py    | CHECKPOINT_TIMEOUT_S    |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from areal import errors
from areal.chassis.logging import get_logger
from areal.chassis.waits import Waits
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.trainer import BufferTrainer
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig
from areal.protocol.leases import Take, TaskRecord
from areal.recipe import Recipe
from areal.security import Security
from areal.training.bridge import AsyncBridge
from areal.training.checkpoint_writer import Checkpointable, CheckpointWriter
from areal.training.checkpoints import Checkpoint, CheckpointFolder
from areal.training.progress_log import ProgressLog
from areal.training.ranks import Ranks
from areal.training.run_files import RunFiles
from areal.training.status import TrainerStatus
from areal.training.step_trace import StepTrace
from areal.types import Purpose, Task, TaskState, TrajectoryGroup
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s
from areal.weights.servers import SyncStatus

T = TypeVar("T")

RPC_TIMEOUT_S = 30.0
RETRY_S = 120.0
"""A service may be away for this long (restart, outage of Redis) before the trainer gives up."""
POLL_S = 10.0
"""One long poll; the ranks meet after each, so none idles in a collective for longer."""


class TrainerStopped(BaseException):
    """SIGTERM was received; unwinds the recipe so that the session can save and leave."""


_CURRENT: ContextVar[TrainerSession] = ContextVar("areal_trainer_session")


def current_session() -> TrainerSession:
    """The session around the running recipe.

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
    """One trainer's life between registration and its last commit."""

    def __init__(self, config: GRPOConfig, *, rank: int = 0, world_size: int = 1) -> None:
        """Connects lazily; `open()` registers.

        Args:
            config: The resolved experiment.
            rank: Of this process.
            world_size: Trainer processes.
        """
        super().__init__(rank, world_size)
        self.config = config
        self.security = Security.load(config.security)
        self.bridge = AsyncBridge()
        self.waits = Waits()
        self.trace = StepTrace(rank)
        self.buffer, self.weight_sync = self.call(self._connect(), "opening channels")
        self.folder = CheckpointFolder(config.run_dir / "checkpoints", config.checkpoint.keep)
        self.status = TrainerStatus(config.total_train_steps, world_size)
        self.step = 0
        """Finished steps."""
        self.incarnation = 0
        self.resumed: Checkpoint | None = None
        self.published_version = 0
        self.served_version = 0
        """What servers are brought to: one more where its trainer died before it was stored."""
        self.row: dict[str, Any] = {}
        """The metrics row of the step in progress."""
        self.batch_tasks: list[str] = []
        """The task of each group of this rank's share, by `group_index`."""
        self.checkpoint_extra: dict[str, Callable[[], Any]] = {}
        """Named providers of what a checkpoint carries beside tensors (the dataset cursor)."""
        self.before_first_step: Callable[[], None] | None = None
        """Puts back what a resumed run must not have changed before its loop."""
        self.stop_requested = False
        self.waits.watch(self.status.waits)
        self._checkpoints = CheckpointWriter(
            self, self.folder, lambda step: self._commit_step(self.incarnation, step)
        )
        self.waits.watch(self._checkpoints.waits)
        self._files: RunFiles | None = None
        self._progress = ProgressLog(config.total_train_steps)
        self._step_started = time.monotonic()
        self._log = get_logger("areal.training.session")

    async def _connect(self) -> tuple[BufferTrainer, WeightSyncClient]:
        """Channels belong to the loop they are opened in: the bridge's."""
        endpoints = self.config.endpoints
        buffer = BufferConnection(endpoints.buffer, self.security, retry_s=RETRY_S)
        weight_sync = WeightSyncClient(endpoints.weight_sync, self.security, retry_s=RETRY_S)
        return BufferTrainer(buffer), weight_sync

    # -- opening and closing -------------------------------------------------------------------

    def open(self) -> None:
        """Finds the checkpoint to resume from and registers with the ledger (all ranks)."""
        self.resumed, self.incarnation, self.served_version, unstored = self.on_rank0(
            self._register, tuple[Checkpoint | None, int, int, bool]
        )
        # One that its trainer's death left unstored is made, and published, again.
        self.published_version = self.served_version - int(unstored)
        self.step = self._checkpoints.last_step = self.resumed.step if self.resumed else 0
        if self.rank == 0:
            files = self._files = RunFiles(self.config.run_dir, self.step)
            self.status.opened(self.incarnation, self.step, files.rows, files.evaluations())
        self._log.info(
            "registered", incarnation=self.incarnation, resume_step=self.step, rank=self.rank
        )

    def _register(self) -> tuple[Checkpoint | None, int, int, bool]:
        """What to resume from, the incarnation, the version served, whether it is unstored."""
        newest = self.folder.newest()
        digest = ""
        if self.config.recipe:  # from the registration on workers are given tasks under it
            recipe = Recipe.read(Path(self.config.recipe))
            self.put_recipe(recipe)
            digest = recipe.digest
        try:
            registered = self._ask_buffer(
                lambda: self.buffer.register_trainer(
                    resume_step=newest.step if newest else 0,
                    batch_size=self.config.train_dataset.batch_size,
                    max_head_offpolicyness=self.config.rollout.max_head_offpolicyness,
                    max_concurrent_rollouts=self.config.rollout.max_concurrent_rollouts,
                    recipe_digest=digest,
                ),
                "registration with the buffer",
            )
        except errors.WrongStep as error:
            raise errors.InvalidInput(
                f"{error}; the newest whole checkpoint in {str(self.folder.root)!r} is "
                f"{newest.path.name if newest else 'none'}: bring a newer one back, or choose "
                "another trial_name"
            ) from None
        if registered.retried:
            self._log.info("failed_tasks_retried", tasks=registered.retried)
        self.folder.clean()
        if newest is not None:  # perhaps it was killed between its checkpoint and the commit
            self._commit_step(registered.incarnation, newest.step)
        versions = self._wait_confirmed(0, "the first inference server to serve")
        return newest, registered.incarnation, versions.current_version, versions.unstored

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
                raise
            self.save_checkpoint()
            cancelled = self._ask_buffer(
                lambda: self.buffer.tasks.cancel_tasks(
                    all_of_purpose=Purpose.TRAIN,
                    reason="run finished",
                    incarnation=self.incarnation,
                ),
                "cancelling surplus tasks",
            )
            if self.rank == 0:
                self._log.info("finished", step=self.step, surplus_cancelled=cancelled)
        finally:
            _CURRENT.reset(token)

    def close(self) -> None:
        self.trace.end()
        with contextlib.suppress(errors.ArealError):
            self.call(self.buffer.connection.close(), "closing", timeout=2)
            self.call(self.weight_sync.close(), "closing", timeout=2)
        self._checkpoints.close()
        self.bridge.close()

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        what: str,
        timeout: float = RETRY_S + RPC_TIMEOUT_S,
        *,
        on: str = "this process",
    ) -> T:
        """Runs one coroutine from the recipe's thread; `waits` names it meanwhile."""
        with self.waits.on("call", on, what):
            return self.bridge.call(coroutine, timeout=timeout, what=what, on=on)

    # -- what the buffer is asked --------------------------------------------------------------

    def _ask_buffer(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        timeout: float = RETRY_S + RPC_TIMEOUT_S,
        *,
        shape: Any = Any,
    ) -> T:
        on = f"buffer {self.buffer.connection.address}"
        return self.on_rank0(lambda: self.call(make(), what, timeout, on=on), shape)

    def put_recipe(self, recipe: Recipe) -> None:
        """Stores a recipe, from which workers rebuild its workflows and rewards."""
        self._ask_buffer(
            lambda: self.buffer.recipes.put_recipe(recipe.file_name, recipe.source),
            "storing the recipe",
        )

    def submit(self, tasks: Sequence[Task], *, seal: bool = False) -> int:
        """Queues tasks; with `seal` no more of the rows follow.

        Returns:
            How many the ledger did not have already.

        Raises:
            CapacityExceeded: It is full; with `retry_after_s`, for now.
        """
        accepted = self._ask_buffer(
            lambda: self.buffer.tasks.submit_tasks(tasks, incarnation=self.incarnation, seal=seal),
            f"submission of {len(tasks)} tasks",
        )
        return sum(accepted)

    def train_counts(self) -> dict[TaskState, int]:
        """The numbers of the trial's train tasks by state."""

        async def ask() -> dict[TaskState, int]:
            return (await self.buffer.tasks.get_stats()).train_counts

        return self._ask_buffer(ask, "ledger statistics", shape=dict[TaskState, int])

    def states(self, task_ids: Sequence[str]) -> dict[str, tuple[TaskState, int]]:
        """State and step (0: of no batch) of each task that the ledger knows."""

        async def ask() -> dict[str, tuple[TaskState, int]]:
            records = await self.buffer.tasks.get_tasks(task_ids)
            return {record.task.task_id: (record.state, record.step) for record in records}

        return self._ask_buffer(ask, "task states", shape=dict[str, tuple[TaskState, int]])

    def take(
        self,
        task_ids: Sequence[str] = (),
        *,
        max_wait_s: float = POLL_S,
        refill_below: int = 0,
    ) -> Take:
        """Asks for the batch of the next step; see `BufferTrainer.take_batch`."""
        step = self.step + 1
        return self._ask_buffer(
            lambda: self.buffer.take_batch(
                self.incarnation,
                step,
                max_wait_s,
                task_ids=task_ids,
                with_groups=self.world_size == 1,
                refill_below=refill_below,
            ),
            f"batch of step {step}",
            shape=Take,
        )

    def fetch(self, taken: Take) -> list[TrajectoryGroup]:
        """This rank's share of a batch that was taken; describes the batch in the step's row."""
        from areal.algorithms.packing import assign_groups

        self.trace.taking()
        shares = assign_groups([sum(g.lengths) for g in taken.groups], self.world_size)
        mine = [taken.groups[i].task_id for i in shares[self.rank]]
        groups = self.call(
            self.buffer.fetch_groups(self.incarnation, self.step + 1, mine),
            f"{len(mine)} groups of step {self.step + 1}",
            on=f"buffer {self.buffer.connection.address}",
        )
        self.batch_tasks = mine
        if self._files is not None:
            self._files.append_batch(
                step=self.step + 1,
                incarnation=self.incarnation,
                replay=taken.replay,
                task_ids=[g.task_id for g in taken.groups],
            )
        self.trace.took(groups, taken)
        staleness = [self.step - g.head_version for g in taken.groups]
        self.row.update(
            groups=len(taken.groups),
            samples=sum(len(g.lengths) for g in taken.groups),
            tokens_total=sum(sum(g.lengths) for g in taken.groups),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            replay=taken.replay,
            queued=taken.queued,
        )
        return groups

    def wait_ended(self, task_ids: Sequence[str], max_wait_s: float, what: str) -> list[str]:
        """Those of at most 10,000 tasks that have ended; waits for the first of them.

        Raises:
            NotFound: One was released, or never submitted.
        """
        return self._ask_buffer(
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

        self._ask_buffer(read, what, timeout)

    def pause(self, seconds: float, what: str) -> None:
        """Lets time pass for the buffer to make `what` possible."""
        self._ask_buffer(lambda: asyncio.sleep(seconds), what)

    def _commit_step(self, incarnation: int, step: int) -> None:
        """Tells the ledger of a whole checkpoint (rank 0, in any thread)."""
        self.call(
            self.buffer.commit_step(
                incarnation=incarnation,
                step=step,
                oldest_retained_step=self.folder.list()[0].step,
            ),
            f"commit of step {step}",
            on=f"buffer {self.buffer.connection.address}",
        )

    # -- what weight-sync is asked -------------------------------------------------------------

    def _ask_weight_sync(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        what: str,
        timeout: float = RETRY_S + RPC_TIMEOUT_S,
    ) -> T:
        on = f"weight-sync {self.weight_sync.address}"
        return self.call(make(), what, timeout, on=on)

    def _wait_confirmed(self, version: int, what: str) -> SyncStatus:
        limit = self.config.rollout.setup_timeout_s
        return self._ask_weight_sync(
            lambda: self.weight_sync.wait_confirmed(version, timeout=limit), what, limit + 5
        )

    def confirm_version(self) -> None:
        """Waits until one server has confirmed the weights of the last finished step (L5)."""

        def wait() -> None:
            if self.step <= self.published_version:
                self._wait_confirmed(self.step, f"a server to confirm version {self.step}")

        started = time.monotonic()
        self.on_rank0(wait)
        self.row["confirm_seconds"] = time.monotonic() - started

    def publish(self, version: PolicyVersion) -> None:
        """Announces the weights of the step that ends (rank 0)."""
        with self.trace.phase_active():
            self._ask_weight_sync(
                lambda: self.weight_sync.publish_version(version),
                f"publishing version {version.version}",
                RETRY_S + patience_s(version.size_bytes),
            )
        self.published_version = self.served_version = version.version

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        """Announces weights that are about to be broadcast (rank 0)."""
        return self._ask_weight_sync(
            lambda: self.weight_sync.offer_version(version, offer),
            f"offering version {version.version}",
        )

    # -- steps ---------------------------------------------------------------------------------

    def attach(self, actor: Checkpointable) -> None:
        """The actor whose state a checkpoint holds.

        Raises:
            InvalidInput: There is one already.
        """
        if self._checkpoints.actor is not None:
            raise errors.InvalidInput(
                "a second trainable actor: expected one, since a checkpoint holds one "
                "(a frozen model is FSDPPPOActor(config.ref))"
            )
        self._checkpoints.actor = actor

    def begin_step(self) -> None:
        """Starts the clock and row of the next step."""
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        self._step_started = time.monotonic()
        self.row = {"step": self.step + 1, "incarnation": self.incarnation}
        self.status.waiting(f"batch of step {self.step + 1}")
        self.trace.begin(self.step + 1)

    def finish_step(self) -> None:
        """Ends step `self.step + 1`: row, checkpoint policy, commit, stop request."""
        self.trace.end()
        self.step += 1
        self._checkpoints.settle(wait=False)
        frequency = self.config.checkpoint.freq_steps
        if frequency and self.step % frequency == 0:
            started = time.monotonic()
            self._snapshot()
            self.row["checkpoint_seconds"] = time.monotonic() - started
        if self.rank == 0 and self._files is not None:
            self.row["policy_version"] = self.step
            self.row["step_seconds"] = time.monotonic() - self._step_started
            self.row["time"] = time.time()
            self._files.append_row(self.row)
            self.status.finished_step(self.step, self.row)
            self._progress.finished_step(self.row)
        # Not before its row: a run that resumes from it finds all rows up to it.
        self._checkpoints.seal()
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Unwinds the recipe on every rank once one has seen SIGTERM."""
        if self.any_rank(self.stop_requested):
            raise TrainerStopped

    def record(self, name: str, value: Any) -> None:
        """Writes one named result into trainer.json (rank 0)."""
        if self._files is not None:
            self._files.record(name, value)
            self._log.info("result", **{name: value})

    def result(self, name: str) -> Any:
        """A result recorded before, also by an earlier incarnation; the same on every rank."""
        return self.on_rank0(lambda: self._files.results.get(name) if self._files else None)

    # -- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Saves the current step unless saved already; returns once it is committed."""
        self._checkpoints.settle(wait=True)
        self._snapshot()
        self._checkpoints.seal()
        self._checkpoints.settle(wait=True)

    def _snapshot(self) -> None:
        """Begins a checkpoint of the current step, unless there is one."""
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
