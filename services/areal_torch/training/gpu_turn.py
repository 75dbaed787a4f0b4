"""Whose turn it is on GPUs that trainer and servers share (`allocation_mode` …@alternating).

    servers' turn ── take: servers sleep; then the states return to the device ──> trainer's turn
         ^                                                                              │
         └── give: the states go to host memory; then servers wake, load and serve ─────┘

What waits for generation (a batch, a confirmed version, an evaluation) gives the turn. The first
use of a model afterwards takes it, so servers generate while the recipe does neither.

| wait                     | on          | unblocked by               | deadline                |
|--------------------------|-------------|----------------------------|-------------------------|
| servers release memory   | weight-sync | they sleep, or have died   | rollout.setup_timeout_s |
| the states may move      | exporter.py | the weights were gathered  | that of the collectives |

At weight-sync the trainer's turn is a lease (`turn_lease.py`), so servers wake if the trainer dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from areal.chassis.logging import get_logger
from areal.errors import WaitTimeout
from areal_torch.training.ranks import Ranks


class Movable(Protocol):
    """A model whose states can leave the device."""

    before_use: Callable[[], None]

    def to_host(self) -> None:
        """Moves the states to host memory."""

    def to_device(self) -> None:
        """Moves the states back to the device."""


class Servers(Protocol):
    """Servers on the same GPUs; each call is made by rank 0 only, and blocks."""

    def sleep(self) -> list[str]:
        """Has them sleep until `wake`; returns, after some seconds, those that hold memory."""

    def wake(self, timeout: float | None = None) -> None:
        """Lets them have the GPUs; waits for an answer so many seconds (None: as any call)."""


class GpuTurn:
    """Begins with the servers' turn; all methods but `free` are collective."""

    def __init__(self, ranks: Ranks, servers: Servers | None, timeout_s: float) -> None:
        """Makes no call yet.

        Args:
            ranks: This trainer's.
            servers: Those on the same GPUs; None: the trainer's GPUs are always its own.
            timeout_s: How long servers may take to release their memory.
        """
        self._ranks = ranks
        self._servers = servers
        self._timeout_s = timeout_s
        self._models: list[Movable] = []
        self._mine = servers is None
        self._log = get_logger(__name__)

    @property
    def shared(self) -> bool:
        """Whether there are turns."""
        return self._servers is not None

    def admit(self, model: Movable) -> None:
        """Takes the turn, in which a new model may be loaded; it moves with the others after."""
        if self._servers is None:
            return
        self._models.append(model)
        model.before_use = self.take
        self.take()

    def take(self) -> None:
        """Begins the trainer's turn, if it has not begun.

        Raises:
            WaitTimeout: Servers still hold memory; the message names them.
        """
        servers = self._servers
        if self._mine or servers is None:
            return
        since = time.monotonic()

        def asleep() -> bool:
            awake = servers.sleep()
            if awake and time.monotonic() - since > self._timeout_s:
                raise WaitTimeout(
                    "memory of the GPU to train on",
                    on=f"inference servers {', '.join(awake)}",
                    since=since,
                    hint="they did not sleep (allocation_mode …@alternating); see their logs",
                )
            return not awake

        while not self._ranks.on_rank0(asleep):
            pass
        self._mine = True
        for model in self._models:
            model.to_device()
        self._done("trainer", since)

    def give(self) -> None:
        """Begins the servers' turn, if it has not begun."""
        if not self._mine or self._servers is None:
            return
        since = time.monotonic()
        for model in self._models:
            model.to_host()
        self._ranks.any_rank(False)  # every rank has released its GPU
        self._mine = False
        self._ranks.on_rank0(self._servers.wake)
        self._done("servers", since)

    def free(self, timeout: float | None = None) -> None:
        """Lets servers have the GPUs at the start and end of a trainer, which computes no more.

        Rank 0 calls it. It ends a turn of an earlier incarnation, too.
        """
        if self._servers is not None:
            self._servers.wake(timeout)

    def _done(self, whose: str, since: float) -> None:
        if self._ranks.rank == 0:
            self._log.info("gpu_turn", of=whose, seconds=round(time.monotonic() - since, 3))
