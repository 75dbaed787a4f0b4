"""Redis and the buffer die and come back: nothing acknowledged is lost, leases survive."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.ledger_support import make_group, make_task
from tests.redis_server import RedisServer
from tests.service_process import service_process
from tests.waiting import until

from areal.clients.redis_connection import connect_redis, redis_prefix
from areal.errors import ArealError, LeaseLost, Unavailable, WaitTimeout
from areal.protocol.leases import Lease, TakeState
from areal.types import TaskState

OVERRIDES = ("train_dataset.batch_size=4", "rollout.lease_ttl_s=2")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", appendfsync="always")
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def test_redis_when_killed_under_load_then_nothing_acknowledged_is_lost(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with start_buffer(tmp_path, redis_server.url, *OVERRIDES) as address:
        client = BufferClient(address, retry_s=60)
        submitted: set[str] = set()
        completed: set[str] = set()
        stop = asyncio.Event()

        async def submit() -> None:
            number = 0
            while not stop.is_set():
                ids = [f"{number + i}" for i in range(5)]
                number += 5
                await client.submit_tasks([make_task(each) for each in ids])
                submitted.update(ids)

        async def work(name: str) -> None:
            while not stop.is_set():
                try:
                    leases, _ = await client.lease_tasks(name, 4, 1)
                except (Unavailable, WaitTimeout):
                    continue
                for lease in leases:
                    task_id = lease.task.task_id
                    try:
                        await client.complete_task(
                            task_id, lease.token, make_group(task_id, lease.policy_version), name
                        )
                        completed.add(task_id)
                    except LeaseLost:
                        continue

        batches: dict[int, list[str]] = {}

        async def train() -> None:
            registration = await client.register_trainer(
                resume_step=0,
                batch_size=4,
                max_head_offpolicyness=2,
                max_concurrent_rollouts=64,
            )
            step = 1
            while not stop.is_set():
                batch = await client.take_batch(registration.incarnation, step, 1)
                if batch.state is TakeState.TAKEN:
                    batches[step] = [group.task_id for group in batch.groups]
                    step += 1

        jobs = [asyncio.create_task(job) for job in (submit(), work("w1"), work("w2"), train())]
        try:
            for _ in range(3):
                await asyncio.sleep(1.0)
                redis_server.kill()
                await asyncio.sleep(0.3)
                redis_server.start()
            at_last_restart = len(batches)
            deadline = time.monotonic() + 90
            while len(batches) < at_last_restart + 5 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
                for job in jobs:
                    if job.done():
                        job.result()
            stop.set()
            await asyncio.gather(*jobs)
            assert len(batches) >= at_last_restart + 5
            stats = await client.get_stats()
            assert sum(stats.counts.values()) == stats.submitted
            assert stats.submitted >= len(submitted) > 0
            asked = sorted(submitted)
            records = []
            for first in range(
                0, len(asked), 5000
            ):  # a call takes 10,000, a fast machine makes more
                records += await client.get_tasks(asked[first : first + 5000])
            assert {record.task.task_id for record in records} == submitted
            done = {TaskState.COMPLETED, TaskState.BATCHED}
            kept = {record.task.task_id for record in records if record.state in done}
            assert completed <= kept
            # Batches are what they were, however often Redis came back from its file.
            for step, ids in batches.items():
                again = await client.take_batch(1, step, 0)
                assert [group.task_id for group in again.groups] == ids
            taken = [task_id for ids in batches.values() for task_id in ids]
            assert len(taken) == len(set(taken))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await client.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_redis_when_away_for_longer_than_a_lease_then_leases_are_kept(
    redis_server: RedisServer, tmp_path: Path, how: str
) -> None:
    with start_buffer(tmp_path, redis_server.url, *OVERRIDES) as address:
        client, once = BufferClient(address), BufferClient(address, timeout_s=4, retry_s=0)
        try:
            await client.submit_tasks([make_task("a"), make_task("b")])
            leases, _ = await client.lease_tasks("w1", 2, 1)
            tokens = [(lease.task.task_id, lease.token) for lease in leases]
            if how == "killed":
                redis_server.kill()
                with pytest.raises((Unavailable, WaitTimeout)):
                    await once.renew_leases("w1", tokens)
                redis_server.start()
            else:
                redis_server.send_signal(signal.SIGSTOP)
                await asyncio.sleep(4)
                redis_server.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 90
            lost: set[str] | None = None
            while lost is None and time.monotonic() < deadline:
                try:
                    lost = await once.renew_leases("w1", tokens)
                except ArealError:
                    continue
            assert lost == set()
            await asyncio.sleep(1.5)  # a sweep or more
            for task_id, token in tokens:
                assert await client.complete_task(task_id, token, make_group(task_id), "w1")
            records = await client.get_tasks(["a", "b"])
            assert [record.infrastructure_attempts for record in records] == [0, 0]
        finally:
            await client.close()
            await once.close()


async def test_lease_when_its_worker_stays_silent_after_an_outage_then_it_still_expires(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with start_buffer(tmp_path, redis_server.url, *OVERRIDES) as address:
        client = BufferClient(address, timeout_s=3)
        try:
            await client.submit_tasks([make_task("a")])
            (held,), _ = await client.lease_tasks("w1", 1, 1)
            redis_server.kill()
            with pytest.raises((Unavailable, WaitTimeout)):  # several sweeps have failed by then
                await client.get_tasks(["a"])
            redis_server.start()
            leases: list[Lease] = []
            async with asyncio.timeout(60):
                while not leases:
                    with suppress(Unavailable, WaitTimeout):
                        leases, _ = await client.lease_tasks("w2", 1, 10)
            assert leases[0].task.task_id == "a"
            assert leases[0].token > held.token
        finally:
            await client.close()


async def test_buffer_when_restarted_after_a_lease_time_then_leases_are_kept(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Time is not slept through but taken off the ledger's own clocks: no margin to miss."""
    lease_s = 600
    options = (f"rollout.lease_ttl_s={lease_s}",)
    with start_buffer(tmp_path, redis_server.url, *options, namespace="again") as address:
        client = BufferClient(address)
        await client.submit_tasks([make_task("a")])
        leases, _ = await client.lease_tasks("w1", 1, 1)
        await client.close()
    prefix = redis_prefix("test/again")
    away_ms = (lease_s + 60) * 1000
    async with connect_redis(redis_server.url) as redis:
        await redis.zincrby(f"{prefix}running:train", -away_ms, "a")
        await redis.hincrby(f"{prefix}meta", "last_sweep", -away_ms)
        assert float(await redis.zscore(f"{prefix}running:train", "a")) < time.time() * 1000
        with start_buffer(tmp_path, redis_server.url, *options, namespace="again") as address:
            client = BufferClient(address)
            try:
                async with asyncio.timeout(60):
                    swept = 0
                    while swept < 3:  # sweeps after the restart
                        before = await redis.hget(f"{prefix}meta", "last_sweep")
                        while await redis.hget(f"{prefix}meta", "last_sweep") == before:  # noqa: ASYNC110
                            await asyncio.sleep(0.02)
                        swept += 1
                (record,) = await client.get_tasks(["a"])
                assert (record.state, record.infrastructure_attempts) == (TaskState.RUNNING, 0)
                assert await client.complete_task("a", leases[0].token, make_group("a"), "w1")
            finally:
                await client.close()


async def test_buffer_when_redis_starts_after_it_then_it_waits_and_serves(tmp_path: Path) -> None:
    """As when an upgrade replaces both pods at once."""
    server, log = RedisServer(tmp_path / "redis"), tmp_path / "areal_buffer.log"

    async def start_late() -> None:
        await until(
            lambda: log.exists() and "redis_unreachable" in log.read_text(), "the first refusal"
        )
        server.start()

    late = asyncio.create_task(start_late())
    try:
        config = f"endpoints: {{redis: '{server.url}'}}"
        async with service_process("areal_buffer", tmp_path, config) as service:
            await late
            client = BufferClient(service.listen)
            assert (await client.get_stats()).submitted == 0
            await client.close()
    finally:
        late.cancel()
        server.kill()
