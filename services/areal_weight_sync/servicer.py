"""WeightSyncService: convert, call the coordinator, convert."""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from areal.errors import InvalidInput, Unavailable
from areal.protocol.versions import (
    offer_from_pb,
    server_to_pb,
    status_to_pb,
    version_from_pb,
    version_to_pb,
)
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.http import normalize_url

_MAX_DRAIN_S = 24 * 3600.0
_Context = grpc.aio.ServicerContext[Any, Any]


class WeightSyncService(pb_grpc.WeightSyncServiceServicer):
    """Answers Unavailable until this process is the active coordinator."""

    def __init__(self) -> None:
        self.coordinator: Coordinator | None = None

    def _active(self) -> Coordinator:
        if self.coordinator is None:
            raise Unavailable("weight-sync: standing by, another coordinator is active or starting")
        return self.coordinator

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: _Context
    ) -> pb.PublishVersionResponse:
        coordinator, version = self._active(), version_from_pb(request.version)
        if not request.HasField("offer"):
            return pb.PublishVersionResponse(current_version=await coordinator.publish(version))
        seats = await coordinator.offer(version, offer_from_pb(request.offer))
        return pb.PublishVersionResponse(
            current_version=coordinator.status().current_version,
            group=seats.group,
            world_size=seats.world_size,
        )

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """Yields the state, then each change; changes are merged for a slow reader."""
        coordinator = self._active()
        feed = coordinator.open_feed()
        last: pb.WatchVersionsResponse | None = None
        try:
            while True:
                await feed.take()
                message = status_to_pb(coordinator.status())
                if message != last:
                    yield message
                last = message
        finally:
            coordinator.close_feed(feed)

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: _Context
    ) -> pb.ListVersionsResponse:
        versions = await self._active().kept()
        return pb.ListVersionsResponse(versions=[version_to_pb(version) for version in versions])

    async def ListServers(
        self, request: pb.ListServersRequest, context: _Context
    ) -> pb.ListServersResponse:
        """Returns every known server, or what has changed."""
        coordinator = self._active()
        response = pb.ListServersResponse(
            current_version=coordinator.status().current_version,
            as_of=coordinator.changes.as_of,
        )
        changed = coordinator.changes.since(request.as_of)
        if changed is None:
            response.servers.extend(server_to_pb(server) for server in coordinator.servers())
            return response
        response.changes_only = True
        for server_id in changed:
            record = coordinator.record(server_id)
            if record is None:
                response.gone_server_ids.append(server_id)
            else:
                response.servers.append(server_to_pb(record.public()))
        return response

    async def RegisterServer(
        self, request: pb.RegisterServerRequest, context: _Context
    ) -> pb.RegisterServerResponse:
        server = self._active().register(*normalize_url(request.url))
        return pb.RegisterServerResponse(server=server_to_pb(server))

    async def DrainServer(
        self, request: pb.DrainServerRequest, context: _Context
    ) -> pb.DrainServerResponse:
        """Takes a server out of traffic, then forgets it."""
        deadline = request.deadline.ToMilliseconds() / 1000
        if not 0 <= deadline <= _MAX_DRAIN_S:
            raise InvalidInput(f"deadline {deadline} s: expected 0 to {_MAX_DRAIN_S:.0f} s")
        server_id = request.server_id
        if "://" in server_id:
            server_id, _ = normalize_url(server_id)
        self._active().drain(server_id, deadline)
        return pb.DrainServerResponse()

    async def ReportServer(
        self, request: pb.ReportServerRequest, context: _Context
    ) -> pb.ReportServerResponse:
        """Probes a server that a client saw fail."""
        server_id, _ = normalize_url(request.url)
        self._active().report(server_id, request.cause)
        return pb.ReportServerResponse()

    async def HoldServers(
        self, request: pb.HoldServersRequest, context: _Context
    ) -> pb.HoldServersResponse:
        """Has servers sleep while a trainer computes on their GPUs."""
        coordinator = self._active()
        if not request.HasField("lease"):
            raise InvalidInput("lease: missing, expected a duration (0 s ends the turn)")
        lease = request.lease.ToMilliseconds() / 1000
        awake = await coordinator.hold(request.incarnation, lease)
        return pb.HoldServersResponse(awake_server_ids=awake)
