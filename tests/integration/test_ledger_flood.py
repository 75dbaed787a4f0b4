"""Training beside clients that send ten times what the ledger may hold: the real service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.ledger_support import make_group
from tests.redis_server import start_redis

from areal.errors import CapacityExceeded, LeaseLost, NotFound
from areal.protocol.leases import TakeState
from areal.types import Purpose, Task, TrajectoryGroup, WorkflowSpec

MEMORY_MB, BATCH, SLOTS = 8, 4, 16
BODY_BYTES, RESULT_TOKENS = 8192, 2_000
FLOOD = 10 * (MEMORY_MB << 20) // BODY_BYTES
STEPS = 40
LONGEST_S = 20.0
"""Far more than a batch takes on a busy machine, far less than a ledger that is stuck."""


def task(task_id: str, purpose: Purpose) -> Task:
    return Task(
        task_id=task_id,
        purpose=purpose,
        workflow=WorkflowSpec(name="rlvr"),
        data={"prompt": np.random.default_rng().bytes(BODY_BYTES // 2).hex()},
    )


def result(task_id: str, version: int) -> TrajectoryGroup:
    """Some 10 KB that nothing compresses."""
    group = make_group(task_id, version, samples=1, length=RESULT_TOKENS)
    [whole] = group.trajectories
    noise = np.random.default_rng().random(RESULT_TOKENS, np.float32)
    return replace(group, trajectories=[replace(whole, behavior_logprobs=-noise)])


class Scene:
    """Workers, and clients that want more than there is room for, until told to stop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stack = AsyncExitStack()
        self._busy: list[asyncio.Task[None]] = []
        self.refusals: list[CapacityExceeded] = []
        self.submitted = 0
        self.evaluations = 0

    async def __aenter__(self) -> Scene:
        for work in (self._worker(), self._flooder(), self._flooder(), self._evaluator()):
            self._busy.append(asyncio.create_task(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._busy:
            if each.done() and not each.cancelled():
                each.result()
            each.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        await self._stack.aclose()

    def client(self) -> BufferClient:
        client = BufferClient(self._address)
        self._stack.push_async_callback(client.close)
        return client

    def refused(self, error: CapacityExceeded) -> None:
        self.refusals.append(error)

    async def _worker(self) -> None:
        """As a rollout worker does: it keeps a lease whose group finds no room, and tries again."""
        client = self.client()
        # Its episodes end with it, before their client closes: an error that nobody fetched is
        # told at some later garbage collection, in the middle of another test.
        async with asyncio.TaskGroup() as episodes:
            while True:
                leases, _ = await client.lease_tasks("w", SLOTS, 1)
                for lease in leases:
                    episodes.create_task(self._episode(client, lease))

    async def _episode(self, client: BufferClient, lease: object) -> None:
        task_id, version = lease.task.task_id, lease.policy_version  # type: ignore[attr-defined]
        group = result(task_id, version)
        with suppress(LeaseLost, NotFound):
            while True:
                try:
                    await client.complete_task(task_id, lease.token, group, "w")  # type: ignore[attr-defined]
                    return
                except CapacityExceeded as error:
                    self.refused(error)
                    await asyncio.sleep(0.5)
                    await client.renew_leases("w", [(task_id, lease.token)])  # type: ignore[attr-defined]

    async def _flooder(self) -> None:
        """Somebody who never reads what comes of it, and does not wait as long as asked to."""
        client, name = self.client(), f"s{id(object())}-{len(self._busy)}"
        while self.submitted < FLOOD:
            tasks = [task(f"{name}-{self.submitted + at}", Purpose.SERVE) for at in range(100)]
            try:
                await client.submit_tasks(tasks)
            except CapacityExceeded as error:
                self.refused(error)
                await asyncio.sleep(0.2)
            self.submitted += len(tasks)

    async def _evaluator(self) -> None:
        """Evaluations one after the other, each read when its tasks have ended."""
        client = self.client()
        while True:
            ids = [f"v{self.evaluations}-{at}" for at in range(20)]
            tasks = [task(each, Purpose.SERVE) for each in ids]
            waiting, sent = set(ids), False
            while waiting:
                if not sent:
                    try:
                        await client.submit_tasks(tasks, incarnation=1)
                        sent = True
                    except CapacityExceeded as error:
                        self.refused(error)
                        await asyncio.sleep(0.5)
                        continue
                ended = await client.wait_tasks(sorted(waiting), 1)
                async for record in client.read_tasks(ended, include_groups=True):
                    waiting.discard(record.task.task_id)
            self.evaluations += 1


async def train(client: BufferClient, incarnation: int, steps: int) -> float:
    """Takes and commits that many batches, and submits what it needs; the longest pause."""
    row, longest = 0, 0.0
    for step in range(1, steps + 1):
        began, wanted = time.monotonic(), True
        while True:
            if wanted:
                rows = [task(f"e{row + at}", Purpose.TRAIN) for at in range(BATCH)]
                try:
                    await client.submit_tasks(rows, incarnation=incarnation)
                    row += len(rows)
                except CapacityExceeded:  # then it has enough to do
                    row += len(rows)
            taken = await client.take_batch(incarnation, step, 1, refill_below=BATCH)
            if taken.state is TakeState.TAKEN:
                break
            wanted = taken.queued < BATCH
            if taken.state is TakeState.CHECKPOINT_FIRST:
                await client.commit_step(incarnation, step - 1, step - 1)
            assert time.monotonic() - began < LONGEST_S, f"step {step}: {taken.waiting_for}"
        await client.fetch_groups(incarnation, step, [g.task_id for g in taken.groups])
        if step % 5 == 0:
            await client.commit_step(incarnation, step, step)
        longest = max(longest, time.monotonic() - began)
    return longest


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def address(tmp_path: Path, redis_url: str) -> AsyncIterator[str]:
    limits = (f"buffer.max_memory_mb={MEMORY_MB}", "rollout.lease_ttl_s=10")
    with start_buffer(tmp_path, redis_url, *limits) as address:
        yield address


@pytest.mark.timeout(330)
async def test_training_when_clients_flood_the_ledger_then_it_never_pauses_for_long(
    address: str, redis_url: str, tmp_path: Path
) -> None:
    trainer = BufferClient(address)
    try:
        registered = await trainer.register_trainer(
            resume_step=0, batch_size=BATCH, max_head_offpolicyness=1, max_concurrent_rollouts=SLOTS
        )
        # The scene's evaluator is of this trainer: it may not be the first to arrive.
        async with asyncio.timeout(300), Scene(address) as scene:
            longest = await train(trainer, registered.incarnation, STEPS)
            while scene.submitted < FLOOD or scene.evaluations < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            stats = await trainer.get_stats()
        print(
            f"longest pause {longest:.2f} s, {len(scene.refusals)} refusals, "
            f"{scene.evaluations} evaluations"
        )
        assert longest < LONGEST_S
        assert scene.refusals
        assert all(each.retry_after_s is not None for each in scene.refusals)
        most = stats.limit_bytes + 4 * BATCH * 8 * RESULT_TOKENS
        assert stats.limit_bytes / 2 < stats.held_bytes < most
        # Another user of this Redis is not refused.
        with start_buffer(tmp_path / "other", redis_url, f"buffer.max_memory_mb={MEMORY_MB}") as at:
            other = BufferClient(at)
            try:
                tasks = [task(f"o{number}", Purpose.SERVE) for number in range(100)]
                assert all(await other.submit_tasks(tasks))
            finally:
                await other.close()
    finally:
        await trainer.close()
