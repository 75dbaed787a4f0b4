"""Ports for servers that a test starts in a moment."""

from __future__ import annotations

import os
from functools import cache

from areal.launchers.ports import PortPicker


@cache
def _picker() -> PortPicker:
    """One for this process: it gives no port twice, though none is listened on yet."""
    return PortPicker()


def free_port() -> int:
    """One that is free, and that nobody else takes before its server has started.

    Outgoing connections have others, and of tests that run side by side each process has its own.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while (port := _picker().pick("")) % processes != own:
        pass
    return port
