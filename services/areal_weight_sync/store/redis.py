"""Versions, servers and the coordinator's lease in Redis; every change is one Lua script.

| key (below the run's prefix) | type   | holds                                                  |
|------------------------------|--------|--------------------------------------------------------|
| weights                      | hash   | version, incarnation, path, manifest, base, totals, …  |
| weights:servers              | hash   | server_id -> record (JSON)                             |
| weights:lease                | string | the active coordinator, with a time to live            |
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from areal.chassis.logging import get_logger
from areal.chassis.waits import Waits
from areal.clients.redis_connection import redis_prefix
from areal.errors import StaleIncarnation, Unavailable, WrongStep
from areal.weights.manifest import PolicyVersion, from_json, to_json
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.interfaces import Snapshot, Totals
from areal_weight_sync.server_state import ServerRecord


class LeaseTaken(Exception):
    """Another coordinator is active: this process must end and stand by."""


class RedisStore:
    """Stores the coordinator's state in Redis; raises Unavailable while Redis is away."""

    def __init__(
        self, client: redis.Redis, namespace: str, lease_ttl_s: float, waits: Waits
    ) -> None:
        prefix = redis_prefix(namespace)
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._client = client
        self._waits = waits
        self._ttl = lease_ttl_s
        self._weights = f"{prefix}weights"
        self._servers = f"{prefix}weights:servers"
        self._lease = f"{prefix}weights:lease"
        self._ledger = f"{prefix}meta"  # the buffer's; read only
        script = files("areal_weight_sync") / "lua"
        self._take, self._release, self._publish, self._save = (
            client.register_script((script / f"{name}.lua").read_text("utf-8"))
            for name in ("lease", "release", "publish", "save")
        )
        self._log = get_logger(__name__)

    async def acquire(self) -> None:
        """Waits until this process is the active coordinator."""
        told = ""
        while True:
            try:
                holder = await self._hold()
                if holder == self.owner:
                    self._log.info("active")
                    return
                if holder != told:
                    self._log.info("standby", active=holder)
                told = holder
            except Unavailable as error:
                self._log.warning("redis_unreachable", error=str(error))
            # Redis announces no expiry to wait for; a third of the lease keeps takeover short.
            await asyncio.sleep(self._ttl / 3 * random.uniform(0.8, 1.2))  # noqa: S311

    async def keep_lease(self) -> None:
        """Renews forever; an outage of Redis is sat out, as no one else can take over in it.

        Raises:
            LeaseTaken: Another coordinator is active.
        """
        while True:
            await asyncio.sleep(self._ttl / 3)
            try:
                holder = await self._hold()
            except Unavailable as error:
                self._log.warning("redis_unreachable", error=str(error))
                continue
            if holder != self.owner:
                raise LeaseTaken(f"the active coordinator is {holder}")

    async def _hold(self) -> str:
        return _text(await self._run(self._take, [self._lease], [self.owner, int(self._ttl * 1e3)]))

    async def release(self) -> None:
        """Lets a standby take over at once."""
        try:
            await self._run(self._release, [self._lease], [self.owner])
        except Unavailable as error:
            self._log.warning("lease_not_released", error=str(error))

    async def load(self) -> Snapshot:
        """Returns everything that is stored."""
        try:
            fields = {
                _text(key): value
                for key, value in (await self._client.hgetall(self._weights)).items()
            }
            records = await self._client.hvals(self._servers)
        except RedisError as error:
            raise Unavailable(f"redis: {error}") from None
        totals = Totals(**json.loads(fields.get("totals", b"{}")))
        totals.published = int(fields.get("published", 0))
        return Snapshot(
            current=from_json(fields["manifest"]) if "manifest" in fields else None,
            base=from_json(fields["base"]) if "base" in fields else None,
            records=[ServerRecord.from_json(record) for record in records],
            totals=totals,
        )

    async def publish(self, version: PolicyVersion) -> None:
        """See `coordinator.Store`."""
        verdict, detail = await self._run(
            self._publish,
            [self._weights, self._lease, self._ledger],
            [
                self.owner,
                version.version,
                version.incarnation,
                version.path,
                to_json(version),
                int(version.stored),
            ],
        )
        match _text(verdict):
            case "ok":
                return
            case "stale":
                raise StaleIncarnation(
                    f"version {version.version} of incarnation {version.incarnation}: "
                    f"incarnation {_text(detail)} has registered, so this trainer must stop"
                )
            case "wrong":
                raise WrongStep(
                    f"version {version.version} (incarnation {version.incarnation}, "
                    f"{version.path}): the current version is {_text(detail)}"
                )
            case _:
                raise Unavailable("another weight-sync coordinator is active")

    async def save(self, records: dict[str, ServerRecord | None], totals: Totals) -> None:
        """Writes changed records (None: forgotten) and the totals.

        Raises:
            LeaseTaken: Another coordinator is active; nothing was written.
        """
        arguments: list[Any] = [self.owner, json.dumps(asdict(totals))]
        for server_id, record in records.items():
            arguments += [server_id, record.to_json() if record else ""]
        if not await self._run(self._save, [self._servers, self._weights, self._lease], arguments):
            await self._confirm_lease()
            await self.save(records, totals)

    async def _confirm_lease(self) -> None:
        """Takes the lease again if it ran out in an outage, unless another coordinator has it."""
        holder = await self._hold()
        if holder != self.owner:
            raise LeaseTaken(f"the active coordinator is {holder}")

    async def persist(self, coordinator: Coordinator) -> None:
        """Writes what changes, forever.

        Members do not wait for it: what a crash loses is confirmed again by the next coordinator.
        """
        feed = coordinator.open_feed()
        pending: dict[str, None] = {}
        while True:
            pending.update(dict.fromkeys(await feed.take(self._ttl / 3 if pending else None)))
            if not pending:
                continue
            ids = [server_id for server_id in pending if server_id]
            try:
                await self.save(
                    {server_id: coordinator.record(server_id) for server_id in ids},
                    coordinator.totals,
                )
                pending.clear()
            except Unavailable as error:
                self._log.warning("redis_unreachable", error=str(error), unsaved=len(pending))

    async def _run(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        try:
            # A retrying client may take longer than the lease; the caller comes again.
            with self._waits.on("answer", "redis"):
                async with asyncio.timeout(max(1.0, self._ttl)):
                    return await script(keys=keys, args=arguments)
        except TimeoutError:
            raise Unavailable(f"redis: no answer within {max(1.0, self._ttl):.1f} s") from None
        except RedisError as error:
            raise Unavailable(f"redis: {error}") from None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
