"""Checks the token of every call to a server of the chassis; only health needs none.

A probe (of a kubelet, of a load balancer) cannot carry a secret and learns only "serving or not".
Reflection asks for the token like everything else: a tool that calls methods sends the same header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health
from prometheus_client import CollectorRegistry, Counter

from areal.security import UNAUTHENTICATED, Security

OPEN_GRPC = f"/{health.SERVICE_NAME}/"


class Doorkeeper:
    """Checks calls of one process and counts the refused ones."""

    def __init__(self, service: str, security: Security, registry: CollectorRegistry) -> None:
        self._security = security
        self._refused = Counter(
            f"areal_{service.replace('-', '_')}_unauthenticated",
            "Calls refused because of a missing or wrong bearer token, by protocol.",
            ["protocol"],
            registry=registry,
        )

    def admits(self, authorization: str | bytes | None, protocol: str) -> bool:
        """Returns whether a call carries the token."""
        if self._security.admits(authorization):
            return True
        self._refused.labels(protocol).inc()
        return False


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The first of a server's interceptors: it refuses a call before its message is read."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper
        # On the wire all four kinds of methods are streams: one handler refuses them all.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, or one that refuses the call."""
        if str(handler_call_details.method).startswith(OPEN_GRPC):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if self._doorkeeper.admits(metadata.get("authorization"), "grpc"):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED)
