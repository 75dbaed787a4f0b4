"""The ledger's throughput through gRPC, against redis-py alone writing and reading the same bytes.

    python tools/bench/ledger.py             # a table, then one JSON line
    python -m venv PEER && PEER/bin/pip install TransferQueue==0.1.11
    python tools/bench/ledger.py --transferqueue PEER/bin/python

Ours: the buffer service as its own process. A worker hands in leased groups, so many at a time
(decoded, checked, stored by a script that keeps every counter), then a trainer takes them in
batches of that size, fetches, decodes and commits them, which lets them go. redis-py: one
pipeline of SET per batch, then one of GET and DEL, from this process, in the same server with the
same settings (append-only, fsync every second). Groups are four trajectories of equal length.
TransferQueue, verl's queue, in its own environment: put and get of rows of 64 KiB, so many at a
time, in memory. Contenders alternate; medians are printed. Leases are taken before the clock.

What no ledger behind python gRPC can pass at batch 1: a group is handed in, taken, fetched and
committed, one call after the other. The bound is four calls to a server that does nothing, the one
that hands in carrying the bytes. With `appendfsync always`, three of them also wait for the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from peers.process import Peer
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
PEER_TARGETS = {1: 10, 8: 3, 64: 3}


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


async def serve_echo() -> None:
    """A gRPC server that reads a message and answers nothing."""

    async def swallow(_: bytes, __: Any) -> bytes:
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(swallow)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench", {"swallow": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def run_echo(port: int, kib: int, count: int) -> tuple[float, float]:
    """Seconds for `count` calls one after the other: with the bytes, and three without."""
    payload = os.urandom(kib * 1024)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/bench/swallow")
        await call(payload)
        begin = time.perf_counter()
        for _ in range(count):
            await call(payload)
        sent = time.perf_counter()
        for _ in range(3 * count):
            await call(b"")
    return sent - begin, time.perf_counter() - sent


def fdatasync_ms(folder: Path) -> float:
    """One append of 16 KiB and its fdatasync on this disk: the median of 30."""
    found = []
    with (folder / "probe").open("ab", buffering=0) as file:
        for _ in range(30):
            file.write(b"x" * 16384)
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            found.append((time.perf_counter() - begin) * 1000)
    return statistics.median(found)


def measure(
    address: str, url: str, port: int, peer: Peer | None, rounds: int
) -> list[dict[str, Any]]:
    """One row per size and batch."""
    rows = []
    print(
        f"{'groups/s':>8}{'batch':>7}   {'contender':14}{'in':>8}{'out':>8}{'both':>8}   ours / it"
    )
    for kib in SIZES_KIB:
        count = 64 if kib > 64 else 128
        for batch in BATCHES:
            case = (kib, batch, count)
            contenders: dict[str, Callable[[], tuple[float, float]]] = {
                "ours": lambda c=case: uvloop.run(run_ours(address, *c)),
                "redis-py": lambda c=case: uvloop.run(run_redis(url, *c)),
            }
            if batch == 1:
                contenders["gRPC bound"] = lambda k=kib, c=count: uvloop.run(run_echo(port, k, c))
            if peer is not None and kib == 64:
                contenders["TransferQueue"] = lambda p=peer, k=kib, b=batch, c=count: p.ask(
                    kib=k, batch=b, count=c
                )
            times: dict[str, list[tuple[float, float]]] = {who: [] for who in contenders}
            for number in range(rounds + 1):
                for who in list(contenders)[:: 1 if number % 2 else -1]:
                    cost = contenders[who]()
                    if number:  # the first round warms up
                        times[who].append(cost)
            rates = {
                who: [
                    round(count / statistics.median(spent))
                    for spent in ([t[0] for t in each], [t[1] for t in each], [*map(sum, each)])
                ]
                for who, each in times.items()
            }
            ratios = {
                who: round(rates["ours"][2] / rate[2], 3)
                for who, rate in rates.items()
                if who != "ours"
            }
            for who, rate in rates.items():
                cells = "".join(f"{each:8}" for each in rate)
                ratio = f"{ratios[who]:9.2f}" if who in ratios else ""
                print(f"{kib:4} KiB{batch:7}   {who:14}{cells}   {ratio}", flush=True)
            rows.append({"kib": kib, "batch": batch, "rates": rates, "ratios": ratios})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transferqueue", metavar="PYTHON", default="")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        uvloop.run(serve_echo())
        return
    # The service's process finds the package from here.
    os.chdir(ROOT)
    python = options.transferqueue
    peer = Peer(python, "transferqueue.py") if python else None
    echo = subprocess.Popen([sys.executable, __file__, "--echo"], stdout=subprocess.PIPE, text=True)
    try:
        assert echo.stdout is not None
        port = int(echo.stdout.readline())
        with tempfile.TemporaryDirectory() as folder:
            disk_ms = fdatasync_ms(Path(folder))
            redis = RedisServer(Path(folder) / "redis")
            redis.start()
            try:
                with start_buffer(Path(folder), redis.url, "rollout.lease_ttl_s=600") as address:
                    load = os.getloadavg()[0]
                    rows = measure(address, redis.url, port, peer, options.rounds)
            finally:
                redis.kill()
    finally:
        echo.kill()
        echo.wait()
        if peer is not None:
            peer.close()
    at_target = [row["ratios"]["redis-py"] for row in rows if row["kib"] == 64]
    print(f"64 KiB: {min(at_target):.2f} to {max(at_target):.2f} of redis-py (target {TARGET})")
    if peer is None:
        print("TransferQueue: not run, no --transferqueue PYTHON was given (see --help)")
    for row in rows:
        if "TransferQueue" in row["ratios"]:
            target = PEER_TARGETS[row["batch"]]
            ratio = row["ratios"]["TransferQueue"]
            print(f"batch {row['batch']}: {ratio:.1f} x TransferQueue (target {target})")
    print(f"fdatasync on this disk: {disk_ms:.2f} ms; load average before: {load:.1f}")
    print(
        json.dumps(
            {
                "bench": "ledger",
                "target": TARGET,
                "load": round(load, 1),
                "fdatasync_ms": round(disk_ms, 2),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
