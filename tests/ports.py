"""Ports for servers that a test starts in a moment."""

from __future__ import annotations

import os
from functools import cache

from areal_launch.processes.free_ports import PortPicker

# Ports that stay promised: those of the tests that run now. Each promise is an open file, and a
# process runs hundreds of tests.
_KEPT = 64


class _Ports:
    """Gives none of the last ports again, though no server listens on them yet."""

    def __init__(self) -> None:
        self._before, self._now, self._given = PortPicker(), PortPicker(), 0

    def pick(self) -> int:
        if self._given == _KEPT:
            self._before.close()
            self._before, self._now, self._given = self._now, PortPicker(), 0
        self._given += 1
        return self._now.pick("")


@cache
def _ports() -> _Ports:
    """One for this process."""
    return _Ports()


def free_port() -> int:
    """One that is free, and that no one else takes before its server has started.

    Outgoing connections have others, and of tests that run side by side each process has its own.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while (port := _ports().pick()) % processes != own:
        pass
    return port
