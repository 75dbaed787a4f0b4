"""gRPC with Redis behind it and nothing between: no ledger in Python can be faster.

    python relay.py REDIS_URL     # serves; prints its port

`Put` writes the groups of a message, `Take` answers with as many as it is asked for: what `store`
and `load` do, which `queue_side.py` also measures without gRPC.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop
from redis.asyncio import Redis

sys.path.insert(0, str(Path(__file__).parents[3] / "services"))

from areal.clients.redis_connection import connect_redis
from areal.v1 import buffer_service_pb2 as pb

WAIT_S = 30.0
PUT, TAKE = "/bench.Relay/Put", "/bench.Relay/Take"


async def store(redis: Redis, tag: str, start: int, groups: Sequence[bytes]) -> None:
    """A SET for each group, and their number to a waiter: one pipeline."""
    async with redis.pipeline(transaction=False) as pipe:
        for at, group in enumerate(groups, start):
            pipe.set(f"raw:{tag}:{at}", group)
        pipe.rpush(f"raw:{tag}", f"{start} {len(groups)}")
        await pipe.execute()


async def load(redis: Redis, tag: str) -> list[bytes]:
    """The groups of one `store`, which Redis then forgets."""
    found = await redis.blpop([f"raw:{tag}"], WAIT_S)
    assert found is not None
    start, count = map(int, found[1].split())
    async with redis.pipeline(transaction=False) as pipe:
        for at in range(start, start + count):
            pipe.getdel(f"raw:{tag}:{at}")
        groups: list[bytes] = await pipe.execute()
    assert all(groups)
    return groups


async def serve(url: str) -> None:
    redis = connect_redis(url)

    async def put(request: pb.CompleteTasksRequest, _: Any) -> bytes:
        tag, start = request.worker_id.split()
        await store(redis, tag, int(start), [each.group for each in request.completions])
        return b""

    async def take(request: bytes, _: Any) -> pb.FetchGroupsResponse:
        tag, count = request.decode().split()
        groups: list[bytes] = []
        while len(groups) < int(count):
            groups += await load(redis, tag)
        return pb.FetchGroupsResponse(groups=groups)

    handlers = {
        "Put": grpc.unary_unary_rpc_method_handler(put, pb.CompleteTasksRequest.FromString),
        "Take": grpc.unary_unary_rpc_method_handler(
            take, response_serializer=pb.FetchGroupsResponse.SerializeToString
        ),
    }
    limits = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    server = grpc.aio.server(options=limits)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Relay", handlers),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
