"""The trainer's session against a real ledger: what a resume finds, says and does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.ledger_support import make_group, make_task
from tests.redis_server import start_redis

from areal.config.experiment import GRPOConfig
from areal.errors import CapacityExceeded, InvalidInput, WaitTimeout
from areal.protocol.leases import TakeState
from areal.types import Purpose
from areal.weights.servers import SyncStatus
from areal_torch.training import checkpoint_writer, evaluation
from areal_torch.training.checkpoint_writer import Checkpointable
from areal_torch.training.session import TrainerSession

BATCH, STEPS = 2, 4


class ServedVersion:
    """Weight-sync with version 0 confirmed."""

    address = "weight-sync.test:1"

    async def wait_confirmed(self, version: int, *, timeout: float) -> SyncStatus:
        return SyncStatus(
            current=None,
            confirmed_servers=1,
            servers=1,
            confirmed_version=0,
            updates=0,
            update_seconds_mean=0.0,
            aborted_requests=0,
        )

    async def close(self) -> None:
        pass


class Session(TrainerSession):
    async def _connect(self):
        return BufferClient(self.config.endpoints.buffer), ServedVersion()

    def take_ids(self) -> list[str]:
        """Ids of the next step's batch."""
        taken = self.ledger.take(self.step + 1, max_wait_s=5.0)
        assert taken.state is TakeState.TAKEN
        return [group.task_id for group in taken.groups]

    def committed(self) -> dict[str, int]:
        stats = self.bridge.call(self.ledger.buffer.get_stats(), "stats")
        return {"trained": stats.last_committed_step, "taken": stats.last_taken_step}


class Actor:
    """Saves one small file."""

    def checkpoint_bytes(self) -> int:
        return 7

    def save_checkpoint(self, directory: Path) -> Future[None]:
        (directory / "weights").write_bytes(bytes(1000))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class SlowDisk(Actor):
    """Done when the test says so."""

    def __init__(self) -> None:
        self.written: Future[None] = Future()

    def checkpoint_bytes(self) -> int:
        return 7

    def save_checkpoint(self, directory: Path) -> Future[None]:
        return self.written


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Opens sessions of one trial; its ledger holds the groups of all steps, made beforehand."""
    config = GRPOConfig(run_root=str(tmp_path), total_train_steps=STEPS)
    config.train_dataset.batch_size = BATCH
    config.rollout.max_head_offpolicyness = STEPS
    config.checkpoint.freq_steps = 1
    sessions: list[Session] = []

    async def fill(address: str) -> None:
        client = BufferClient(address)
        ids = [f"e0-{number}" for number in range(BATCH * STEPS)]
        await client.submit_tasks([make_task(i, Purpose.TRAIN) for i in ids])
        leases, _ = await client.lease_tasks("w", len(ids), 5.0)
        for lease in leases:
            task_id = lease.task.task_id
            await client.complete_task(task_id, lease.token, make_group(task_id), "w")
        await client.close()

    def open_session(actor: Checkpointable | None = None) -> Session:
        session = Session(config)
        sessions.append(session)
        session.open()
        session.attach(actor or Actor())
        return session

    bound = f"rollout.max_head_offpolicyness={STEPS}"
    with (
        start_redis(tmp_path) as redis,
        start_buffer(tmp_path / "b", redis, bound, f"train_dataset.batch_size={BATCH}") as address,
    ):
        config.endpoints.buffer = address
        asyncio.run(fill(address))
        yield open_session
        for session in sessions:
            session.close()


def steps(session: Session, count: int) -> list[list[str]]:
    """Takes and ends steps as a recipe does."""
    batches = []
    for _ in range(count):
        session.begin_step()
        batches.append(session.take_ids())
        session.finish_step()
    return batches


def test_call_when_nobody_answers_then_the_error_names_the_service_and_its_address(begin) -> None:
    session = begin()

    async def never() -> None:
        held.extend(str(wait) for wait in session.waits.oldest() if wait.what == "call")
        await asyncio.Event().wait()

    held: list[str] = []
    buffer = f"buffer {session.ledger.buffer.connection.address}"
    with pytest.raises(WaitTimeout, match=rf"for the batch on {buffer}$"):
        session.ledger.ask(never, "the batch", timeout=0.1)
    with pytest.raises(WaitTimeout, match=r"for the version on weight-sync weight-sync\.test:1$"):
        session._ask_weight_sync(never, "the version", timeout=0.1)
    assert held[0].startswith(f"call (the batch) on {buffer} for ")
    assert held[1].startswith("call (the version) on weight-sync weight-sync.test:1 for ")


def test_evaluation_when_its_groups_pass_a_message_then_read_in_several(begin) -> None:
    session = begin()
    ids = [f"held-out-v0-{number}" for number in range(3)]
    tasks = [make_task(i, Purpose.SERVE) for i in ids]

    async def deliver() -> None:
        client = session.ledger.buffer
        await client.submit_tasks(tasks)
        leases, _ = await client.lease_tasks("w", len(ids), 5.0)
        for number, lease in enumerate(leases):
            # Some 40 MB each, before compression: a message holds two.
            group = make_group(lease.task.task_id, samples=1, length=2_500_000)
            group.trajectories[0].rewards[-1] = number
            await client.complete_task(lease.task.task_id, lease.token, group, "w")

    session.bridge.call(deliver(), "groups")
    figure = evaluation.measure(session, tasks, "held-out", 60.0)
    assert figure == evaluation.Figure(1.0, pytest.approx(3**-0.5), 3)
    lines = (session.config.run_dir / "evaluations" / "held-out-v0.jsonl").read_text().splitlines()
    kept = sorted(map(json.loads, lines), key=lambda each: each["task_id"])
    assert [each["task_id"] for each in kept] == ids
    assert [each["answers"][0]["reward"] for each in kept] == [0.0, 1.0, 2.0]
    with pytest.raises(CapacityExceeded, match=r"the first \d of 3 fill a message"):
        session.bridge.call(
            session.ledger.buffer.get_tasks(ids, include_groups=True), "all at once"
        )


def test_attach_when_an_actor_is_attached_then_a_second_one_is_refused_in_one_line(begin) -> None:
    session = begin()
    with pytest.raises(InvalidInput, match=r"^a second trainable actor: .*config\.ref\)\)$"):
        session.attach(Actor())
    steps(session, 1)
    assert session.committed()["taken"] == 1


def test_resume_when_killed_between_checkpoint_and_commit_then_commits_first(begin) -> None:
    first = begin()
    steps(first, 2)
    first.save_checkpoint()
    first.begin_step()
    lost = first.take_ids()
    # As if killed right after the rename: a whole checkpoint of step 3, nothing committed.
    first.step = 3
    first._snapshot()
    pending = first._checkpoints._pending
    pending.written.result()
    first.folder.finish(pending.directory, pending.extra)
    assert first.committed() == {"trained": 2, "taken": 3}
    second = begin()
    assert second.step == 3
    assert second.committed() == {"trained": 3, "taken": 3}
    assert second.take_ids() != lost


@pytest.mark.parametrize("damaged", [0, 1])
def test_resume_when_from_any_retained_checkpoint_then_the_same_batches_follow(
    begin, damaged: int
) -> None:
    first = begin()
    batches = steps(first, STEPS)
    first.save_checkpoint()
    kept = first.folder.list()
    assert [c.step for c in kept] == [STEPS - 1, STEPS]
    for checkpoint in kept[len(kept) - damaged :]:
        (checkpoint.path / "weights").write_bytes(bytes(999) + b"1")  # same size
    second = begin()
    assert second.step == STEPS - damaged
    assert steps(second, damaged) == batches[STEPS - damaged :]


def test_resume_when_no_retained_checkpoint_is_whole_then_refused_in_one_line(begin) -> None:
    first = begin()
    steps(first, 3)
    first.save_checkpoint()
    for checkpoint in first.folder.list():
        (checkpoint.path / "done.json").unlink()
    with pytest.raises(InvalidInput, match=r"released.*newest complete checkpoint in .* is none"):
        begin()


def test_checkpoint_when_written_then_its_row_was_there_before(begin, tmp_path: Path) -> None:
    session = begin()
    rows_at_finish = []
    finish = session.folder.finish

    def look(temporary, extra):
        rows_at_finish.append(
            (extra["step"], [row["step"] for row in session.status.snapshot(0).rows])
        )
        return finish(temporary, extra)

    session.folder.finish = look
    steps(session, 3)
    session.save_checkpoint()
    for step, rows in rows_at_finish:
        assert rows[:step] == list(range(1, step + 1))
    assert [step for step, _ in rows_at_finish] == [1, 2, 3]
    assert all("time/checkpoint" in row for row in session.status.snapshot(0).rows)


def test_checkpoint_when_the_disk_is_slow_then_steps_go_on_and_the_next_one_waits_by_name(
    begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(disk := SlowDisk())
    session.config.checkpoint.freq_steps = 2
    steps(session, 3)  # the checkpoint of step 2 is being written
    assert any(
        str(w).startswith("checkpoint (step 2) on this disk") for w in session.waits.oldest()
    )
    monkeypatch.setattr(checkpoint_writer, "CHECKPOINT_LEAST_S", 0.2)
    with pytest.raises(WaitTimeout, match=r"checkpoint of step 2 on .*is the disk full"):
        steps(session, 1)
    disk.written.set_result(None)  # its thread would wait for ten minutes


def test_checkpoint_when_it_takes_too_long_between_two_then_the_error_names_it(
    begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "CHECKPOINT_LEAST_S", 0.2)
    session = begin(SlowDisk())
    steps(session, 1)
    session.config.checkpoint.freq_steps = 0
    session._checkpoints._pending.future.exception(30)
    with pytest.raises(WaitTimeout, match=r"checkpoint of step 1 on .*is the disk full"):
        steps(session, 1)


def test_begin_when_the_last_trainer_left_a_half_written_checkpoint_then_it_is_removed(
    begin,
) -> None:
    first = begin()
    steps(first, 1)
    first.save_checkpoint()
    leftover = first.folder.begin(7, first.incarnation)
    second = begin()
    assert not leftover.exists()
    assert second.step == 1
