"""Client of WeightSyncService: publishes versions, waits until they are served, lists servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cached_property
from typing import ClassVar

from areal.chassis.backoff import Backoff
from areal.clients.base import CallPolicy, Client, Policies, to_duration
from areal.errors import Unavailable, WaitTimeout
from areal.protocol.versions import (
    offer_to_pb,
    server_from_pb,
    status_from_pb,
    version_from_pb,
    version_to_pb,
)
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s
from areal.weights.servers import InferenceServer, ServerChanges, SyncStatus

# No file of the version is read yet.
_OFFER_S = 30.0


class WeightSyncClient(Client):
    """Calls of trainers, rollout workers, and programs that watch a run."""

    POLICIES: ClassVar[Policies] = {
        # A try may take as long as the version's size says.
        "PublishVersion": CallPolicy(0.0, 60.0),
        "WatchVersions": CallPolicy(5.0),
        "ListVersions": CallPolicy(5.0),
        "ListServers": CallPolicy(5.0),
        "RegisterServer": CallPolicy(10.0, 60.0),
        "DrainServer": CallPolicy(10.0),
        "ReportServer": CallPolicy(5.0),
        "HoldServers": CallPolicy(10.0, 10.0),
    }

    @cached_property
    def _stub(self) -> pb_grpc.WeightSyncServiceAsyncStub:
        return pb_grpc.WeightSyncServiceStub(self._channel)

    async def publish_version(self, version: PolicyVersion) -> int:
        """Makes a version current; returns before any server has it. Idempotent.

        Its files are read and hashed first: one try may take `patience_s` of their size.

        Returns:
            The current version.

        Raises:
            StaleIncarnation: A newer trainer has published.
            WrongStep: The version is not above the current one.
            InvalidInput: Its tensors or files are not what the manifest or version 0 says.
        """
        request = pb.PublishVersionRequest(version=version_to_pb(version))
        response = await self.call(
            self._stub.PublishVersion, request, wait_s=patience_s(version.size_bytes)
        )
        return response.current_version

    async def offer_version(self, version: PolicyVersion, offer: Offer) -> Seats:
        """Makes a version current that the trainer is about to broadcast to the servers.

        Returns:
            The servers that take part. If there are none, nothing has changed: publish the version
            as stored.

        Raises:
            StaleIncarnation, WrongStep, InvalidInput: As `publish_version`.
        """
        request = pb.PublishVersionRequest(version=version_to_pb(version), offer=offer_to_pb(offer))
        response = await self.call(self._stub.PublishVersion, request, wait_s=_OFFER_S)
        return Seats(response.group, response.world_size)

    async def status(self) -> SyncStatus:
        since, timeout_s = time.monotonic(), self.policy("WatchVersions").timeout_s
        async with aclosing(self._watch_once(timeout_s)) as statuses:
            async for status in statuses:
                return status
        raise WaitTimeout("WatchVersions", on=self.address, since=since)

    async def watch(self) -> AsyncGenerator[SyncStatus, None]:
        """The state now, then each change, forever; reconnects when the service goes away.

        States between two reads are merged: the newest is what counts.
        """
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._watch_once(None)) as statuses:
                    async for status in statuses:
                        backoff.reset()
                        yield status
            except Unavailable:
                await backoff.sleep()

    async def wait_for(
        self, what: str, until: Callable[[SyncStatus], bool], *, timeout: float
    ) -> SyncStatus:
        """Waits until the state meets a condition.

        Args:
            what: For the error: "version 3 confirmed by a server".
            until: The condition.
            timeout: Seconds.

        Raises:
            WaitTimeout: Says what was waited for, and the last state seen.
        """
        since = time.monotonic()
        last: SyncStatus | None = None
        try:
            async with asyncio.timeout(timeout):
                async with aclosing(self.watch()) as statuses:
                    async for last in statuses:
                        if until(last):
                            return last
        except TimeoutError:
            pass
        hint = f"weight-sync does not answer at {self.address}"
        if last is not None:
            hint = (
                f"current version {last.current_version}, confirmed {last.confirmed_version}, "
                f"{last.confirmed_servers} of {last.servers} servers there"
            )
        raise WaitTimeout(what, on=self.address, since=since, hint=hint)

    async def wait_confirmed(self, version: int, *, timeout: float) -> SyncStatus:
        """Waits until at least one server has confirmed `version` or a newer one."""
        return await self.wait_for(
            f"an inference server at version {version}",
            lambda status: status.confirmed_version >= version,
            timeout=timeout,
        )

    async def list_versions(self) -> list[PolicyVersion]:
        """Returns every version that is kept, with its manifest; oldest first."""
        response = await self.call(self._stub.ListVersions, pb.ListVersionsRequest())
        return [version_from_pb(version) for version in response.versions]

    async def list_servers(self) -> tuple[list[InferenceServer], int]:
        """Returns every known server, and the current version (-1 before the first)."""
        response = await self.call(self._stub.ListServers, pb.ListServersRequest())
        return [server_from_pb(s) for s in response.servers], response.current_version

    async def list_changes(self, as_of: str) -> ServerChanges:
        """Returns the servers that changed since an earlier answer; every server for `""`."""
        response = await self.call(self._stub.ListServers, pb.ListServersRequest(as_of=as_of))
        return ServerChanges(
            tuple(map(server_from_pb, response.servers)),
            tuple(response.gone_server_ids),
            not response.changes_only,
            response.as_of,
        )

    async def register_server(self, url: str) -> InferenceServer:
        """Makes a server known; it is probed and updated at once. Idempotent by url."""
        response = await self.call(self._stub.RegisterServer, pb.RegisterServerRequest(url=url))
        return server_from_pb(response.server)

    async def drain_server(self, server_id: str, *, deadline: float) -> None:
        """Stops new traffic to a server; returns at once. The server is forgotten when idle.

        Args:
            server_id: As listed; the url works too.
            deadline: Seconds until running requests are aborted (with their partial tokens).
        """
        request = pb.DrainServerRequest(server_id=server_id, deadline=to_duration(deadline))
        await self.call(self._stub.DrainServer, request)

    async def report_server(self, url: str, cause: str) -> None:
        """Says that a request to a server failed: it is probed now."""
        request = pb.ReportServerRequest(url=url, cause=cause[:1000])
        await self.call(self._stub.ReportServer, request)

    async def hold_servers(self, incarnation: int, *, lease_s: float) -> list[str]:
        """Begins or renews the trainer's turn on GPUs that it shares with servers; 0 s ends it.

        Returns:
            Servers that still hold memory, after a wait of some seconds for them to sleep.

        Raises:
            StaleIncarnation: A newer trainer has had a turn.
        """
        request = pb.HoldServersRequest(incarnation=incarnation, lease=to_duration(lease_s))
        response = await self.call(self._stub.HoldServers, request)
        return list(response.awake_server_ids)

    async def _watch_once(self, timeout_s: float | None) -> AsyncGenerator[SyncStatus, None]:
        stream = self.stream(
            self._stub.WatchVersions, pb.WatchVersionsRequest(), timeout_s=timeout_s
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield status_from_pb(message)
        raise Unavailable(f"WatchVersions on {self.address}: the stream ended")
