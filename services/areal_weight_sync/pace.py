"""Few servers at a time are begun with: a thousand at once would all wait for all of them.

    turn ──> /pause_generation, or a probe ─┬─ answered ──> end ──> the next server's turn
                                            └─ so long, whatever it does

Everything runs in one event loop. Begun together, a thousand servers go through pause, load, check
and continue in step, each paused for as long as this process needs for all of them; and a thousand
probes at once are answered later than their deadline. A turn covers the pause alone, or the
probe, and ends by itself: so neither a dead server nor a long load delays another by much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pace:
    """Turns, in the order asked for."""

    def __init__(self, turns: int, longest_s: float) -> None:
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
