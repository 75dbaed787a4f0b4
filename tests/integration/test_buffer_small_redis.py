"""A Redis of one's own, with a smaller limit than `buffer.max_memory_mb`, or one that evicts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.ledger_support import make_group, make_task
from tests.redis_server import RedisServer

from areal.clients.redis_connection import connect_redis
from areal.errors import CapacityExceeded
from areal.protocol.leases import TakeState
from areal.types import TrajectoryGroup

LIMIT_MB = 40


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        yield server
    finally:
        server.kill()


def large(task_id: str) -> TrajectoryGroup:
    """About 1 MB that nothing compresses."""
    group = make_group(task_id, samples=1, length=250_000)
    [whole] = group.trajectories
    noise = np.random.default_rng(0).random(len(whole.input_ids), np.float32)
    return replace(group, trajectories=[replace(whole, behavior_logprobs=-noise)])


async def test_memory_when_redis_itself_has_less_then_the_trainer_goes_on_all_the_same(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with connect_redis(redis_server.url) as redis:
        await redis.config_set("maxmemory", LIMIT_MB << 20)
    with start_buffer(tmp_path, redis_server.url) as address:
        client = BufferClient(address)
        try:
            trainer = await client.register_trainer(
                resume_step=0, batch_size=2, max_head_offpolicyness=40, max_concurrent_rollouts=99
            )
            names = [f"t{number}" for number in range(2 * LIMIT_MB)]
            await client.submit_tasks([make_task(name) for name in names])
            leases = {}
            while len(leases) < len(names):
                found, _ = await client.lease_tasks("w", 99, 1)
                leases.update({lease.task.task_id: lease.token for lease in found})

            async def fill() -> None:
                for name in names:
                    await client.complete_task(name, leases[name], large(name), "w")

            # With slow writes, what Redis buffers for its file can reach the limit first.
            said = "ledger is near its memory limit|^Redis is out of memory: command not allowed"
            with pytest.raises(CapacityExceeded, match=said):
                await fill()
            for step in (1, 2, 3):
                taken = await client.take_batch(trainer.incarnation, step, 1)
                if taken.state is TakeState.CHECKPOINT_FIRST:
                    await client.commit_step(trainer.incarnation, step - 1, step - 1)
                    taken = await client.take_batch(trainer.incarnation, step, 1)
                assert taken.state is TakeState.TAKEN
            await client.commit_step(trainer.incarnation, 3, 3)
        finally:
            await client.close()


async def test_buffer_when_redis_would_evict_tasks_then_one_line_and_no_start(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with connect_redis(redis_server.url) as redis:
        await redis.config_set("maxmemory", LIMIT_MB << 20)
        await redis.config_set("maxmemory-policy", "allkeys-lru")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"experiment_name: a\ntrial_name: b\nendpoints: {{redis: '{redis_server.url}'}}\n"
    )
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "areal_buffer", "--config", str(config), "--listen", "127.0.0.1:0"],
        env={"PYTHONPATH": "services", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    [line] = [each for each in ended.stderr.splitlines() if each.startswith("areal-buffer: ")]
    assert "maxmemory-policy 'allkeys-lru'" in line
    assert "noeviction" in line
