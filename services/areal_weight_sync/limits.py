"""How many serving servers may be updated at once.

    take ──> held ──> free ──> the first that waits is woken, and takes in its next step
      └ none left: it waits its turn, serving and probed as ever

A server that was woken and has left meanwhile costs the next one a probe interval, no more: each
that waits tries again then.

Few servers at a time are begun with: a thousand at once would all wait for all of them.

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


class UpdateSlots:
    """Limits how many servers are updated at once; does no I/O.

    Example:
        >>> slots = UpdateSlots(1)
        >>> slots.take("a", print), slots.take("b", print)
        (True, False)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: set[str] = set()
        self._waiting: dict[str, Callable[[], None]] = {}

    def take(self, server_id: str, wake: Callable[[], None]) -> bool:
        """Whether a server may be updated now; if not, `wake` is called when its turn comes."""
        if self._most and len(self._held) >= self._most and server_id not in self._held:
            self._waiting[server_id] = wake
            return False
        self._waiting.pop(server_id, None)
        self._held.add(server_id)
        return True

    def free(self, server_id: str) -> None:
        """Ends a server's turn, when it is done or has left; harmless when it had none."""
        self._waiting.pop(server_id, None)
        if server_id not in self._held:
            return
        self._held.discard(server_id)
        if self._waiting:
            first = next(iter(self._waiting))
            self._waiting.pop(first)()


class Pace:
    """Gives turns in the order asked for."""

    def __init__(self, turns: int, longest_s: float) -> None:
        self._turns = asyncio.Semaphore(turns)
        self._longest_s = longest_s

    async def turn(self) -> Callable[[], None]:
        """Waits for a turn; the returned handle ends it (else it ends by itself)."""
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
