"""Connections to NATS that survive outages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.aio.client import Server

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.errors import ConfigError, Unavailable
from areal.security import redact

# The client itself would try its first connection forever, in silence.
_NATS_FIRST_S = 10.0


async def connect_nats(url: str, name: str, *, token: str = "") -> NatsClient:
    """Connects, and reconnects indefinitely; raises Unavailable if no server ever answered.

    Args:
        url: nats://host:port, or several of a cluster, separated by commas.
        name: This client's name in the server's monitoring.
        token: Used if the url has no user.
    """
    if not url:
        raise ConfigError("endpoints.nats '': expected nats://host:port")
    log = get_logger(__name__)
    told = ""

    async def disconnected() -> None:
        log.warning("nats_disconnected")

    async def reconnected() -> None:
        backoff.reset()
        log.info("nats_reconnected")

    async def error(problem: Exception) -> None:
        nonlocal told
        told = str(problem) or type(problem).__name__
        log.warning("nats_error", error=told)

    backoff = Backoff()

    def again(servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        # Gets every server that the client knows; the one that was tried least is next.
        return min(servers, key=lambda server: server.reconnects), backoff.next()

    client = NatsClient()
    try:
        async with asyncio.timeout(_NATS_FIRST_S):
            await client.connect(
                url.replace(" ", "").split(","),
                name=name,
                token=token if token and "@" not in url else None,
                connect_timeout=5,
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=again,
                disconnected_cb=disconnected,
                reconnected_cb=reconnected,
                error_cb=error,
                allow_reconnect=True,
            )
        return client
    except TimeoutError:
        with suppress(Exception):  # what it had opened
            async with asyncio.timeout(1.0):
                await client.close()
        cause = f": {told}" if told else ""
        raise Unavailable(
            redact(f"nats {url}: no answer within {_NATS_FIRST_S:.0f} s{cause}")
        ) from None
    except Exception as problem:  # nats raises many unrelated classes while connecting
        raise Unavailable(redact(f"nats {url}: {problem}")) from None
