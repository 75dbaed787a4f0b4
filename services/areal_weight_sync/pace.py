"""Pauses begin a few at a time: with a thousand servers each would stand still until all are done.

    turn ──> /pause_generation ─┬─ answered ──> end ──> the next server's turn
                                └─ 50 ms, whatever it does

All updates run in one event loop. Begun together, a thousand servers go through pause, load, check
and continue in step, each paused for as long as this process needs for all of them. A turn covers
the pause alone and is short, so neither a dead server nor a long load delays another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_TURNS = 32
_LONGEST_S = 0.05


class Pace:
    """Turns, in the order asked for."""

    def __init__(self, turns: int = _TURNS, longest_s: float = _LONGEST_S) -> None:
        self._turns = asyncio.Semaphore(turns)
        self._longest_s = longest_s

    async def turn(self) -> Callable[[], None]:
        """Waits for a turn; what it returns ends it (else it ends by itself)."""
        await self._turns.acquire()
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                timer.cancel()
                self._turns.release()

        timer = asyncio.get_running_loop().call_later(self._longest_s, end)
        return end
