"""Writes a checkpoint while training continues: it delays its step only by a copy.

    snapshot ──> written, by every rank ──> sealed, by rank 0 ──> committed, at the end of a step
    (copy of     (threads)                  (a thread: digests,   (all ranks agree that it is whole;
     the state)                              fsync, rename)        that thread tells the ledger
                                                                   beside the next step)

| state      | consumes      | waits for                  | unblocked by                       |
|------------|---------------|----------------------------|------------------------------------|
| pending    | memory, disk  | the writing threads        | they end, or `_Pending.patience_s` |
| committing | nothing       | the ledger                 | its answer, or the call's deadline |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal import errors
from areal.chassis.logging import get_logger
from areal.chassis.waits import Wait
from areal.runs.checkpoints import CheckpointFolder
from areal_torch.training.ranks import Ranks

CHECKPOINT_LEAST_S = 600.0
_SLOWEST_BYTES_PER_S = 64 * 2**20


class Checkpointable(Protocol):
    """What the writer needs from an actor."""

    def checkpoint_bytes(self) -> int:
        """The approximate size of all ranks' files together."""

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Snapshots now, writes in the background; the future ends when this rank is done."""


@dataclass
class _Pending:
    step: int
    directory: Path
    written: Future[None]
    extra: dict[str, Any]
    size_bytes: int
    sealed: Future[Path] | None = None
    """Completed, on rank 0, when the checkpoint is whole and visible."""
    since: float = field(default_factory=time.monotonic)

    @property
    def future(self) -> Future[Any]:
        """The future for which this rank has to wait."""
        return self.sealed or self.written

    @property
    def patience_s(self) -> float:
        """Returns how long a disk may take, by the checkpoint's size."""
        return CHECKPOINT_LEAST_S + self.size_bytes / _SLOWEST_BYTES_PER_S

    def result(self, timeout: float) -> None:
        """Raises what went wrong; WaitTimeout when this wait, or that of its thread, passed."""
        try:
            self.future.result(timeout)
        except TimeoutError:
            raise errors.WaitTimeout(
                f"checkpoint of step {self.step}",
                on=str(self.directory),
                since=self.since,
                hint="is the disk full or unmounted?",
            ) from None


class CheckpointWriter:
    """Writes one checkpoint at a time; all methods but `waits` and `close` are collective."""

    def __init__(
        self, ranks: Ranks, folder: CheckpointFolder, commit: Callable[[int], None]
    ) -> None:
        """`commit(step)` commits a step in the ledger, on rank 0."""
        self.actor: Checkpointable | None = None
        self.last_step = 0
        """Step of the newest checkpoint that was begun or resumed from."""
        self._ranks = ranks
        self._folder = folder
        self._commit = commit
        self._pending: _Pending | None = None
        self._committing: Future[None] | None = None
        """The commit under way: on rank 0 the call to the ledger; on other ranks only that there is
        one."""
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="areal-checkpoint")
        self._log = get_logger(__name__)

    def snapshot(self, step: int, incarnation: int, extra: Callable[[], dict[str, Any]]) -> None:
        """Copies the state of a step, unless saved already; threads write the copy.

        Args:
            step: Finished steps.
            incarnation: This trainer's incarnation.
            extra: Returns the checkpoint's data besides tensors; called on every rank.
        """
        if self.actor is None or step == self.last_step:
            return
        self.settle(wait=True)
        directory = Path(self._ranks.on_rank0(lambda: str(self._folder.begin(step, incarnation))))
        written = self.actor.save_checkpoint(directory)
        self._pending = _Pending(step, directory, written, extra(), self.actor.checkpoint_bytes())
        self.last_step = step

    def seal(self) -> None:
        """Lets rank 0's thread finish the checkpoint as soon as all ranks have written it.

        Rank 0's own part ends last: it gathers the others' and writes the list of all.
        """
        pending = self._pending
        if pending is None or self._ranks.rank != 0 or pending.sealed is not None:
            return

        def finish() -> Path:
            pending.written.result(pending.patience_s)
            return self._folder.finish(pending.directory, pending.extra)

        pending.sealed = self._sealer.submit(finish)

    def settle(self, *, wait: bool) -> None:
        """Begins to commit the pending checkpoint once it is whole.

        Args:
            wait: Wait until it is complete and committed.
        """
        self._end_commit()
        pending = self._pending
        if pending is None:
            return
        if wait:
            pending.result(pending.patience_s)
        if not self._ranks.all_ranks(pending.future.done()):
            return
        pending.result(0.0)
        self._pending = None
        self._committing = Future()
        if self._ranks.rank == 0:
            self._committing = self._sealer.submit(self._finish, pending)
        if wait:
            self._end_commit()

    def _end_commit(self) -> None:
        """Tells every rank the result of the commit under way."""
        committing, self._committing = self._committing, None
        if committing is not None:
            self._ranks.on_rank0(committing.result)

    def _finish(self, pending: _Pending) -> None:
        self._commit(pending.step)
        self._log.info(
            "checkpoint_committed",
            step=pending.step,
            path=str(pending.future.result()),
            seconds=round(time.monotonic() - pending.since, 3),
        )

    def waits(self) -> Iterator[Wait]:
        """Yields the wait for a checkpoint that is being written, for the watchdog."""
        if (pending := self._pending) is not None:
            seconds = time.monotonic() - pending.since
            yield Wait("checkpoint", "this disk", seconds, f"step {pending.step}")

    def close(self) -> None:
        """Stops; a checkpoint that is not sealed stays incomplete."""
        self._sealer.shutdown(wait=False, cancel_futures=True)
