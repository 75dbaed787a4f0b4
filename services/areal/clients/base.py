"""What every gRPC client shares: channels, deadlines, retries, and errors with their own class."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from areal import errors
from areal.chassis import tracing
from areal.chassis.backoff import Backoff
from areal.security import Security

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

# A call that may wait max_wait on the server is given this much longer to come back.
LONG_POLL_MARGIN_S = 15.0
_MAX_MESSAGE_BYTES = 128 * 1024 * 1024
_ERROR_KEY = "areal-error"


_CLASS_OF: dict[grpc.StatusCode, type[errors.ArealError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    # Not by us, that raises CancelledError: the server has too many calls waiting, or is going.
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityExceeded,
}
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # One process may hold several channels to one address, each with its own connection.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, security: Security) -> grpc.aio.Channel:
    """A channel that reconnects by itself within seconds of a server's return."""
    if (tls := security.tls) is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def from_rpc_error(
    error: grpc.aio.AioRpcError, method: str, address: str, since: float
) -> errors.ArealError:
    """The class the servicer raised, or the nearest one to gRPC's own status."""
    detail = error.details() or ""
    metadata = cast("list[tuple[str, str]]", error.trailing_metadata() or [])
    for key, value in metadata:
        if key == _ERROR_KEY:
            kind = getattr(errors, str(value), None)
            if kind is errors.WaitTimeout:
                break
            if isinstance(kind, type) and issubclass(kind, errors.ArealError):
                return kind(detail)
    code = error.code()
    text = f"{method} on {address}: {detail}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.WaitTimeout(method, on=address, since=since, hint=detail)
    if (kind := _CLASS_OF.get(code)) is not None:
        return kind(text)
    return errors.ArealError(f"{text} ({code.name})")


def to_duration(seconds: float) -> Duration:
    """Whole milliseconds; a negative time is none at all."""
    duration = Duration()
    duration.FromMilliseconds(max(0, int(seconds * 1000)))
    return duration


async def persist(attempt: Callable[[], Awaitable[ResponseT]], seconds: float) -> ResponseT:
    """Tries again while a service is away, or frozen: then the deadline of one try passes."""
    end, backoff = time.monotonic() + seconds, Backoff()
    while True:
        try:
            return await attempt()
        except (errors.Unavailable, errors.WaitTimeout):
            if time.monotonic() >= end:
                raise
        await backoff.sleep()


class Client:
    """Base of the typed clients: one channel, one address."""

    patience_s = 0.0
    """Every call is retried for at least so long. For a caller that only makes idempotent calls
    and cannot do without the service: the trainer."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        """Opens a channel; `security` (None: nothing) is what it presents."""
        self.address = address
        security = security or Security()
        self._channel = open_channel(address, security)
        # Given with each call: an interceptor would cost every call a task of its own.
        self._metadata = tuple((k.lower(), v) for k, v in security.headers().items())

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)

    async def _call(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: Any,
        *,
        timeout: float,
        retry_for: float = 0.0,
    ) -> ResponseT:
        """One unary call.

        Args:
            method: A stub's method.
            request: Its message.
            timeout: Seconds for one try.
            retry_for: Keep retrying, with backoff and jitter, for this many seconds while the
                service is away or does not answer; 0: try once. Only for idempotent calls.

        Raises:
            ArealError: What the servicer raised, or Unavailable / WaitTimeout.
        """
        name = getattr(method, "_method", b"").decode().rsplit("/", maxsplit=1)[-1] or "call"
        since = time.monotonic()
        metadata = self._metadata + tracing.headers()

        async def once() -> ResponseT:
            try:
                return await method(request, timeout=timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, name, self.address, since) from None

        return await persist(once, max(retry_for, self.patience_s))
