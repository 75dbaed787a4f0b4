"""Publishes a version while the next step runs; at most one at a time.

    upload_weights(n) ── begin ─┐                         ┌─ settle: confirm_version, evaluate,
    (all ranks)                 └─ gather, write, announce ┘  the next upload_weights, the end

| state   | consumes           | waits for             | unblocked by                          |
|---------|--------------------|-----------------------|---------------------------------------|
| pending | memory, disk, wire | the exporting threads | they end (exporter.py), or `patience` |

The ranks synchronize every POLL_S seconds while they wait, so no collective's deadline limits it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from areal.chassis.waits import Wait
from areal.errors import WaitTimeout
from areal.weights.publisher import patience_s
from areal_torch.training.bridge import CALL_S
from areal_torch.training.ledger import POLL_S
from areal_torch.training.ranks import Ranks


@dataclass
class _Pending:
    version: int
    done: Future[None]
    patience: float
    since: float = field(default_factory=time.monotonic)


class BackgroundPublish:
    """Publishes in a thread; all methods but `waits` are collective."""

    def __init__(self, ranks: Ranks) -> None:
        """Starts without a version under way."""
        self._ranks = ranks
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether a version is being published, as far as `settle` knows."""
        return self._pending is not None

    def begin(self, version: int, done: Future[None], size_bytes: int) -> None:
        """Takes charge of an export that has begun.

        Args:
            version: The weights' version.
            done: Done on rank 0 when the version is announced; on other ranks with this rank's
                part.
            size_bytes: The model's size, which sets the deadline for gathering and transfer.
        """
        self._pending = _Pending(version, done, 2 * patience_s(size_bytes) + CALL_S)

    def settle(self) -> None:
        """Waits until no version is under way; every rank raises the error, if any.

        Raises:
            WaitTimeout: Publishing exceeded the deadline for the model's size.
        """
        pending = self._pending
        if pending is None:
            return

        def ended() -> bool:
            with suppress(TimeoutError):
                pending.done.exception(POLL_S)
            if not pending.done.done() and time.monotonic() - pending.since > pending.patience:
                raise WaitTimeout(
                    f"publishing version {pending.version}",
                    on="the weights volume or weight-sync",
                    since=pending.since,
                    hint="is the disk full or unmounted?",
                )
            return pending.done.done()

        while not self._ranks.on_rank0(ended):
            pass
        self._pending = None
        self._ranks.on_rank0(lambda: pending.done.result(0.0))

    def waits(self) -> Iterator[Wait]:
        """Yields the wait for a version that is being published, for the watchdog."""
        if (pending := self._pending) is not None and not pending.done.done():
            seconds = time.monotonic() - pending.since
            yield Wait("publish", "this disk", seconds, f"version {pending.version}")
