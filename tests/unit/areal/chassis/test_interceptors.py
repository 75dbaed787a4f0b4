"""What a client gets for bytes and words that no servicer should have to expect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from areal.chassis.interceptors import CallInterceptor
from areal.clients.base import from_rpc_error
from areal.errors import CapacityExceeded, InvalidInput
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc

GARBAGE = b"\xff\xff\xff"


class _Servicer(pb_grpc.RolloutServiceServicer):
    """Echoes the first id as an error; streams one answer."""

    async def GetTasks(self, request: pb.GetTasksRequest, context: Any) -> pb.GetTasksResponse:
        if request.task_ids and request.task_ids[0].startswith("full"):
            raise CapacityExceeded(request.task_ids[0])
        if request.task_ids:
            raise InvalidInput(f"task_ids {request.task_ids[0]!r}: refused")
        return pb.GetTasksResponse()

    async def WatchTasks(
        self, request: pb.WatchTasksRequest, context: Any
    ) -> AsyncIterator[pb.WatchTasksResponse]:
        yield pb.WatchTasksResponse()


@asynccontextmanager
async def _serving() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[CallInterceptor("test", CollectorRegistry())])
    pb_grpc.add_RolloutServiceServicer_to_server(_Servicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def _status(call: Any) -> tuple[grpc.StatusCode, str]:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "/areal.v1.RolloutService/GetTasks"),
        ("unary_stream", "/areal.v1.RolloutService/WatchTasks"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_rpc_when_bytes_are_no_message_then_invalid_argument(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _serving() as channel:
        request = iter([GARBAGE]) if kind == "stream_stream" else GARBAGE
        code, details = await _status(getattr(channel, kind)(method)(request, timeout=60))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("request: not a message of ")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("character", ["x", "\u4e16", "\x00", "\n", "\U0001f600"])
async def test_rpc_when_error_quotes_a_long_text_then_the_message_arrives_shortened(
    character: str,
) -> None:
    async with _serving() as channel:
        request = pb.GetTasksRequest(task_ids=[character * 10_000])
        code, details = await _status(pb_grpc.RolloutServiceStub(channel).GetTasks(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("task_ids ")


async def test_health_watch_when_service_is_unknown_then_answers_and_keeps_streaming() -> None:
    async with _serving() as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="nobody"), timeout=5
        )
        answer = await call.read()
        call.cancel()
    assert answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_health_check_when_service_is_unknown_then_not_found_as_grpc_says() -> None:
    async with _serving() as channel:
        request = health_pb2.HealthCheckRequest(service="nobody")
        code, _ = await _status(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("message", "seconds"),
    [("full; try again in 2.5 s", "3"), ("full: the message is too large", "")],
)
async def test_call_when_refused_for_now_then_metadata_says_when_to_try_again(
    message: str, seconds: str
) -> None:
    async with _serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.RolloutServiceStub(channel).GetTasks(
                pb.GetTasksRequest(task_ids=[message])
            )
    metadata = dict(caught.value.trailing_metadata() or ())
    assert metadata["areal-error"] == "CapacityExceeded"
    assert metadata.get("retry-after", "") == seconds
    error = from_rpc_error(caught.value, "GetTasks", "here", 0.0)
    assert isinstance(error, CapacityExceeded)
    assert error.retry_after_s == (2.5 if seconds else None)
