"""Client of WeightSyncService: publish a version, wait until it is served, know the servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc

from areal.chassis.backoff import Backoff
from areal.clients.base import Client, from_rpc_error
from areal.errors import Unavailable, WaitTimeout
from areal.protocol.versions import (
    offer_to_pb,
    server_from_pb,
    status_from_pb,
    version_from_pb,
    version_to_pb,
)
from areal.security import Security
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import patience_s
from areal.weights.servers import InferenceServer, ServerChanges, SyncStatus


class WeightSyncClient(Client):
    """Typed async client; every call has a deadline and survives a restart of the service."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        super().__init__(address, security)
        self._stub = pb_grpc.WeightSyncServiceStub(self._channel)

    async def publish_version(self, version: PolicyVersion, *, retry_for: float = 60.0) -> int:
        """Makes a version current; returns before any server has it. Idempotent.

        Its files are read and hashed first: one try may take `patience_s` of their size.

        Returns:
            The current version.

        Raises:
            StaleIncarnation: A newer trainer has published.
            WrongStep: The version is not above the current one.
            InvalidInput: Its tensors or files are not what the manifest or version 0 says.
        """
        response = await self._call(
            self._stub.PublishVersion,
            pb.PublishVersionRequest(version=version_to_pb(version)),
            timeout=patience_s(version.size_bytes),
            retry_for=retry_for,
        )
        return response.current_version

    async def offer_version(
        self,
        version: PolicyVersion,
        offer: Offer,
        *,
        timeout: float = 30.0,
        retry_for: float = 60.0,
    ) -> Seats:
        """Makes a version current that the trainer is about to broadcast to the servers.

        Returns:
            Who takes part. With no one, nothing has changed: publish the version as stored.

        Raises:
            StaleIncarnation, WrongStep, InvalidInput: As `publish_version`.
        """
        response = await self._call(
            self._stub.PublishVersion,
            pb.PublishVersionRequest(version=version_to_pb(version), offer=offer_to_pb(offer)),
            timeout=timeout,
            retry_for=retry_for,
        )
        return Seats(response.group, response.world_size)

    async def status(self, *, timeout: float = 10.0) -> SyncStatus:
        since = time.monotonic()
        async with aclosing(self._watch_once(timeout=timeout)) as statuses:
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
                async with aclosing(self._watch_once(timeout=None)) as statuses:
                    async for status in statuses:
                        backoff.reset()
                        yield status
            except Unavailable:
                await backoff.sleep()

    async def wait_for(
        self, what: str, until: Callable[[SyncStatus], bool], *, timeout: float
    ) -> SyncStatus:
        """Waits until the state fulfills a condition.

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

    async def list_versions(self, *, timeout: float = 10.0) -> list[PolicyVersion]:
        """Every version that is kept, with its manifest; oldest first."""
        response = await self._call(
            self._stub.ListVersions, pb.ListVersionsRequest(), timeout=timeout
        )
        return [version_from_pb(version) for version in response.versions]

    async def list_servers(
        self, *, timeout: float = 10.0, retry_for: float = 0.0
    ) -> tuple[list[InferenceServer], int]:
        """Every known server, and the current version (-1 before the first)."""
        response = await self._call(
            self._stub.ListServers, pb.ListServersRequest(), timeout=timeout, retry_for=retry_for
        )
        return [server_from_pb(s) for s in response.servers], response.current_version

    async def list_changes(self, as_of: str, *, timeout: float = 10.0) -> ServerChanges:
        """Servers that have changed since an earlier answer; every server for `""`."""
        response = await self._call(
            self._stub.ListServers, pb.ListServersRequest(as_of=as_of), timeout=timeout
        )
        return ServerChanges(
            tuple(map(server_from_pb, response.servers)),
            tuple(response.gone_server_ids),
            not response.changes_only,
            response.as_of,
        )

    async def register_server(
        self, url: str, *, timeout: float = 10.0, retry_for: float = 60.0
    ) -> InferenceServer:
        """Makes a server known; it is probed and updated at once. Idempotent by url."""
        response = await self._call(
            self._stub.RegisterServer,
            pb.RegisterServerRequest(url=url),
            timeout=timeout,
            retry_for=retry_for,
        )
        return server_from_pb(response.server)

    async def drain_server(self, server_id: str, *, deadline: float, timeout: float = 10.0) -> None:
        """No new traffic from now on; returns at once, the server is forgotten when empty.

        Args:
            server_id: As listed; the url works too.
            deadline: Seconds until running requests are aborted (with their partial tokens).
            timeout: Seconds for this call.
        """
        request = pb.DrainServerRequest(server_id=server_id)
        request.deadline.FromMilliseconds(int(deadline * 1000))
        await self._call(self._stub.DrainServer, request, timeout=timeout)

    async def report_server(self, url: str, cause: str, *, timeout: float = 5.0) -> None:
        """Says that a request to a server failed: it is probed now."""
        await self._call(
            self._stub.ReportServer,
            pb.ReportServerRequest(url=url, cause=cause[:1000]),
            timeout=timeout,
        )

    async def _watch_once(self, timeout: float | None) -> AsyncGenerator[SyncStatus, None]:
        since = time.monotonic()
        call = self._stub.WatchVersions(
            pb.WatchVersionsRequest(), timeout=timeout, metadata=self._metadata
        )
        try:
            async for message in call:
                yield status_from_pb(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # the service is going down
                raise Unavailable(f"WatchVersions on {self.address}: closed") from None
            raise from_rpc_error(error, "WatchVersions", self.address, since) from None
        finally:
            call.cancel()
        raise Unavailable(f"WatchVersions on {self.address}: the stream ended")
