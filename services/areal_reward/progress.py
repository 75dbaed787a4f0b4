"""What a worker is doing now, in 16 bytes of memory that it shares with the pool.

The pool must know which item hangs or has killed its worker, even when that item's code never
lets another byte code run; so the worker notes each item in shared memory before it begins.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from typing import IO

IDLE = -1
LOADING = -2
_SIZE = 16


class Progress:
    """(position, since): the running item's position in its request, IDLE or LOADING."""

    def __init__(self, descriptor: int) -> None:
        """Maps the file behind `descriptor`, which may be closed afterwards."""
        self._map = mmap.mmap(descriptor, _SIZE)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls) -> tuple[Progress, IO[bytes]]:
        """Creates an IDLE record and its file; the worker opens it by an inherited descriptor."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        file.truncate(_SIZE)
        progress = cls(file.fileno())
        progress.set(IDLE)
        return progress, file

    def set(self, position: int) -> None:
        """Notes what begins now. The time goes first: a torn read shows too short a time."""
        self._cells[1] = time.monotonic_ns()
        self._cells[0] = position

    def get(self) -> tuple[int, float]:
        """Returns (position, `time.monotonic()` of its start); all processes share the clock."""
        return self._cells[0], self._cells[1] / 1e9

    def close(self) -> None:
        """Unmaps the shared memory."""
        self._cells.release()
        self._map.close()
