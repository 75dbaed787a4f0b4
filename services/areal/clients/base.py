"""What every gRPC client shares: channels, deadlines, retries, and typed errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from areal import errors
from areal.chassis import tracing
from areal.chassis.addresses import split_host, target_of
from areal.chassis.backoff import Backoff
from areal.security import Security

ResponseT = TypeVar("ResponseT")
_Metadata = tuple[tuple[str, str], ...]

_MAX_MESSAGE_BYTES = 128 * 1024 * 1024

# For calls that gRPC, a proxy or the check of tokens refused before a servicer could raise.
_CLASS_OF: dict[grpc.StatusCode, type[errors.ArealError]] = {
    # Not by us, that raises CancelledError: the server has too many calls waiting, or is going.
    grpc.StatusCode.CANCELLED: errors.Unavailable,
} | {
    grpc.StatusCode[kind.grpc_code]: kind
    for kind in (
        errors.Unavailable,
        errors.Unauthenticated,
        errors.InvalidInput,
        errors.CapacityExceeded,
    )
}
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How soon a name is looked up again whose server hung up: a pod's successor is elsewhere.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # One process may hold several channels to one address, each with its own connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A user's proxy is for the internet.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str, security: Security, name: str = "", *, serving: bool = False
) -> grpc.aio.Channel:
    """A channel that reconnects by itself within seconds of a server's return.

    Calls go to the replicas in turn: to all addresses given, and to all that a name has. One that
    does not answer is left out until it does. gRPC sends a call again by itself only if no server
    has begun it.

    Args:
        address: host:port; of several replicas, their addresses, separated by commas.
        security: Token and certificates to present.
        name: The host name in the server's certificate; empty: the (first) address's.
        serving: Also leave out replicas that start or drain, as their health check says.

    Raises:
        ConfigError: One of several addresses is not host:port, or its name has no address.
    """
    policy: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if serving:
        policy["healthCheckConfig"] = {"serviceName": ""}
    options: tuple[tuple[str, int | str], ...] = _OPTIONS
    options = (*options, ("grpc.service_config", json.dumps(policy)))
    target = address
    if "," in address:
        target, first = target_of(address)
        name = name or split_host(first)[0]
        options = (*options, ("grpc.default_authority", first))
    if (tls := security.tls) is None:
        return grpc.aio.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
    if name:
        options = (*options, ("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(target, credentials, options=options)


def from_rpc_error(
    error: grpc.aio.AioRpcError, method: str, address: str, since: float
) -> errors.ArealError:
    """Returns the error that the servicer raised, or the nearest one to gRPC's own status."""
    detail = error.details() or ""
    metadata = cast("list[tuple[str, str]]", error.trailing_metadata() or [])
    for key, value in metadata:
        if key == errors.ERROR_KEY and (kind := errors.named(str(value))) is not None:
            if kind is errors.WaitTimeout:
                break
            return kind(detail)
    code = error.code()
    text = f"{method} on {address}: {detail}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.WaitTimeout(method, on=address, since=since, hint=detail)
    if (kind := _CLASS_OF.get(code)) is not None:
        return kind(text)
    return errors.ArealError(f"{text} ({code.name})")


def to_duration(seconds: float) -> Duration:
    """Converts seconds to whole milliseconds; a negative time becomes 0."""
    duration = Duration()
    duration.FromMilliseconds(max(0, int(seconds * 1000)))
    return duration


async def persist(attempt: Callable[[], Awaitable[ResponseT]], seconds: float) -> ResponseT:
    """Tries again while a service is down, or frozen (then each try ends at its deadline)."""
    end, backoff = time.monotonic() + seconds, Backoff()
    while True:
        try:
            return await attempt()
        except (errors.Unavailable, errors.WaitTimeout):
            if time.monotonic() >= end:
                raise
        await backoff.sleep()


@dataclass(frozen=True)
class CallPolicy:
    """The timeout of an RPC and how long it is retried, in seconds."""

    timeout_s: float = 30.0
    """Deadline of one try, in seconds. A long poll adds the time that the server was asked to
    wait."""
    retry_s: float = 0.0
    """Try again, with backoff and jitter, for this long while the service is away or silent."""
    idempotent: bool = True
    """Whether the same call may be made twice; one that may not is never tried again."""


# Policies by the name of the RPC.
Policies = Mapping[str, CallPolicy]


def _bearer(token: str) -> _Metadata:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _name(method: Any) -> str:
    """Returns the name of the RPC that a stub's method calls."""
    return bytes(method._method).decode().rsplit("/", maxsplit=1)[-1]


class Client:
    """Base of the typed clients: one channel to one service, and a policy for each RPC.

    Every call raises the class that the service raised, Unavailable, or WaitTimeout. `close`
    cancels the calls in flight; one that waits to be retried, and every later call, raises
    ArealError.
    """

    POLICIES: ClassVar[Policies] = {}
    """`CallPolicy()` for the others."""
    SERVING: ClassVar[bool] = False
    """Whether replicas that start or drain get no calls, even if there is no other."""

    def __init__(
        self,
        address: str,
        security: Security | None = None,
        *,
        timeout_s: float | None = None,
        retry_s: float | None = None,
        name: str = "",
    ) -> None:
        """Opens a channel; connects with the first call.

        Args:
            address: host:port, or several, as `open_channel` takes them.
            security: Token and certificates to present; None: neither.
            timeout_s: For one try of every call, instead of its policy's.
            retry_s: Retries of every idempotent call, instead of its policy's: 0 for a caller that
                has another answer, more for one that cannot do without the service.
            name: The host name in the server's certificate; empty: the address's.
        """
        self.address = address
        self._security = security = security or Security()
        self._channel = open_channel(address, security, name, serving=self.SERVING)
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        await self._channel.close(None)

    def policy(self, rpc: str) -> CallPolicy:
        """Returns how this client makes a call."""
        policy = self.POLICIES.get(rpc, CallPolicy())
        timeout_s = policy.timeout_s if self._timeout_s is None else self._timeout_s
        retry_s = policy.retry_s if self._retry_s is None else self._retry_s
        return CallPolicy(timeout_s, retry_s if policy.idempotent else 0.0, policy.idempotent)

    async def call(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: Any,
        *,
        wait_s: float = 0.0,
    ) -> ResponseT:
        """Makes one unary call, with as many tries as its policy allows.

        Args:
            method: A stub's method.
            request: Its message.
            wait_s: Seconds that the server may take beyond the policy's timeout: a long poll.
        """
        name = _name(method)
        policy = self.policy(name)
        since = time.monotonic()
        timeout, trace = policy.timeout_s + max(0.0, wait_s), tracing.headers()

        # The token is given with each call: an interceptor would cost every call a task of its own.
        async def present(token: str) -> ResponseT:
            self._raise_if_closed(name)
            try:
                return await method(request, timeout=timeout, metadata=_bearer(token) + trace)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, name, self.address, since) from None
            except asyncio.CancelledError:
                self._raise_if_closed_meanwhile(name)
                raise

        async def once() -> ResponseT:
            token, refused = self._security.token, list[str]()
            while True:
                try:
                    return await present(token)
                except errors.Unauthenticated:
                    refused.append(token)
                    if not (token := self._security.untried(refused)):
                        raise

        return await persist(once, policy.retry_s)

    async def stream(
        self,
        method: Callable[..., Any],
        request: Any,
        *,
        timeout_s: float | None,
    ) -> AsyncGenerator[Any, None]:
        """Yields a streaming call's messages, tried once; `timeout_s`: for all (None: no limit)."""
        token, refused = self._security.token, list[str]()
        while True:
            try:
                async with aclosing(self._stream(method, request, timeout_s, token)) as stream:
                    async for message in stream:
                        yield message
                return
            except errors.Unauthenticated:  # before any message
                refused.append(token)
                if not (token := self._security.untried(refused)):
                    raise

    async def _stream(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout_s: float | None,
        token: str,
    ) -> AsyncGenerator[Any, None]:
        name = _name(method)
        since = time.monotonic()
        self._raise_if_closed(name)
        call = method(request, timeout=timeout_s, metadata=_bearer(token) + tracing.headers())
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, name, self.address, since) from None
        except asyncio.CancelledError:
            self._raise_if_closed_meanwhile(name)
            raise
        finally:
            call.cancel()

    def _raise_if_closed_meanwhile(self, name: str) -> None:
        """A channel that closes cancels its calls, whose tasks no one has cancelled."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            self._raise_if_closed(name)

    def _raise_if_closed(self, name: str) -> None:
        """Raises our error before gRPC raises a class that no caller expects."""
        if self._closed:
            raise errors.ArealError(f"{name} on {self.address}: this client is closed")
