"""Wraps every RPC: measures time, logs an error in one line, maps exceptions to statuses."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Histogram

from areal import errors
from areal.chassis import tracing
from areal.chassis.logging import get_logger

# gRPC percent-encodes the message into a header, three characters for one byte at worst, and gives
# up on headers above 8 KiB.
_MAX_MESSAGE_BYTES = 2000


class _NotAMessage:
    """Stands for a request whose bytes could not be decoded."""


def _decoder(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Lets a request that cannot be decoded reach the interceptor: gRPC would answer UNKNOWN."""
    if decode is None:
        return None

    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _NotAMessage()

    return decode_or_mark


def _checked(request: Any, method: str) -> Any:
    if isinstance(request, _NotAMessage):
        raise errors.InvalidInput(f"request: not a message of {method}")
    return request


async def _all_checked(requests: AsyncIterator[Any], method: str) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request, method)


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Times calls, maps `ArealError` to its status, turns anything else into INTERNAL."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._log = get_logger(__name__)
        self._handlers: dict[str, Any] = {}
        self._seconds = Histogram(
            f"areal_{service.replace('-', '_')}_rpc_seconds",
            "Time of finished RPCs, by method and status code.",
            ["method", "code"],
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one method, health and reflection included."""
        method = str(handler_call_details.method)
        # Asked for each call, but the same for every call of a method.
        if (known := self._handlers.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        self._handlers[method] = handler = self._around(handler, method)
        return handler

    def _around(self, handler: Any, method: str) -> Any:
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            call = getattr(handler, kind)
            if call:
                return getattr(grpc, f"{kind}_rpc_method_handler")(
                    self._wrapped(call, method.lstrip("/"), streamed_in=kind == "stream_stream"),
                    _decoder(handler.request_deserializer),
                    handler.response_serializer,
                )
        return handler

    def _wrapped(
        self, call: Callable[..., Any], method: str, *, streamed_in: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            start = time.perf_counter()
            code = grpc.StatusCode.OK
            check = _all_checked if streamed_in else _checked
            try:
                with tracing.served(method, lambda: context.invocation_metadata() or ()):
                    answer = call(check(request, method), context)
                    if not inspect.isasyncgen(answer):
                        return await answer
                    async with aclosing(answer):
                        async for response in answer:
                            await context.write(response)
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except Exception as error:
                code, message = self._translate(error, method, context)
                await context.abort(code, message)
            finally:
                self._observe(method, code, start)

        return wrapped

    def _observe(self, method: str, code: grpc.StatusCode, start: float) -> None:
        name = method.rsplit("/", maxsplit=1)[-1]
        self._seconds.labels(name, code.name).observe(time.perf_counter() - start)

    def _translate(
        self, error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[grpc.StatusCode, str]:
        """Status and message for the client; one log line."""
        message = (
            str(error)
            .encode(errors="backslashreplace")[:_MAX_MESSAGE_BYTES]
            .decode(errors="ignore")
        )
        if isinstance(error, errors.ArealError):
            code = grpc.StatusCode[error.grpc_code]
            metadata = [(errors.ERROR_KEY, errors.name_of(error))]
            metadata += [(key.lower(), value) for key, value in errors.retry_headers(error).items()]
            context.set_trailing_metadata(tuple(metadata))
            self._log.info("rpc_refused", method=method, code=code.name, error=message)
            return code, message
        if isinstance(error, NotImplementedError):  # what generated code raises
            return grpc.StatusCode.UNIMPLEMENTED, message
        self._log.error("rpc_failed", method=method, exc_info=error)
        return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {message}"
