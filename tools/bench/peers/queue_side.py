"""One side of a queue for `tools/bench/ledger.py`: a rollout process or a trainer process.

    python queue_side.py write|read ADDRESS_OF_THE_LEDGER ADDRESS_OF_THE_RELAY REDIS_URL

A line of JSON in, a line out. `prepare` makes everything that is not measured: clients, groups,
tasks and their leases. `go` moves the groups and answers when it began and ended (a clock that all
processes share) and the CPU seconds it took. `ours` uses the clients that a rollout worker and a
trainer use; `redis-py` writes and reads the same bytes and does nothing else; `gRPC relay` has a
process do that behind gRPC, with the bytes as compressed as ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[3] / "services"))

from relay import PUT, TAKE, WAIT_S, load, store

from areal.clients.base import open_channel
from areal.clients.buffer.batching import CALL_BYTES
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.trainer import BufferTrainer
from areal.clients.buffer.worker import BufferWorker
from areal.clients.redis_connection import connect_redis
from areal.protocol.trajectories import group_to_pb, pack_group
from areal.security import Security
from areal.types import Purpose, Task, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.v1 import buffer_service_pb2 as pb

SAMPLES = 4
# Five arrays of a trajectory: 4 + 1 + 4 + 4 + 4 bytes a token.
TOKEN_BYTES = 17
# Groups differ, so that no cache holds what is sent; making each from scratch would take long.
DISTINCT = 32

Go = Callable[[], Awaitable[None]]


def make_group(task_id: str, kib: int, version: int) -> TrajectoryGroup:
    """A group of that size; as many values of each array as a rollout worker sends."""
    length = kib * 1024 // (SAMPLES * TOKEN_BYTES)
    prompt = np.arange(length) < length // 8
    rng = np.random.default_rng(zlib.crc32(task_id.encode()) % DISTINCT)
    return TrajectoryGroup(
        task_id,
        [
            Trajectory(
                trajectory_id=f"{task_id}/{sample}",
                input_ids=rng.integers(0, 150_000, length, dtype=np.int32),
                loss_mask=~prompt,
                behavior_logprobs=np.where(prompt, 0, rng.normal(-1, 1, length)).astype(np.float32),
                token_versions=np.where(prompt, -1, version).astype(np.int32),
                rewards=np.zeros(length, np.float32),
            )
            for sample in range(SAMPLES)
        ],
    )


async def at_once(together: int, work: list[Go]) -> None:
    """Runs all of it, so much at a time, begun in order."""
    waiting = iter(work)

    async def worker() -> None:
        for each in waiting:
            await each()

    await asyncio.gather(*(worker() for _ in range(together)))


class Ours:
    """The ledger's own clients."""

    def __init__(self, address: str) -> None:
        self._buffer = BufferConnection(address)
        self._worker = BufferWorker(self._buffer)

    async def prepare_write(self, case: dict[str, Any]) -> Go:
        """Leases what the reader submitted, and makes groups for it."""
        count, batch = case["count"], case["batch"]
        leases: list[Any] = []
        while len(leases) < count:
            got, why = await self._worker.lease_tasks("bench", min(1000, count), 5.0)
            assert got, why
            leases += got
        groups = [make_group(x.task.task_id, case["kib"], x.policy_version) for x in leases]

        async def complete(at: int) -> None:
            lease = leases[at]
            name = lease.task.task_id
            assert await self._worker.complete_task(name, lease.token, groups[at], "bench")

        async def complete_batch(start: int) -> None:
            await asyncio.gather(*(complete(at) for at in range(start, start + batch)))

        batches = [lambda s=s: complete_batch(s) for s in range(0, count, batch)]
        return lambda: at_once(case["together"], batches)

    async def prepare_read(self, case: dict[str, Any]) -> Go:
        """Registers a trainer and submits its tasks."""
        client, batch, tag = BufferTrainer(self._buffer), case["batch"], case["tag"]
        stats = await client.tasks.get_stats()
        trainer = await client.register_trainer(
            resume_step=stats.last_committed_step,
            batch_size=batch,
            max_head_offpolicyness=1_000_000,
            max_concurrent_rollouts=case["count"],
        )
        spec = WorkflowSpec("rlvr")
        await client.tasks.submit_tasks(
            [Task(f"{tag}-{i}", Purpose.TRAIN, spec, {"q": "1+1"}) for i in range(case["count"])]
        )
        first = stats.last_committed_step + 1

        async def read() -> None:
            committing: asyncio.Task[int] | None = None
            for step in range(first, first + case["count"] // batch):
                taken = await client.take_batch(trainer.incarnation, step, WAIT_S, with_groups=True)
                names = [group.task_id for group in taken.groups]
                assert len(names) == batch, taken
                assert len(await client.fetch_groups(trainer.incarnation, step, names)) == batch
                if committing is not None:
                    await committing
                # As our trainer does: the next batch is asked for while this one is committed.
                committing = asyncio.create_task(
                    client.commit_step(trainer.incarnation, step, step)
                )
                if case["together"] == 1:
                    await committing
            if committing is not None:
                await committing

        return read


class RedisAlone:
    """SET of a batch in a pipeline, and its number to a waiter; then GETDEL."""

    def __init__(self, url: str) -> None:
        self._redis = connect_redis(url)

    async def prepare_write(self, case: dict[str, Any]) -> Go:
        """Serializes some groups to write."""
        groups = itertools.cycle(
            group_to_pb(make_group(str(i), case["kib"], 0)).SerializeToString()
            for i in range(DISTINCT)
        )
        batch = case["batch"]

        async def write(start: int) -> None:
            await store(self._redis, case["tag"], start, list(itertools.islice(groups, batch)))

        await self._redis.ping()
        batches = [lambda s=s: write(s) for s in range(0, case["count"], batch)]
        return lambda: at_once(case["together"], batches)

    async def prepare_read(self, case: dict[str, Any]) -> Go:
        """Connects to Redis, to read."""

        async def read() -> None:
            assert len(await load(self._redis, case["tag"])) == case["batch"]

        await self._redis.ping()
        return lambda: at_once(case["together"], [read] * (case["count"] // case["batch"]))


class Relay:
    """`store` and `load` behind gRPC: as large messages as our client's, a batch with one call."""

    def __init__(self, address: str) -> None:
        channel = open_channel(address, Security())
        self._put = channel.unary_unary(PUT, pb.CompleteTasksRequest.SerializeToString)
        self._take = channel.unary_unary(
            TAKE, response_deserializer=pb.FetchGroupsResponse.FromString
        )

    async def prepare_write(self, case: dict[str, Any]) -> Go:
        """Packs some groups to write."""
        packed = [pack_group(make_group(str(i), case["kib"], 0)) for i in range(DISTINCT)]
        groups, each = itertools.cycle(packed), case["batch"]
        while each > 1 and each * len(packed[0]) > CALL_BYTES:
            each //= 2  # the messages of a batch are equal, so that any of them make one up

        async def write(start: int) -> None:
            request = pb.CompleteTasksRequest(worker_id=f"{case['tag']} {start}")
            for group in itertools.islice(groups, each):
                request.completions.add(group=group)
            await self._put(request)

        async def write_batch(start: int) -> None:
            await asyncio.gather(*(write(at) for at in range(start, start + case["batch"], each)))

        batches = [lambda s=s: write_batch(s) for s in range(0, case["count"], case["batch"])]
        return lambda: at_once(case["together"], batches)

    async def prepare_read(self, case: dict[str, Any]) -> Go:
        """Knows what to ask for."""
        request = f"{case['tag']} {case['batch']}".encode()

        async def read() -> None:
            assert len((await self._take(request)).groups) == case["batch"]

        return lambda: at_once(case["together"], [read] * (case["count"] // case["batch"]))


async def serve(side: str, address: str, relay: str, url: str) -> None:
    contenders: dict[str, Ours | RedisAlone | Relay] = {
        "ours": Ours(address),
        "gRPC relay": Relay(relay),
        "redis-py": RedisAlone(url),
    }
    go: Go | None = None
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        case = json.loads(line)
        if case["do"] == "prepare":
            who = contenders[case["who"]]
            go = await (who.prepare_write if side == "write" else who.prepare_read)(case)
            print("null", flush=True)
            continue
        assert go is not None
        begin, cpu = time.perf_counter(), time.process_time()
        await go()
        spent = {"begin": begin, "end": time.perf_counter(), "cpu": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:5]))
