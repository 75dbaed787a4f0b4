"""What happens around every RPC: timing, one log line for an error, exception to status."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Histogram

from areal import errors
from areal.observability.logging import get_logger

# Trailing metadata that lets a client raise the very class the servicer raised.
ERROR_KEY = "areal-error"

STATUS_OF: dict[type[errors.ArealError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.StaleIncarnation: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongStep: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.WaitTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.WorkflowError: grpc.StatusCode.ABORTED,
}


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Times calls, maps `ArealError` to its status, turns anything else into INTERNAL."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._log = get_logger("areal.chassis.rpc")
        self._seconds = Histogram(
            f"areal_{service.replace('-', '_')}_rpc_seconds",
            "Time of a finished RPC by method and status code.",
            ["method", "code"],
            registry=registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one method."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith("/areal."):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _unary(self, call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
        async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            start = time.perf_counter()
            code = grpc.StatusCode.OK
            try:
                return await call(request, context)
            except Exception as error:
                code, message = self._translate(error, method, context)
                await context.abort(code, message)
            finally:
                self._observe(method, code, start)

        return wrapped

    def _stream(self, call: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., Any]:
        async def wrapped(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            start = time.perf_counter()
            code = grpc.StatusCode.OK
            try:
                async for response in call(request, context):
                    yield response
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
        if isinstance(error, errors.ArealError):
            code = STATUS_OF.get(type(error), grpc.StatusCode.UNKNOWN)
            context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
            self._log.info("rpc_refused", method=method, code=code.name, error=str(error))
            return code, str(error)[:4000]
        self._log.error("rpc_failed", method=method, exc_info=error)
        return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:4000]
