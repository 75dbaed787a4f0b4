"""Weight-sync's announcements on NATS: each says that some server has changed.

| who    | consumes          | waits for    | unblocked by               |
|--------|-------------------|--------------|----------------------------|
| listen | announcements     | a connection | NATS; tries every few s    |
"""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.clients.nats_connection import connect_nats
from areal.errors import Unavailable


class Announcements:
    """`listen` once; `close` at the end."""

    def __init__(self, url: str, namespace: str, token: str) -> None:
        self._url, self._token = url, token
        self._subject = f"areal.{namespace.replace('/', '.')}.servers"
        self._nats: NatsClient | None = None
        self._log = get_logger(__name__)

    async def listen(self, told: Callable[[], None]) -> None:
        """Calls `told` at each announcement, and once when it begins to hear them."""
        if not self._url:
            self._log.info("announcements_off", reason="endpoints.nats is empty")
            return

        async def announced(_: Msg) -> None:
            told()

        backoff = Backoff(0.5, 5.0)
        while self._nats is None:
            try:
                self._nats = await connect_nats(self._url, "areal-rollout", token=self._token)
            except Unavailable as error:
                if backoff.fresh:
                    self._log.warning("announcements_unavailable", error=str(error))
                await backoff.sleep()
        # The client subscribes again by itself whenever it has to reconnect.
        await self._nats.subscribe(self._subject, cb=announced)
        told()

    async def close(self) -> None:
        """Closes the connection to NATS."""
        if self._nats is not None:
            await self._nats.close()
