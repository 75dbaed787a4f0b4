"""Whose turn it is on GPUs that servers and trainer share (`allocation_mode` …@alternating).

    trainer's turn ── hold(lease) ──> servers sleep ── hold again in time ──> …
          │ release, or the lease ends (the trainer died)
          v
    servers' turn: they wake, load the newest version, and serve

A new coordinator does not know whose turn it is. It leaves awake servers alone, and wakes sleeping
ones only after a lease: a trainer that computes has renewed its turn by then.
"""

from __future__ import annotations

import asyncio

from areal.errors import StaleIncarnation

LONGEST_LEASE_S = 60.0
ASLEEP = "asleep"
"""Prefix of the `weight_version` of a server that sleeps. So the server itself reports it, and no
client takes it for a server that has a version."""
UNLOADED = "unloaded"
"""The same for a server that has its memory back, without weights in it yet."""


class Turns:
    """One trainer's turn; times are those of the event loop.

    Example:
        >>> turns = Turns(now=0.0, lease_s=15.0)
        >>> turns.hold(1, until=20.0)
        >>> turns.trainers(19.0), turns.trainers(21.0)
        (True, False)
    """

    def __init__(self, now: float, lease_s: float) -> None:
        self._until = now
        self._unknown_until = now + lease_s
        self._incarnation = 0

    def hold(self, incarnation: int, until: float) -> None:
        """Begins, renews or (with a time that has passed) ends the trainer's turn.

        Raises:
            StaleIncarnation: A newer trainer has had a turn.
        """
        if incarnation < self._incarnation:
            raise StaleIncarnation(
                f"incarnation {incarnation}: expected {self._incarnation} or newer: another "
                "trainer has the GPUs"
            )
        self._incarnation = incarnation
        self._until, self._unknown_until = until, 0.0

    def trainers(self, now: float) -> bool:
        """Whether servers should sleep."""
        return now < self._until

    def may_wake(self, now: float) -> bool:
        """Whether a sleeping server may have its memory back."""
        return now >= max(self._until, self._unknown_until)


def now() -> float:
    """Returns the event loop's time."""
    return asyncio.get_running_loop().time()
