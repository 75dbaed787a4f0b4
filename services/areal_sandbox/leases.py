"""Leases: which boxes are lent, and until when.

    create ──> warm box, or a new one ──> lease ──keep──> lease ──┐
                  ^                         │ run, files          │ kill, or its time is over,
                  └── refill                v                     v or its box died
                                         commands              destroyed with all in it

A box is lent once, so no lease sees what an earlier one left behind. All clients that have a
lease's id share its files and processes, so an agent may hand its box to a verifier. Without a
lease, each command gets a box for as long as it runs.

| who      | consumes               | waits for                      | unblocked by               |
|----------|------------------------|--------------------------------|----------------------------|
| create() | one of `boxes`         | a box to start; refused when   | 20 s; kill and expiry free |
|          |                        | all are lent                   | a place                    |
| a lease  | memory, a box          | its holder                     | keep(), kill(), its timer  |
| refill() | CPU to start boxes     | a warm box to be taken         | create()                   |
| once()   | one of `slots`         | a free one; refused beyond     | a command's end            |
|          |                        | `max_waiting`                  |                            |
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal.chassis.logging import get_logger
from areal.errors import CannotStart, CapacityExceeded, InvalidInput, NotFound, Unavailable
from areal.protocol.boxes import Limits, Outcome
from areal.sandbox.box import Box, Command
from areal_sandbox.config import SandboxConfig
from areal_sandbox.metrics import SandboxMetrics

Spawn = Callable[[Coroutine[Any, Any, Any], str], object]


class OneShots(Protocol):
    """Runs commands in boxes of their own (areal.sandbox.Sandbox)."""

    async def run(
        self,
        code: str = "",
        *,
        argv: Any = (),
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Outcome: ...
    async def close(self) -> None: ...


@dataclass
class Lease:
    """A box that is lent."""

    id: str
    box: Box
    limits: Limits
    environment: Mapping[str, str]
    metadata: Mapping[str, str]
    timer: asyncio.TimerHandle
    until: float
    """Wall clock, in seconds."""
    began: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """Token that clients of the E2B API send with calls about this box."""


class Leases:
    """All leases of one process."""

    def __init__(
        self,
        config: SandboxConfig,
        make_box: Callable[[], Box],
        once: OneShots,
        spawn: Spawn,
        metrics: SandboxMetrics,
    ) -> None:
        """Wires it up; `refill` keeps boxes warm, as a background task."""
        self._config, self._make_box, self._once = config, make_box, once
        self._spawn, self.metrics = spawn, metrics
        self._leases: dict[str, Lease] = {}
        self._warm: list[Box] = []
        self._taken = asyncio.Event()
        self._starting = 0
        self._waiting = 0
        self._draining = False
        self._log = get_logger(__name__)

    async def start(self) -> None:
        """Shows that this machine has boxes.

        Raises:
            CannotStart: It has none; says what is missing.
        """
        await self._once.run("pass")

    async def refill(self) -> None:
        """Keeps `warm` boxes ready; never returns."""
        while True:
            self._taken.clear()
            while len(self._warm) < self._config.warm:
                box = self._make_box()
                try:
                    await box.start()
                except CannotStart as error:  # create() will say so; try again after it
                    self._log.warning("no_warm_box", error=str(error))
                    break
                self._warm.append(box)
                self.metrics.warm.set(len(self._warm))
            await self._taken.wait()

    async def create(
        self,
        limits: Limits,
        ttl_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Lease:
        """Lends a box.

        Args:
            limits: Of all that runs in it.
            ttl_s: Until it is destroyed; 0: the default.
            environment: Variables of every command.
            metadata: Kept with the lease, for people.

        Raises:
            CapacityExceeded: All boxes are lent; says when to try again.
            InvalidInput: The time is too long.
            CannotStart: The box could not be started.
            Unavailable: The service is draining.
        """
        ttl_s = self._checked(ttl_s)
        self._admit()
        self._starting += 1
        try:
            box = await self._box()
            await box.open(limits)
        finally:
            self._starting -= 1
        if self._draining:
            await box.close()
            raise Unavailable("sandbox: this service is shutting down")
        name = secrets.token_hex(10)
        lease = Lease(
            name, box, limits, environment or {}, metadata or {}, self._timer(name, ttl_s), 0.0
        )
        lease.until = lease.began + ttl_s
        self._leases[name] = lease
        self.metrics.leases.set(len(self._leases))
        return lease

    def get(self, name: str) -> Lease:
        """Returns a lease; raises NotFound if its box is not there (any more)."""
        lease = self._leases.get(name)
        if lease is not None and not lease.box.running:
            self._spawn(self.kill(name, "died"), f"sandbox-{name}")
            lease = None
        if lease is None:
            raise NotFound(
                f"sandbox {name!r}: no such box: it expired, was killed or ended, or is another "
                "process's"
            )
        return lease

    def all(self) -> list[Lease]:
        """Returns the leases, the newest first."""
        return sorted(self._leases.values(), key=lambda lease: -lease.began)

    def keep(self, name: str, ttl_s: float = 0.0) -> Lease:
        """Lets a lease end `ttl_s` from now; 0: the default."""
        ttl_s, lease = self._checked(ttl_s), self.get(name)
        lease.timer.cancel()
        lease.timer = self._timer(name, ttl_s)
        lease.until = time.time() + ttl_s
        return lease

    async def kill(self, name: str, cause: str = "killed") -> bool:
        """Destroys a box; False: there was none."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        lease.timer.cancel()
        self.metrics.leases.set(len(self._leases))
        self.metrics.ended.labels(cause).inc()
        await lease.box.close()
        self._log.info("lease_ended", sandbox=name, cause=cause)
        return True

    async def once(
        self,
        code: str,
        argv: list[str],
        files: Mapping[str, str],
        stdin: str,
        limits: Limits,
    ) -> Outcome:
        """Runs a command in a box of its own; raises CapacityExceeded if too many wait."""
        if self._draining:
            raise Unavailable("sandbox: this service is shutting down")
        if self._waiting >= self._config.max_waiting:
            self.metrics.refused.inc()
            raise CapacityExceeded(
                f"sandbox: {self._waiting} commands are waiting for a box, which is the limit; "
                "try again in 1 s"
            )
        self._waiting += 1
        try:
            outcome = await self._once.run(code, argv=argv, files=files, stdin=stdin, limits=limits)
        finally:
            self._waiting -= 1
        self.count(outcome.cause, outcome.seconds)
        return outcome

    def admit_command(self, lease: Lease) -> None:
        """Raises CapacityExceeded if a box runs as many commands as it may."""
        if len(lease.box.commands) >= self._config.max_commands:
            self.metrics.refused.inc()
            raise CapacityExceeded(
                f"sandbox {lease.id}: {len(lease.box.commands)} commands are running, which is the "
                "limit; "
                "try again in 1 s"
            )

    def count(self, cause: str, seconds: float) -> None:
        """Counts a command that has ended."""
        self.metrics.commands.labels(cause or "none").inc()
        self.metrics.command_seconds.observe(seconds)

    async def drain(self) -> None:
        """Takes no more calls, and destroys all boxes."""
        self._draining = True
        for name in list(self._leases):
            await self.kill(name, "drained")

    async def close(self) -> None:
        """Ends the boxes that are not lent."""
        warm, self._warm = self._warm, []
        for box in warm:
            await box.close()
        await self._once.close()

    async def _box(self) -> Box:
        while self._warm:
            box = self._warm.pop()
            self._taken.set()
            self.metrics.warm.set(len(self._warm))
            if box.running:
                return box
            await box.close()
        self._taken.set()
        box = self._make_box()
        await box.start()
        return box

    def _admit(self) -> None:
        if self._draining:
            raise Unavailable("sandbox: this service is shutting down")
        if len(self._leases) + self._starting < self._config.boxes:
            return
        for lease in self.all():
            if not lease.box.running:
                self._spawn(self.kill(lease.id, "died"), f"sandbox-{lease.id}")
        self.metrics.refused.inc()
        first = min((lease.until for lease in self._leases.values()), default=0.0) - time.time()
        raise CapacityExceeded(
            f"sandbox: all {self._config.boxes} boxes are lent; "
            f"try again in {min(30, max(1, round(first)))} s"
        )

    def _checked(self, ttl_s: float) -> float:
        ttl_s = ttl_s or self._config.ttl_s
        if not 0 < ttl_s <= self._config.max_ttl_s:
            raise InvalidInput(
                f"ttl {ttl_s:g} s: expected more than 0 and at most {self._config.max_ttl_s:g} s"
            )
        return ttl_s

    def _timer(self, name: str, ttl_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(
            ttl_s, lambda: self._spawn(self.kill(name, "expired"), f"sandbox-{name}")
        )


def running(lease: Lease, pid: int) -> Command:
    """Returns a running command of a box; raises NotFound if it has none with that pid."""
    for command in lease.box.commands.values():
        if command.pid.done() and command.pid.result() == pid:
            return command
    raise NotFound(f"sandbox {lease.id}: no command with pid {pid} runs")
