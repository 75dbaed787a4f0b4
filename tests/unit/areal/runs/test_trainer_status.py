import asyncio
import threading

from areal.runs.status import Evaluation, TrainerStatus
from areal.v1 import trainer_service_pb2 as pb


async def test_wait_for_row_when_a_step_ends_in_another_thread_then_wakes_at_once():
    status = TrainerStatus(total_steps=10, world_size=1)
    status.opened(incarnation=2, step=0, rows=[])
    waiting = asyncio.create_task(status.wait_for_row(after_step=0, max_wait_s=20))
    await asyncio.sleep(0.01)
    threading.Thread(target=status.finished_step, args=(1, {"step": 1})).start()
    snapshot = await asyncio.wait_for(waiting, 15)
    assert [row["step"] for row in snapshot.rows] == [1]
    assert (snapshot.step, snapshot.incarnation) == (1, 2)


async def test_wait_for_row_when_nothing_happens_then_returns_after_the_wait():
    status = TrainerStatus(total_steps=10, world_size=1)
    status.waiting("batch of step 1")
    snapshot = await asyncio.wait_for(status.wait_for_row(0, 0.05), 15)
    assert snapshot.rows == []
    assert snapshot.state == pb.TRAINER_STATE_WAITING
    assert snapshot.detail == "batch of step 1"


async def test_wait_for_row_when_the_trainer_has_ended_then_does_not_wait():
    status = TrainerStatus(total_steps=1, world_size=1)
    status.ended("boom")
    snapshot = await asyncio.wait_for(status.wait_for_row(0, 30), 20)
    assert (snapshot.state, snapshot.detail) == (pb.TRAINER_STATE_FAILED, "boom")


def test_snapshot_when_rows_exist_then_only_later_ones():
    status = TrainerStatus(total_steps=5, world_size=1)
    status.opened(1, 3, [{"step": 1}, {"step": 2}, {"step": 3}])
    assert [row["step"] for row in status.snapshot(1).rows] == [2, 3]
    assert status.snapshot(3).rows == []


async def test_wait_for_row_when_held_out_rows_are_measured_then_wakes_and_tells():
    status = TrainerStatus(total_steps=10, world_size=1)
    before, lost = Evaluation("heldout_before", 0, 0.25), Evaluation("heldout", 5, 0.5)
    status.opened(2, 3, [], [before, lost])  # step 5 was lost with the trainer before
    assert status.snapshot(0).evaluations == [before]
    waiting = asyncio.create_task(status.wait_for_row(after_step=3, max_wait_s=20))
    await asyncio.sleep(0.01)
    again = Evaluation("heldout", 3, 0.75)
    threading.Thread(target=status.evaluated, args=(again,)).start()
    assert (await asyncio.wait_for(waiting, 15)).evaluations == [before, again]
