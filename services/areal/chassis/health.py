"""Serves grpc.health.v1 for the services of this process only."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer


class BoundedHealthServicer(HealthServicer):  # type: ignore[misc]
    """Remembers nothing about names that are not served here.

    The library's servicer keeps a condition for every name that a client watches. Clients choose
    the names, so its memory could grow without limit.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names`: the full names of this process's services, which never change."""
        super().__init__()
        self._known = frozenset(("", *names))

    async def Watch(  # noqa: N802 - the RPC's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Follows the protocol: for an unknown name it says so once, and the stream stays open."""
        if request.service in self._known:
            await super().Watch(request, context)
            return
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await context.write(health_pb2.HealthCheckResponse(status=unknown))
        await asyncio.Event().wait()  # until the caller leaves
