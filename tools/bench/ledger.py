"""The ledger's throughput through gRPC, against redis-py alone writing and reading the same bytes.

    python tools/bench/ledger.py             # a table, then one JSON line

Ours: the buffer service as its own process. A worker hands in leased groups, so many at a time
(decoded, checked, stored by a script that keeps every counter), then a trainer takes them in
batches of that size, fetches, decodes and commits them, which lets them go. redis-py: one
pipeline of SET per batch, then one of GET and DEL, from this process, in the same server with the
same settings (append-only, fsync every second). Groups are four trajectories of equal length.
Contenders alternate; medians are printed. Leases are taken before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from tests.buffer_server import start_buffer
from tests.redis_server import RedisServer

from areal.clients.buffer import BufferClient
from areal.clients.stores import connect_redis
from areal.types import Purpose, Task, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.wire import group_to_pb

ROOT = Path(__file__).parents[2]
SIZES_KIB = (16, 64, 256)
BATCHES = (1, 8, 64)
SAMPLES = 4
# Five arrays of a trajectory: 4 + 1 + 4 + 4 + 4 bytes a token.
TOKEN_BYTES = 17
TARGET = 0.5


def make_group(task_id: str, kib: int) -> TrajectoryGroup:
    """A group of that size; as many values of each array as a rollout worker sends."""
    length = kib * 1024 // (SAMPLES * TOKEN_BYTES)
    prompt = np.arange(length) < length // 8
    rng = np.random.default_rng(0)
    return TrajectoryGroup(
        task_id,
        [
            Trajectory(
                trajectory_id=f"{task_id}/{sample}",
                input_ids=rng.integers(0, 150_000, length, dtype=np.int32),
                loss_mask=~prompt,
                behavior_logprobs=np.where(prompt, 0, rng.normal(-1, 1, length)).astype(np.float32),
                token_versions=np.where(prompt, -1, 0).astype(np.int32),
                rewards=np.zeros(length, np.float32),
            )
            for sample in range(SAMPLES)
        ],
    )


async def run_ours(address: str, kib: int, batch: int, count: int) -> tuple[float, float]:
    """(seconds to hand in, seconds to take, fetch and commit) of `count` groups."""
    client = BufferClient(address)
    tag = uuid.uuid4().hex[:8]
    try:
        stats = await client.get_stats()
        trainer = await client.register_trainer(
            resume_step=stats.last_committed_step,
            batch_size=batch,
            max_head_offpolicyness=1_000_000,
            max_concurrent_rollouts=count,
        )
        spec = WorkflowSpec("rlvr")
        await client.submit_tasks(
            [Task(f"{tag}-{i}", Purpose.TRAIN, spec, {"q": "1+1"}) for i in range(count)]
        )
        leases = []
        while len(leases) < count:
            got, why = await client.lease_tasks("bench", min(1000, count), 5.0)
            assert got, why
            leases += got
        groups = {lease.task.task_id: make_group(lease.task.task_id, kib) for lease in leases}
        # What was sampled must be at the lease's version.
        for lease in leases:
            for trajectory in groups[lease.task.task_id].trajectories:
                trajectory.token_versions[trajectory.token_versions >= 0] = lease.policy_version

        async def hand_in(lease: Any) -> None:
            name = lease.task.task_id
            assert await client.complete_task(name, lease.token, groups[name], "bench")

        begin = time.perf_counter()
        for start in range(0, count, batch):
            await asyncio.gather(*map(hand_in, leases[start : start + batch]))
        handed_in = time.perf_counter()
        step = stats.last_committed_step
        for _ in range(count // batch):
            step += 1
            taken = await client.take_batch(trainer.incarnation, step, 5.0)
            names = [group.task_id for group in taken.groups]
            assert len(names) == batch, taken
            fetched = await client.fetch_groups(trainer.incarnation, step, names)
            assert len(fetched) == batch
            await client.commit_step(trainer.incarnation, step, step)
        return handed_in - begin, time.perf_counter() - handed_in
    finally:
        await client.close()


async def run_redis(url: str, kib: int, batch: int, count: int) -> tuple[float, float]:
    """The bound: (seconds to write, seconds to read and delete) the same bytes."""
    redis = connect_redis(url)
    payload = group_to_pb(make_group("x", kib)).SerializeToString()
    keys = [f"raw:{i}" for i in range(count)]
    try:
        await redis.ping()
        begin = time.perf_counter()
        for start in range(0, count, batch):
            async with redis.pipeline(transaction=False) as pipe:
                for key in keys[start : start + batch]:
                    pipe.set(key, payload)
                await pipe.execute()
        written = time.perf_counter()
        for start in range(0, count, batch):
            async with redis.pipeline(transaction=False) as pipe:
                for key in keys[start : start + batch]:
                    pipe.get(key).delete(key)
                assert len((await pipe.execute())[0]) == len(payload)
        return written - begin, time.perf_counter() - written
    finally:
        await redis.aclose()


def measure(address: str, url: str, rounds: int) -> list[dict[str, Any]]:
    """One row per size and batch."""
    rows = []
    print(f"{'group':>8}{'batch':>7}   {'ours, groups/s':>24}   {'redis-py':>24}   ratio")
    print(f"{'':>15}   {'in':>8}{'out':>8}{'both':>8}   {'in':>8}{'out':>8}{'both':>8}")
    for kib in SIZES_KIB:
        count = 64 if kib > 64 else 128
        for batch in BATCHES:
            contenders: dict[str, Callable[[], Any]] = {
                "ours": lambda k=kib, b=batch, c=count: run_ours(address, k, b, c),
                "redis": lambda k=kib, b=batch, c=count: run_redis(url, k, b, c),
            }
            times: dict[str, list[tuple[float, float]]] = {"ours": [], "redis": []}
            for number in range(rounds + 1):
                for who in ("ours", "redis") if number % 2 else ("redis", "ours"):
                    cost = uvloop.run(contenders[who]())
                    if number:  # the first round warms up
                        times[who].append(cost)
            rates = {
                who: [
                    count / statistics.median(spent)
                    for spent in ([t[0] for t in each], [t[1] for t in each], [*map(sum, each)])
                ]
                for who, each in times.items()
            }
            ratio = rates["ours"][2] / rates["redis"][2]
            cells = "   ".join("".join(f"{r:8.0f}" for r in rates[who]) for who in rates)
            print(f"{kib:4} KiB{batch:7}   {cells}   {ratio:5.2f}", flush=True)
            rows.append(
                {"kib": kib, "batch": batch, "ratio": round(ratio, 3)}
                | {who: [round(rate) for rate in each] for who, each in rates.items()}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # The service's process finds the package from here.
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder) / "redis")
        redis.start()
        try:
            with start_buffer(Path(folder), redis.url, "rollout.lease_ttl_s=600") as address:
                load = os.getloadavg()[0]
                rows = measure(address, redis.url, options.rounds)
        finally:
            redis.kill()
    at_target = [row["ratio"] for row in rows if row["kib"] == 64]
    print(
        f"64 KiB: {min(at_target):.2f} to {max(at_target):.2f} of redis-py alone "
        f"(target {TARGET}); load average before: {load:.1f}"
    )
    print(json.dumps({"bench": "ledger", "target": TARGET, "load": round(load, 1), "rows": rows}))


if __name__ == "__main__":
    main()
