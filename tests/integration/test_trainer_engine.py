"""What a recipe's batch calls do against a real ledger that is full, and after a resume."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.integration.test_trainer_session import Actor, Session
from tests.ledger_support import make_group
from tests.redis_server import start_redis

from areal.clients.buffer.sessions import BufferSessions
from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput, NotFound, WaitTimeout
from areal.types import Purpose, Task, WorkflowSpec
from areal.weights.servers import SyncStatus
from areal.workflows.rlvr import RLVRWorkflow
from areal_torch.engines import rollout
from areal_torch.engines.rollout import RemoteSGLangEngine
from areal_torch.models.tiny import save_tokenizer
from areal_torch.training.session import TrainerSession

BATCH, STEPS, MEMORY_MB = 2, 4, 64
ROWS = [(0, index, {"prompt": f"{index}+1="}) for index in range(BATCH * STEPS)]


class Rows:
    """A loader that ends."""

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, str]]]:
        return iter(ROWS)

    def seek(self, epoch: int, cursor: int) -> None:
        raise AssertionError("nothing is resumed here")


class Worker:
    """Leases tasks and completes them at once, in a thread of its own, until told to stop."""

    def __init__(self, address: str) -> None:
        self.reward = 1.0
        self.done: list[str] = []
        self._address = address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()))
        self._thread.start()

    async def _work(self) -> None:
        client = BufferClient(self._address)
        while not self._stopping.is_set():
            leases, _ = await client.lease_tasks("w", 4, 0.2)
            for lease in leases:
                group = make_group(lease.task.task_id, lease.policy_version)
                for trajectory in group.trajectories:
                    trajectory.rewards[-1] = self.reward
                # First: whoever waits for the task may go on before this thread does.
                self.done.append(lease.task.task_id)
                await client.complete_task(lease.task.task_id, lease.token, group, "w")
        await client.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)


class Trial:
    """One trial's buffer, and what fills its Redis."""

    def __init__(self, config: GRPOConfig, url: str) -> None:
        self.config = config
        self._redis = redis.Redis.from_url(url, socket_timeout=90.0)

    def fill(self) -> None:
        """Something else takes all the memory that Redis may use, and the ledger knows."""
        for number in range(MEMORY_MB):  # in parts: a large command would take buffers, too
            self._redis.hset("junk", str(number), bytes(1024 * 1024))
        asyncio.run(self._noticed())

    async def _noticed(self) -> None:
        client = BufferClient(self.config.endpoints.buffer)
        async with asyncio.timeout(60):
            while True:
                memory = self._redis.info("memory")  # what waits for the disk is in it, for a while
                self._redis.config_set("maxmemory", memory["used_memory"] * 12 // 10)
                settled = memory["mem_aof_buffer"] < 1024 * 1024
                if settled and (await client.get_stats()).limit_bytes == 0:
                    break
                await asyncio.sleep(0.05)
        await client.close()

    def empty(self) -> None:
        self._redis.delete("junk")
        self._redis.config_set("maxmemory", 0)

    @contextmanager
    def session(self) -> Iterator[TrainerSession]:
        session = Session(self.config)
        try:
            session.open()
            session.attach(Actor())
            with session.active():
                yield session
        finally:
            session.close()

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        worker = Worker(self.config.endpoints.buffer)
        try:
            yield worker
        finally:
            worker.stop()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def trial(tmp_path: Path, redis_url: str) -> Iterator[Trial]:
    save_tokenizer(tmp_path / "model")
    config = GRPOConfig(run_root=str(tmp_path), total_train_steps=STEPS)
    config.model.path = str(tmp_path / "model")
    config.train_dataset.batch_size = BATCH
    config.rollout.max_head_offpolicyness = 0
    config.rollout.request_timeout_s = 20.0
    limits = (f"train_dataset.batch_size={BATCH}", f"buffer.max_memory_mb={MEMORY_MB}")
    with start_buffer(tmp_path / "b", redis_url, *limits) as address:
        config.endpoints.buffer = address
        trial = Trial(config, redis_url)
        yield trial
        trial.empty()


def in_thread(function: Callable[[], object]) -> Future[object]:
    """Runs it beside the test; the session's context goes along."""
    import contextvars

    context = contextvars.copy_context()
    pool = ThreadPoolExecutor(1)
    future = pool.submit(context.run, function)
    pool.shutdown(wait=False)
    return future


def waits_for(session: TrainerSession, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not any(re.search(pattern, str(wait)) for wait in session.waits.oldest()):
        assert time.monotonic() < deadline, [str(w) for w in session.waits.oldest()]
        time.sleep(0.02)


def test_prepare_batch_when_the_ledger_is_full_then_rows_are_held_back_and_none_is_lost(
    trial: Trial,
) -> None:
    trial.fill()
    with trial.session() as session, trial.worker() as worker:
        engine = RemoteSGLangEngine(trial.config.rollout)
        taken = []
        for step in range(STEPS):
            batch = engine.prepare_batch(Rows(), RLVRWorkflow("math"))
            taken.append(int(batch["group_index"].max()) + 1)
            if step == 0:
                assert engine._feeder.held_back is not None, (
                    "everything was accepted: nothing is tested"
                )
            session.finish_step()
            if engine._feeder.held_back is not None:  # a checkpoint of now must bring them again
                assert tuple(engine._feeder.cursor()) <= engine._feeder.held_back[0].position
        assert taken == [BATCH] * STEPS
        assert sorted(worker.done) == sorted(f"e0-{index}" for index in range(BATCH * STEPS))
        assert engine._feeder.cursor() == [0, BATCH * STEPS]


def test_cursor_when_rows_are_taken_then_it_passes_them_once_their_step_has_ended(
    trial: Trial,
) -> None:
    """A checkpoint before brings them again; one after does not, although they are kept."""
    with trial.session() as session, trial.worker():
        engine = RemoteSGLangEngine(trial.config.rollout)
        for step in range(2):
            engine.prepare_batch(Rows(), RLVRWorkflow("math"))
            assert engine._feeder.cursor() == [0, step * BATCH]
            session.finish_step()
            assert engine._feeder.cursor() == [0, (step + 1) * BATCH]


@pytest.mark.parametrize(("full", "most"), [(True, 4), (False, 2)])
def test_prepare_batch_when_no_more_rows_can_be_submitted_then_it_waits_without_asking_on(
    trial: Trial, full: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "POLL_S", 2.5)
    trial.config.rollout.request_timeout_s = 2.0 / 3
    if full:
        trial.fill()
    with trial.session() as session:
        looks, take = [], session.ledger.buffer.take_batch

        async def counted(*arguments: object, **more: object) -> object:
            looks.append(time.monotonic())
            return await take(*arguments, **more)

        session.ledger.buffer.take_batch = counted
        engine = RemoteSGLangEngine(trial.config.rollout)
        with pytest.raises(WaitTimeout, match="batch of step 1: 0 of 2 groups are completed"):
            engine.prepare_batch(Rows(), RLVRWorkflow("math"))
        assert (engine._feeder.held_back is not None) == full
        assert len(looks) <= most


async def agents_outside(address: str, count: int) -> None:
    """Opens sessions, one after the other, and ends each with a group."""
    client = BufferClient(address)
    sessions = BufferSessions(client.connection)
    for number in range(count):
        task_id = f"session-{number}"
        task = Task(task_id, Purpose.TRAIN, WorkflowSpec("session"), {})
        version = (await sessions.open(task, ["a" * 64], 60.0, b"")).policy_version
        token = (await sessions.get(task_id, 0)).lease.token
        await client.complete_task(task_id, token, make_group(task_id, version), "session")
    await client.close()


def test_prepare_batch_when_there_are_no_rows_then_sessions_of_agents_outside_are_taken(
    trial: Trial,
) -> None:
    with trial.session() as session:
        engine = RemoteSGLangEngine(trial.config.rollout)
        with pytest.raises(InvalidInput, match="workflow None: expected a workflow for the rows"):
            engine.prepare_batch(Rows())
        waiting = in_thread(lambda: engine.prepare_batch(None))
        waits_for(session, "batch")
        asyncio.run(agents_outside(trial.config.endpoints.buffer, BATCH))
        batch = waiting.result(60)
        assert set(batch["group_index"].tolist()) == set(range(BATCH))  # type: ignore[index]


def test_batch_calls_when_the_ledger_is_full_then_they_wait_by_name_and_have_a_deadline(
    trial: Trial,
) -> None:
    with trial.session() as session, trial.worker() as worker:
        engine = RemoteSGLangEngine(trial.config.rollout)
        workflow, rows = RLVRWorkflow("math"), [row for *_, row in ROWS]
        for what, call in (
            ("step 1", lambda: engine.rollout_batch(rows, workflow)),
            ("evaluation 'held'", lambda: engine.evaluate(rows, workflow, "held")),
        ):
            worker.done.clear()
            trial.fill()
            done = in_thread(call)
            waits_for(session, rf"room for \d tasks of {what}")
            (wait,) = [w for w in session.waits.oldest() if w.what == "call"]
            assert wait.on == f"buffer {trial.config.endpoints.buffer}"
            assert not done.done()
            trial.empty()
            done.result(60)
            assert len(worker.done) == len(rows)
        trial.fill()
        trial.config.rollout.request_timeout_s = 0.5 / 3
        said = r"for room for 8 tasks of evaluation 'again': .*memory limit.* on buffer 127"
        with pytest.raises(WaitTimeout, match=said):
            engine.evaluate(rows, workflow, "again")
        trial.empty()


def test_rollout_batch_when_servers_still_load_then_nothing_is_submitted(trial: Trial) -> None:
    workflow, rows = RLVRWorkflow("math"), [row for *_, row in ROWS][:2]
    with trial.session() as session, trial.worker() as worker:
        loaded = asyncio.Event()
        confirmed = session.weight_sync.wait_confirmed

        async def wait_confirmed(version: int, *, timeout: float) -> SyncStatus:
            await asyncio.wait_for(loaded.wait(), 60)
            return await confirmed(version, timeout=timeout)

        session.weight_sync.wait_confirmed = wait_confirmed  # type: ignore[method-assign]
        session.published_version = 0  # weight-sync has version 0; the stand-in names none
        engine = RemoteSGLangEngine(trial.config.rollout)
        batch = in_thread(lambda: engine.rollout_batch(rows, workflow))
        waits_for(session, "a server to confirm version 0")
        assert sum(session.ledger.train_counts().values()) == 0
        assert not worker.done

        async def load() -> None:
            loaded.set()

        session.bridge.call(load(), "the test's server")
        batch.result(60)
        assert len(worker.done) == 2


def test_evaluate_when_the_policy_has_moved_then_measured_again_and_else_not(trial: Trial) -> None:
    workflow, rows = RLVRWorkflow("math"), [row for *_, row in ROWS][:3]
    trial.config.checkpoint.freq_steps = 1

    def life(steps: int, reward: float) -> tuple[float, float, int]:
        """What a recipe does: evaluate, train, evaluate; and how many tasks its worker did."""
        with trial.session() as session, trial.worker() as worker:
            worker.reward = reward
            engine = RemoteSGLangEngine(trial.config.rollout)
            before = engine.evaluate(rows, workflow, "before")
            for _ in range(steps):
                engine.rollout_batch(rows, workflow)
                session.finish_step()
            return before, engine.evaluate(rows, workflow, "after"), len(worker.done)

    with trial.session(), pytest.raises(NotFound, match="version 1 is not published yet"):
        RemoteSGLangEngine(trial.config.rollout).evaluate(rows, workflow, "early", version=1)
    assert life(2, 1.0) == (1.0, 1.0, 12)
    # Finished, and started again as it is: nothing to do.
    assert life(0, 0.5) == (1.0, 1.0, 0)
    # Extended: the first figure is of a policy that is served no longer, the last is of a new one.
    assert life(1, 0.25) == (1.0, 0.25, 6)
    assert life(0, 0.125) == (1.0, 0.25, 0)
