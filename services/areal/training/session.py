"""What the engines of one trainer share: services, step counter, checkpoints, metrics.

    RemoteSGLangEngine ── take batch of step s = finished + 1 ──┐
                                                                 v
                                                          TrainerSession ── buffer (ledger)
                                                                 ^      └── weight-sync
    FSDPPPOActor ── publish version s, finish step s ───────────┘

`areal_trainer` opens a session around the recipe's `main`; engines find it by `current_session()`.
Rank 0 talks to the services and broadcasts; every rank makes the same calls in the same order.

| wait                     | on          | unblocked by            | deadline                |
|--------------------------|-------------|-------------------------|-------------------------|
| version s-1 confirmed    | weight-sync | one server confirmed it | rollout.setup_timeout_s |
| batch of step s          | buffer      | B groups are complete   | rollout.batch_timeout_s |
| checkpoint being written | this disk   | checkpoint_writer.py    | CHECKPOINT_TIMEOUT_S    |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from areal import errors
from areal.chassis.logging import get_logger
from areal.chassis.waits import Waits
from areal.clients.buffer import BufferClient
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig
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
from areal.types import Purpose
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s

RPC_TIMEOUT_S = 30.0
RETRY_S = 120.0
"""A service may be away for this long (restart, outage of Redis) before the trainer gives up."""


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

    def __init__(
        self,
        config: GRPOConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
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
        self.last_taken_step = 0
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

    async def _connect(self) -> tuple[BufferClient, WeightSyncClient]:
        """Channels belong to the loop they are opened in: the bridge's."""
        endpoints = self.config.endpoints
        buffer = BufferClient(endpoints.buffer, self.security)
        buffer.patience_s = RETRY_S  # every call the trainer makes may be made again
        return buffer, WeightSyncClient(endpoints.weight_sync, self.security)

    # -- opening and closing -------------------------------------------------------------------

    def open(self) -> None:
        """Finds the checkpoint to resume from and registers with the ledger (all ranks)."""
        (self.resumed, self.incarnation, self.last_taken_step, self.served_version, unstored) = (
            self.on_rank0(self._register, tuple[Checkpoint | None, int, int, int, bool])
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

    def _register(self) -> tuple[Checkpoint | None, int, int, int, bool]:
        newest = self.folder.newest()
        if newest is not None and self.config.checkpoint.recover == "never":
            raise errors.ConfigError(
                f"checkpoint.recover 'never': {newest.path} exists; choose another trial_name"
            )
        digest = self._store_recipe()
        try:
            registered = self.ask_buffer(
                self.buffer.register_trainer(
                    resume_step=newest.step if newest else 0,
                    batch_size=self.config.train_dataset.batch_size,
                    max_head_offpolicyness=self.config.rollout.max_head_offpolicyness,
                    max_concurrent_rollouts=self.config.rollout.max_concurrent_rollouts,
                    recipe_digest=digest,
                    retry_for=RETRY_S,
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
        versions = self.ask_weight_sync(
            self.weight_sync.wait_confirmed(0, timeout=self.config.rollout.setup_timeout_s),
            "the first inference server to serve",
            timeout=self.config.rollout.setup_timeout_s + 5,
        )
        return (
            newest,
            registered.incarnation,
            registered.last_taken_step,
            versions.current_version,
            versions.unstored,
        )

    def _store_recipe(self) -> str:
        """The recipe's digest: from the registration on workers are given tasks under it."""
        if not self.config.recipe:
            return ""
        recipe = Recipe.read(Path(self.config.recipe))
        self.ask_buffer(
            self.buffer.put_recipe(recipe.file_name, recipe.source), "storing the recipe"
        )
        return recipe.digest

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
            if self.rank == 0:
                cancelled = self.ask_buffer(
                    self.buffer.cancel_tasks(
                        all_of_purpose=Purpose.TRAIN,
                        reason="run finished",
                        incarnation=self.incarnation,
                    ),
                    "cancelling surplus tasks",
                )
                self._log.info("finished", step=self.step, surplus_cancelled=cancelled)
        finally:
            _CURRENT.reset(token)

    def close(self) -> None:
        self.trace.end()
        with contextlib.suppress(errors.ArealError):
            self.call(self.buffer.close(), "closing", timeout=2)
            self.call(self.weight_sync.close(), "closing", timeout=2)
        self._checkpoints.close()
        self.bridge.close()

    def call(
        self,
        coroutine: Any,
        what: str,
        timeout: float = RETRY_S + RPC_TIMEOUT_S,
        *,
        on: str = "this process",
    ) -> Any:
        """Runs one coroutine from the recipe's thread; whoever waits is told on whom."""
        with self.waits.on("call", on, what):
            return self.bridge.call(coroutine, timeout=timeout, what=what, on=on)

    def ask_buffer(
        self, coroutine: Any, what: str, timeout: float = RETRY_S + RPC_TIMEOUT_S
    ) -> Any:
        return self.call(coroutine, what, timeout, on=f"buffer {self.buffer.address}")

    def ask_weight_sync(
        self, coroutine: Any, what: str, timeout: float = RETRY_S + RPC_TIMEOUT_S
    ) -> Any:
        return self.call(coroutine, what, timeout, on=f"weight-sync {self.weight_sync.address}")

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

    def took_batch(self, task_ids: Sequence[str], *, replay: bool) -> None:
        """Notes in batches.jsonl what the step in progress was given (rank 0)."""
        if self._files is not None:
            self._files.append_batch(
                step=self.step + 1,
                incarnation=self.incarnation,
                replay=replay,
                task_ids=task_ids,
            )

    def confirm_version(self) -> None:
        """Waits until one server has confirmed the weights of the last finished step (L5)."""
        started = time.monotonic()
        if self.rank == 0 and self.step <= self.published_version:
            self.ask_weight_sync(
                self.weight_sync.wait_confirmed(
                    self.step, timeout=self.config.rollout.setup_timeout_s
                ),
                f"a server to confirm version {self.step}",
                timeout=self.config.rollout.setup_timeout_s + 5,
            )
        self.row["confirm_seconds"] = time.monotonic() - started

    def publish(self, version: PolicyVersion) -> None:
        """Announces the weights of the step that ends (rank 0)."""
        with self.trace.phase_active():
            self.ask_weight_sync(
                self.weight_sync.publish_version(version, retry_for=RETRY_S),
                f"publishing version {version.version}",
                timeout=RETRY_S + patience_s(version.size_bytes),
            )
        self.published_version = self.served_version = version.version

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        """Announces weights that are about to be broadcast (rank 0)."""
        seats: Seats = self.ask_weight_sync(
            self.weight_sync.offer_version(version, offer, retry_for=RETRY_S),
            f"offering version {version.version}",
        )
        return seats

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
        # Not before its row: whoever resumes from it finds all rows up to it.
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

    def _commit_step(self, incarnation: int, step: int) -> None:
        self.ask_buffer(
            self.buffer.commit_step(
                incarnation=incarnation,
                step=step,
                oldest_retained_step=self.folder.list()[0].step,
                retry_for=RETRY_S,
            ),
            f"commit of step {step}",
        )
