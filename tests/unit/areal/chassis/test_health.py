"""Health of a process: what is served here is known, what is not leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from areal.chassis.health import BoundedHealthServicer
from areal.chassis.interceptors import CallInterceptor


@asynccontextmanager
async def _serving(
    servicer: BoundedHealthServicer,
) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    server = grpc.aio.server(interceptors=[CallInterceptor("test", CollectorRegistry())])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(None)


def _remembered(servicer: BoundedHealthServicer) -> set[str]:
    """Every name in any table of the servicer."""
    tables = [value for value in vars(servicer).values() if isinstance(value, dict)]
    assert tables
    return {name for table in tables for name in table}


async def test_watch_when_names_are_unknown_then_told_so_and_not_remembered() -> None:
    servicer = BoundedHealthServicer(["areal.v1.Known"])
    before = _remembered(servicer)
    async with _serving(servicer) as stub:
        streams = [stub.Watch(pb.HealthCheckRequest(service=f"stranger-{n}")) for n in range(100)]
        answers = await asyncio.wait_for(asyncio.gather(*(s.read() for s in streams)), 60)
        assert {a.status for a in answers} == {pb.HealthCheckResponse.SERVICE_UNKNOWN}
        assert not any(stream.done() for stream in streams)  # told once, and kept open
        assert _remembered(servicer) == before
        for stream in streams:
            stream.cancel()


async def test_watch_when_a_known_service_changes_then_told_each_time() -> None:
    servicer = BoundedHealthServicer(["areal.v1.Known"])
    async with _serving(servicer) as stub:
        for name in ("areal.v1.Known", ""):
            await servicer.set(name, pb.HealthCheckResponse.SERVING)
            stream = stub.Watch(pb.HealthCheckRequest(service=name))
            first = await asyncio.wait_for(stream.read(), 60)
            await servicer.set(name, pb.HealthCheckResponse.NOT_SERVING)
            second = await asyncio.wait_for(stream.read(), 60)
            assert (first.status, second.status) == (
                pb.HealthCheckResponse.SERVING,
                pb.HealthCheckResponse.NOT_SERVING,
            )
            stream.cancel()
