"""Emptying a server that leaves."""

from __future__ import annotations

import asyncio
import time

from areal.chassis.logging import get_logger
from areal_weight_sync.engine.base import Engine, EngineError


async def empty(engine: Engine, deadline_s: float, interval_s: float, server_id: str) -> None:
    """Returns when nothing runs there; past the deadline its requests are aborted.

    Args:
        engine: The server.
        deadline_s: How long its requests may continue.
        interval_s: Between two looks.
        server_id: For the log.
    """
    log = get_logger(__name__).bind(server=server_id)
    end = time.monotonic() + deadline_s
    try:
        running = await engine.running()
        while running and (left := end - time.monotonic()) > 0:
            # Requests end inside the server; nothing announces it.
            await asyncio.sleep(min(interval_s, left))
            running = await engine.running()
        if running:
            log.info("drain_aborts", running=running)
            await engine.abort_all()
    except EngineError as error:  # it is leaving anyway, maybe it has left
        log.info("drain_ended", cause=str(error))
