"""How many answers one session may have under way on this worker, so that others get theirs.

    a call that asks for n answers ── room in its session ──> the model
                                   ── none: it waits its turn, behind the session's other calls

The inference servers answer in the order of arrival: without this, one agent with a hundred calls
at once makes every other agent wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager

from areal.errors import CapacityExceeded

AT_ONCE = 16


class SessionTurns:
    """Gives turns by session, in the order asked for."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """`at_once` is the number of answers of one session; a call for more takes all of them."""
        self._at_once = at_once
        self._taken: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def turn(self, session: Hashable, answers: int, wait_s: float) -> AsyncGenerator[None]:
        """Waits for room for a call's answers, and holds it for as long as the block runs.

        Raises:
            CapacityExceeded: There was none for `wait_s`.
        """
        size = min(answers, self._at_once)
        if session in self._waiting or not self._fits(session, size):
            await self._wait(session, size, wait_s)
        else:
            self._taken[session] = self._taken.get(session, 0) + size
        try:
            yield
        finally:
            self._release(session, size)

    def _fits(self, session: Hashable, size: int) -> bool:
        return self._taken.get(session, 0) + size <= self._at_once

    async def _wait(self, session: Hashable, size: int, wait_s: float) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = size, mine
        self._waiting.setdefault(session, deque()).append(entry)
        try:
            async with asyncio.timeout(wait_s):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():  # its turn came, too late
                self._release(session, size)
            else:
                self._waiting[session].remove(entry)
                self._go_on(session)
            if isinstance(error, TimeoutError):
                raise CapacityExceeded(
                    f"the session has {self._at_once} answers under way, and has had for "
                    f"{wait_s:.0f} s; try again in 5 s"
                ) from None
            raise

    def _release(self, session: Hashable, size: int) -> None:
        self._taken[session] -= size
        self._go_on(session)

    def _go_on(self, session: Hashable) -> None:
        """Wakes those whose turn it is; forgets a session that has nothing under way."""
        waiting = self._waiting.get(session)
        while waiting and (waiting[0][1].done() or self._fits(session, waiting[0][0])):
            size, turn = waiting.popleft()
            if not turn.done():
                self._taken[session] = self._taken.get(session, 0) + size
                turn.set_result(None)
        if waiting is not None and not waiting:
            del self._waiting[session]
        if not self._taken.get(session):
            self._taken.pop(session, None)
