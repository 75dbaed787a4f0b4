"""How long a trainer waits for a version to be checked: by its size."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from areal.clients.weight_sync import WeightSyncClient
from areal.v1 import weight_sync_service_pb2 as pb
from areal.v1 import weight_sync_service_pb2_grpc as pb_grpc
from areal.weights.manifest import PolicyVersion, WeightFile
from areal.weights.publisher import TransportError, patience_s
from areal.weights.store_client import StoreConnection

GIB = 1 << 30


class Noting(pb_grpc.WeightSyncServiceServicer):
    """Remembers how long its callers are willing to wait."""

    def __init__(self) -> None:
        self.given: list[float] = []

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishVersionResponse:
        self.given.append(context.time_remaining())
        return pb.PublishVersionResponse(current_version=request.version.version)


@pytest.fixture
async def noting() -> AsyncIterator[tuple[Noting, WeightSyncClient]]:
    servicer, server = Noting(), grpc.aio.server()
    pb_grpc.add_WeightSyncServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WeightSyncClient(f"127.0.0.1:{port}")
    yield servicer, client
    await client.close()
    await server.stop(0)


@pytest.mark.parametrize(("size", "seconds"), [(0, 30), (GIB, 46), (64 * GIB, 1054)])
async def test_publish_when_a_version_is_large_then_its_check_is_given_more_time(
    noting: tuple[Noting, WeightSyncClient], size: int, seconds: float
) -> None:
    servicer, client = noting
    files = (WeightFile("model.safetensors", size, "0" * 32),) if size else ()
    await client.publish_version(PolicyVersion(3, 1, "/weights/v3", files))
    assert patience_s(size) == seconds
    assert abs(servicer.given[0] - seconds) < 15


class Slow(BaseHTTPRequestHandler):
    """A weight store that hashes for a while."""

    def do_POST(self) -> None:
        time.sleep(0.6)
        body = b'{"path": "/weights/v00000003-inc1"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_upload_when_the_store_checks_it_for_long_then_waited_for_by_its_size() -> None:
    server = HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with StoreConnection(f"http://127.0.0.1:{server.server_port}", {}, 0.2) as store:
            assert store.commit("v00000003-inc1", GIB) == "/weights/v00000003-inc1"
            with pytest.raises(TransportError, match="timed out"):  # what carries nothing
                store.begin("v00000003-inc1", "{}")
    finally:
        server.shutdown()
        server.server_close()
