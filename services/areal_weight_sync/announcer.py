"""Announces versions and servers on NATS JetStream; Redis and gRPC stay the truth.

A stream per run, `areal_<experiment>_<trial>`, in memory and small: readers that were away ask
ListServers. NATS away: what changed is kept by id (not by message) and said when it is back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import NotFoundError

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.clients.nats_connection import connect_nats
from areal.errors import Unavailable
from areal_weight_sync.coordinator import Coordinator


def subject_prefix(namespace: str) -> str:
    """Returns `areal.<experiment>.<trial>`; neither name can contain a dot."""
    return "areal." + namespace.replace("/", ".")


def stream_name(namespace: str) -> str:
    """Returns `areal_<experiment>_<trial>`; neither name can contain an underscore."""
    return "areal_" + namespace.replace("/", "_")


class Announcer:
    """`run` until cancelled; `close` at the end."""

    def __init__(self, url: str, namespace: str, token: str = "") -> None:
        self._url = url
        self._token = token
        self._namespace = namespace
        self._nats: NatsClient | None = None
        self._stream_known = False
        self._log = get_logger(__name__)

    def start(self, coordinator: Coordinator, keep: Callable[..., asyncio.Task[None]]) -> None:
        """Announces in the background, if there is a NATS."""
        if self._url:
            keep(self.run(coordinator), "announcer")
        else:
            self._log.info("announcements_off", reason="endpoints.nats is empty")

    async def run(self, coordinator: Coordinator) -> None:
        """Says every change, the newest state once per server."""
        feed = coordinator.open_feed()
        pending: dict[str, None] = {}
        backoff = Backoff(0.2, 5.0)
        while True:
            # What could not be said is tried again although nothing new happens.
            pending.update(dict.fromkeys(await feed.take(backoff.next() if pending else None)))
            try:
                while pending:
                    server_id = next(iter(pending))
                    await self._say(coordinator, server_id)
                    del pending[server_id]
                    # nats uses wait_for, which in Python 3.11 may swallow a cancellation.
                    if (task := asyncio.current_task()) and task.cancelling():
                        return
                if not backoff.fresh:
                    self._log.info("announcements_resumed")
                backoff.reset()
            except Exception as error:  # nats raises many unrelated classes
                self._stream_known = False
                if backoff.fresh:
                    reason = str(error) or type(error).__name__
                    self._log.warning("announcements_paused", error=reason)
                await backoff.sleep()

    async def close(self) -> None:
        """Closes the connection to NATS."""
        if self._nats is not None:
            await self._nats.close()

    async def _say(self, coordinator: Coordinator, server_id: str) -> None:
        prefix = subject_prefix(self._namespace)
        if server_id:
            record = coordinator.record(server_id)
            if record is None:
                await self._send(f"{prefix}.servers", {"server_id": server_id, "state": "gone"})
                return
            await self._send(
                f"{prefix}.servers",
                {
                    "server_id": server_id,
                    "url": record.url,
                    "state": record.state.value,
                    "version": record.version,
                    "cause": record.cause[:500],
                    "since": record.since,
                },
            )
            return
        status = coordinator.status()
        if status.current is not None:
            await self._send(
                f"{prefix}.versions",
                {
                    "version": status.current.version,
                    "incarnation": status.current.incarnation,
                    "path": status.current.path,
                    "publish_time": status.current.publish_time,
                },
            )

    async def _send(self, subject: str, payload: dict[str, Any]) -> None:
        if self._nats is None:
            self._nats = await connect_nats(self._url, "areal-weight-sync", token=self._token)
        if not self._nats.is_connected:
            raise Unavailable("nats: not connected")
        stream = self._nats.jetstream(timeout=2.0)
        if not self._stream_known:
            await self._ensure_stream(stream)
        await stream.publish(subject, json.dumps(payload).encode(), timeout=2.0)

    async def _ensure_stream(self, stream: Any) -> None:
        name, prefix = stream_name(self._namespace), subject_prefix(self._namespace)
        try:
            await stream.stream_info(name)
        except NotFoundError:
            await stream.add_stream(
                StreamConfig(
                    name=name,
                    subjects=[f"{prefix}.servers", f"{prefix}.versions"],
                    max_msgs=1000,
                    max_bytes=4 * 1024 * 1024,
                    storage=StorageType.MEMORY,
                )
            )
        self._stream_known = True
