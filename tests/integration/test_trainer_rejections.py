"""Batches from a workflow that drops most rows: the workers are not left without rows meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.integration.test_trainer_session import Actor, Session
from tests.ledger_support import make_group
from tests.redis_server import start_redis

from areal.config.experiment import GRPOConfig
from areal.datasets.loader import StatefulLoader
from areal.errors import InvalidInput
from areal.protocol.leases import Lease
from areal.types import TaskState
from areal.workflows.rlvr import RLVRWorkflow
from areal_torch.engines.rollout import RemoteSGLangEngine
from areal_torch.models.tiny import save_tokenizer

BATCH, STEPS, SLOTS = 8, 4, 16
EPISODE_S, TRAIN_S = 0.03, 0.3


class RejectingWorkers:
    """Episodes of a fixed length, of which every `accept_every`-th gives a group."""

    def __init__(self, address: str, accept_every: int) -> None:
        self.episodes = 0
        self.most_queued = 0
        self.idle_s = 0.0
        """Slots x time without a row, divided by the slots."""
        self._address = address
        self._accept_every = accept_every
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(lambda: asyncio.run(self._work()))

    async def _work(self) -> None:
        client = BufferClient(self._address)
        slots = [self._slot(client, f"w{slot}") for slot in range(SLOTS)]
        try:
            await asyncio.gather(*slots, self._watch(client))
        finally:
            await client.close()

    async def _slot(self, client: BufferClient, name: str) -> None:
        while not self._stopping.is_set():
            asked = time.monotonic()
            leases, reason = await client.lease_tasks(name, 1, 0.05)
            if not leases and reason == "queue empty":
                self.idle_s += (time.monotonic() - asked) / SLOTS
            for lease in leases:
                await self._episode(client, name, lease)

    async def _episode(self, client: BufferClient, name: str, lease: Lease) -> None:
        await asyncio.sleep(EPISODE_S)
        self.episodes += 1
        task_id = lease.task.task_id
        if self.episodes % self._accept_every:
            await client.reject_task(task_id, lease.token, "too easy")
        else:
            group = make_group(task_id, lease.policy_version)
            await client.complete_task(task_id, lease.token, group, name)

    async def _watch(self, client: BufferClient) -> None:
        while not self._stopping.is_set():
            stats = await client.get_stats()
            self.most_queued = max(self.most_queued, stats.train_counts[TaskState.QUEUED])
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._stopping.set()
        self._done.result(90)
        self._pool.shutdown()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    save_tokenizer(tmp_path / "model")
    config = GRPOConfig(run_root=str(tmp_path), total_train_steps=STEPS)
    config.model.path = str(tmp_path / "model")
    config.train_dataset.batch_size = BATCH
    config.rollout.request_timeout_s = 20.0
    with (
        start_redis(tmp_path) as redis,
        start_buffer(tmp_path / "b", redis, f"train_dataset.batch_size={BATCH}") as address,
    ):
        config.endpoints.buffer = address
        opened = Session(config)
        opened.open()
        opened.attach(Actor())
        with opened.active():
            yield opened
        opened.close()


def train(session: Session, workers: RejectingWorkers) -> list[float]:
    """Runs all steps as a recipe does; for how long the workers had no rows, of each step."""
    engine = RemoteSGLangEngine(session.config.rollout)
    rows = [{"prompt": f"{number}+1="} for number in range(100)]
    loader, idle, before = StatefulLoader(rows), [], 0.0
    for _ in range(STEPS):
        engine.prepare_batch(loader, RLVRWorkflow("math"))
        time.sleep(TRAIN_S)
        session.finish_step()
        idle.append(workers.idle_s - before)
        before = workers.idle_s
    return idle


def test_prepare_batch_when_nine_of_ten_rows_are_rejected_then_workers_never_lack_rows(
    session: Session,
) -> None:
    workers = RejectingWorkers(session.config.endpoints.buffer, accept_every=10)
    try:
        idle = train(session, workers)
    finally:
        workers.stop()
    assert workers.episodes >= 10 * BATCH * STEPS
    # Workers that lack rows do so in every step; a busy machine makes them wait in some.
    assert statistics.median(idle) < 1.0, idle
    running_ahead = (session.config.rollout.max_head_offpolicyness + 1) * BATCH
    assert workers.most_queued <= 20 * running_ahead + BATCH


def test_prepare_batch_when_every_row_is_accepted_then_no_more_is_queued_than_may_run_ahead(
    session: Session,
) -> None:
    workers = RejectingWorkers(session.config.endpoints.buffer, accept_every=1)
    try:
        train(session, workers)
    finally:
        workers.stop()
    ahead = session.config.rollout.max_head_offpolicyness + 2
    assert 0 < workers.most_queued <= ahead * BATCH


def test_prepare_batch_when_the_weights_were_not_uploaded_then_refused_in_one_line(
    session: Session,
) -> None:
    workers = RejectingWorkers(session.config.endpoints.buffer, accept_every=1)
    try:
        engine = RemoteSGLangEngine(session.config.rollout)
        loader = StatefulLoader([{"prompt": f"{number}+1="} for number in range(100)])
        engine.prepare_batch(loader, RLVRWorkflow("math"))
        with pytest.raises(InvalidInput, match=r"step 1 has a batch already.*upload_weights"):
            engine.prepare_batch(loader, RLVRWorkflow("math"))
    finally:
        workers.stop()
