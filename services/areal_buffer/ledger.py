"""The ledger's waiting calls. What changes state is one atomic script each; here is who waits.

      rollout worker            trainer rank 0              client
            │ lease_tasks            │ take_batch              │ wait_tasks
            v                        v                         v
      ┌──────────────── look once (script; finds nothing → sets a flag) ─────────────┐
      │  found → answer                                      nothing → wait          │
      └── up to max_wait ── wake-up (pub/sub), or the fallback timer ── look again ──┘

| call        | consumes               | waits for                    | unblocked by               |
|-------------|------------------------|------------------------------|----------------------------|
| lease_tasks | queued tasks           | a task, and admission (L4)   | submit, return, end of     |
|             |                        |                              | a lease, take of next step |
| take_batch  | completed groups       | B groups; stragglers, up to  | complete, end of a task,   |
|             |                        | their deadline; all task_ids;| deadline, seal; a lease    |
|             |                        | a queue below refill_below   | that shortens the queue    |
| wait_tasks  | nothing                | the end of one of the tasks  | complete, any end          |

Why none of these waits is forever, even with nothing submitted: every call ends after max_wait
with the reason it is waiting. Why a batch comes: completed groups leave the admission bound only
through the batch, so while fewer than B are completed, (eta + 1) * B - running > 0 or groups are
running; running groups end or lose their lease. A group thrown away as too stale leaves the
bound and is at the front of the queue.

A script that finds nothing sets a flag; the script that changes that clears it and PUBLISHes. One
subscriber per process (sweeper.py) hears it and calls `Wakes.notify(kind)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, TypeVar

from areal.chassis.waits import Waits
from areal.errors import ArealError
from areal.protocol.leases import Take, TakeState
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.records import Completion, MemoryGauge

MAX_WAIT_S = 30.0
# Look again after this long even without a wake-up: one may be lost with its connection, and a
# straggler deadline passes without a message.
_FALLBACK_S = 1.0
# Between two looks of one call, so that a stream of wake-ups does not become a stream of scripts.
_COALESCE_S = 0.005


class Kind(StrEnum):
    """What may have become possible; the words that the scripts publish."""

    LEASE = "lease"
    TAKE = "take"
    ENDED = "ended"


class Wakes:
    """Counts notifications by kind and lets callers wait for the next one."""

    def __init__(self) -> None:
        self._events = {kind: asyncio.Event() for kind in Kind}

    def next(self, kind: Kind) -> asyncio.Event:
        """Returns the event of the next notification.

        Get it before looking, so that none is missed.
        """
        return self._events[kind]

    def notify(self, kind: Kind) -> None:
        """Wakes everyone who waits for `kind`."""
        event, self._events[kind] = self._events[kind], asyncio.Event()
        event.set()

    def notify_all(self) -> None:
        """Wakes every waiter; called when messages may have been missed."""
        for kind in Kind:
            self.notify(kind)


# Kind of wait and the service that is waited for, for the watchdog.
_WAITS_FOR = {
    Kind.LEASE: ("lease", "queue and admission"),
    Kind.TAKE: ("batch", "rollout workers"),
    Kind.ENDED: ("end", "rollout workers"),
}

T = TypeVar("T")


class Store(Protocol):
    """What the waiting calls need of the store."""

    async def lease(self, worker_id: str, max_tasks: int, boot: int) -> pb.LeaseTasksResponse:
        """Leases what admission allows now; the reason when that is nothing."""

    async def take(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        *,
        limit: int,
        with_groups: bool,
        refill_below: int,
        confirmed: int | None,
    ) -> Take:
        """Tries once to take the batch of a step."""

    async def ended(self, task_ids: Sequence[str], incarnation: int) -> list[str]:
        """Returns those tasks that have ended or are completed."""

    async def complete(
        self, groups: Sequence[Completion], *, limit: int
    ) -> list[bool | ArealError]:
        """Records groups; False: it had been recorded before; or why it was refused."""


class Ledger:
    """Waits on top of the store."""

    def __init__(self, store: Store, wakes: Wakes, memory: MemoryGauge, waits: Waits) -> None:
        self._store = store
        self._wakes = wakes
        self._memory = memory
        self._waits = waits
        self._turn = asyncio.Lock()
        # The wake-up awaited when a worker last found nothing, how long that holds, and the reason.
        self._nothing: tuple[asyncio.Event, float, str] | None = None

    async def lease_tasks(
        self, worker_id: str, max_tasks: int, max_wait_s: float, boot: int = 0
    ) -> pb.LeaseTasksResponse:
        """Leases up to max_tasks tasks; waits for the first. If empty, says why."""

        async def look() -> pb.LeaseTasksResponse:
            return await self._store.lease(worker_id, max_tasks, boot)

        return await self._until(
            Kind.LEASE,
            look,
            lambda found: bool(found.leases),
            max_wait_s,
            f"worker {worker_id}",
            again=lambda: self._in_turn(look),
        )

    async def _in_turn(
        self, look: Callable[[], Awaitable[pb.LeaseTasksResponse]]
    ) -> pb.LeaseTasksResponse:
        """A look of a woken worker.

        All are woken, and mostly there is one task for them: once one has found nothing, the others
        need not ask before the next wake-up. A task costs two scripts, however many workers wait.
        """
        now = asyncio.get_running_loop().time
        async with self._turn:
            changed, began = self._wakes.next(Kind.LEASE), now()
            if self._nothing is not None:
                since, fresh_until, reason = self._nothing
                if since is changed and began < fresh_until:
                    return pb.LeaseTasksResponse(reason=reason)
            found = await look()
            if not found.leases:
                self._nothing = changed, began + _FALLBACK_S, found.reason
            return found

    async def take_batch(
        self,
        incarnation: int,
        step: int,
        task_ids: Sequence[str],
        max_wait_s: float,
        *,
        with_groups: bool = False,
        refill_below: int = 0,
        confirmed: int | None = None,
    ) -> Take:
        """Returns a step's batch, or state `waiting` if max_wait passed or rows are wanted."""
        return await self._until(
            Kind.TAKE,
            lambda: self._store.take(
                incarnation,
                step,
                task_ids,
                limit=self._memory.limit_bytes,
                with_groups=with_groups,
                refill_below=refill_below,
                confirmed=confirmed,
            ),
            lambda take: take.state is not TakeState.WAITING or take.rows_wanted,
            max_wait_s,
            f"step {step}",
        )

    async def wait_tasks(
        self, task_ids: Sequence[str], max_wait_s: float, incarnation: int = 0
    ) -> list[str]:
        """Returns tasks that have ended (train: completed counts); empty if max_wait passed."""
        return await self._until(
            Kind.ENDED,
            lambda: self._store.ended(task_ids, incarnation),
            bool,
            max_wait_s,
            f"one of {len(task_ids)} tasks",
        )

    async def complete_tasks(self, groups: Sequence[Completion]) -> list[bool | ArealError]:
        """Records groups; False: it had been recorded before; or why it was refused."""
        return await self._store.complete(groups, limit=self._memory.limit_bytes)

    async def _until(
        self,
        kind: Kind,
        look: Callable[[], Awaitable[T]],
        found: Callable[[T], bool],
        max_wait_s: float,
        detail: str,
        again: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = start + min(max(max_wait_s, 0.0), MAX_WAIT_S)
        with self._waits.on(*_WAITS_FOR[kind], detail):
            while True:
                changed = self._wakes.next(kind)
                result = await look()
                look = again or look
                left = deadline - loop.time()
                if found(result) or left <= 0:
                    return result
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left, _FALLBACK_S))
                await asyncio.sleep(min(left, _COALESCE_S))
