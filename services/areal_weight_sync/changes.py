"""Which servers have changed since a reader last asked: a listing costs what has changed.

    mark(a) ─> 1   mark(b) ─> 2   mark(a) ─> 3          since("life:1") = [a, b]
    b ─> 2, a ─> 3 (the newest change of each)          since("life:2") = [a]

A reader returns the mark that it got. One of another coordinator, or older than what is
remembered, is told everything.
"""

from __future__ import annotations

import uuid
from itertools import takewhile

_REMEMBERED = 20_000


class Changes:
    """The newest change of each server, in order."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        """Remembers the newest changes of so many servers, those that have gone included."""
        self._life = uuid.uuid4().hex[:12]
        self._remembered = remembered
        self._number = 0
        self._numbers: dict[str, int] = {}
        self._forgotten = 0

    def mark(self, server_id: str) -> None:
        """It has changed, come, or gone."""
        self._number += 1
        self._numbers.pop(server_id, None)  # to the end
        self._numbers[server_id] = self._number
        if len(self._numbers) > self._remembered:
            oldest = next(iter(self._numbers))
            self._forgotten = self._numbers.pop(oldest)

    @property
    def as_of(self) -> str:
        """All changes up to now."""
        return f"{self._life}:{self._number}"

    def since(self, as_of: str) -> list[str] | None:
        """Server ids, the last changed first; None: that is not known, read everything."""
        life, _, number = as_of.partition(":")
        if life != self._life or not number.isdecimal() or len(number) > 18:
            return None
        after = int(number)
        if not self._forgotten <= after <= self._number:
            return None
        newest = takewhile(lambda item: item[1] > after, reversed(self._numbers.items()))
        return [server_id for server_id, _ in newest]
