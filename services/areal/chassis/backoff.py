"""Computes the pause before the next try: longer each time, and different in each process."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Doubling delays with jitter; `reset` after a success.

    Jitter keeps a thousand clients that lost one server together from returning together.

    Example:
        backoff = Backoff()
        while True:
            try:
                await connect()
                backoff.reset()
            except Unavailable:
                await backoff.sleep()
    """

    def __init__(self, first_s: float = 0.1, most_s: float = 3.0) -> None:
        """The first delay is at most `first_s`; no delay is longer than `most_s`."""
        self._first_s = first_s
        self._most_s = most_s
        self._ceiling_s = first_s

    @property
    def fresh(self) -> bool:
        """Whether there was no failure since the last success."""
        return self._ceiling_s == self._first_s

    def next(self) -> float:
        """Returns the seconds to wait before the next try."""
        delay = self._ceiling_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._ceiling_s = min(2 * self._ceiling_s, self._most_s)
        return delay

    def reset(self) -> None:
        """Call after a success: the next failure starts from the first delay."""
        self._ceiling_s = self._first_s

    async def sleep(self) -> None:
        """Sleeps for the next delay."""
        await asyncio.sleep(self.next())
