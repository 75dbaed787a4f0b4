"""What the buffer service refuses, over real gRPC: one clear line, and nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import register, start_buffer
from tests.ledger_support import incompressible, make_group, make_task

from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    NotFound,
    StaleIncarnation,
    WorkflowError,
    WrongStep,
)
from areal.protocol.leases import TakeState
from areal.protocol.trajectories import task_to_pb
from areal.types import Purpose, WorkflowSpec
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2


async def test_errors_when_crossing_the_wire_then_keep_their_class(buffer: BufferClient) -> None:
    old = await register(buffer)
    new = await register(buffer)
    with pytest.raises(StaleIncarnation, match="the current one is 2"):
        await buffer.take_batch(old, 1, 0)
    with pytest.raises(StaleIncarnation):
        await buffer.submit_tasks([], incarnation=old, seal=True)
    with pytest.raises(StaleIncarnation):
        await buffer.fetch_groups(old, 1, ["a"])
    with pytest.raises(WrongStep):
        await buffer.take_batch(new, 2, 0)
    with pytest.raises(WrongStep):
        await buffer.commit_step(new, 1, 0)
    with pytest.raises(NotFound):
        await buffer.wait_tasks(["ghost"], 0)
    with pytest.raises(NotFound, match="not part of the batch of step 1"):
        await buffer.fetch_groups(new, 1, ["ghost"])
    await buffer.submit_tasks([make_task("a")])
    await buffer.cancel_tasks(["a"])
    with pytest.raises(WorkflowError, match="none of the 1 tasks gave a group; a is cancelled"):
        await buffer.take_batch(new, 1, 0, task_ids=["a"])


BAD_TASKS = {
    "task_id ''": make_task(""),
    "task_id 'a b'": make_task("a b"),
    "task_id 'aaaa": make_task("a" * 201),
    "workflow.name ''": replace(make_task("x"), workflow=WorkflowSpec(name="")),
    "workflow.recipe_digest 'zz'": replace(
        make_task("x"), workflow=WorkflowSpec(name="w", recipe_digest="zz")
    ),
    "task 'x' workflow.kwargs_json: not JSON": replace(
        make_task("x"), workflow=WorkflowSpec(name="w", kwargs_json="{")
    ),
    "task 'x' data_json has": replace(make_task("x"), data={"q": "a" * 1024 * 1024}),
    "task 'x' position (0, -1)": make_task("x", position=(0, -1)),
    "task 'x' time_to_live": make_task("x", time_to_live_s=-1.0),
}


@pytest.mark.parametrize("complaint", BAD_TASKS)
async def test_submit_when_a_task_is_malformed_then_named_and_nothing_is_queued(
    buffer: BufferClient, complaint: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await buffer.submit_tasks([make_task("good"), BAD_TASKS[complaint]])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (await buffer.get_stats()).submitted == 0


async def test_submit_when_message_is_wrong_in_ways_the_client_prevents_then_invalid(
    buffer: BufferClient,
) -> None:
    good = task_to_pb(make_task("x"))
    for field, value, complaint in (
        ("purpose", 9, "task 'x' purpose 9: expected TRAIN or SERVE"),
        ("data_json", "[1]", "task 'x' data_json: expected a JSON object, got list"),
        ("data_json", "{", "task 'x' data_json: not JSON"),
    ):
        message = trajectory_pb2.Task()
        message.CopyFrom(good)
        setattr(message, field, value)
        request = pb.BufferServiceSubmitTasksRequest(tasks=[good, message])
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as caught:
            await buffer._stub.SubmitTasks(request, timeout=60)
        assert complaint in (caught.value.details() or "")
    many = pb.BufferServiceSubmitTasksRequest(tasks=[good] * 10_001)
    with pytest.raises(grpc.aio.AioRpcError, match="at most 10000 a call"):
        await buffer._stub.SubmitTasks(many, timeout=60)
    assert (await buffer.get_stats()).submitted == 0


async def test_complete_when_group_is_malformed_then_named_and_the_lease_stays(
    buffer: BufferClient,
) -> None:
    await buffer.submit_tasks([make_task("a")])
    leases, _ = await buffer.lease_tasks("w1", 1, 1)
    token = leases[0].token

    async def complaint(group: object) -> str:
        with pytest.raises(InvalidInput) as caught:
            await buffer.complete_task("a", token, group, "w1")  # type: ignore[arg-type]
        return str(caught.value)

    assert "task_id 'b': expected the task's id 'a'" in await complaint(make_group("b"))
    large = make_group("a", length=2_200_000)
    assert "at most 67108864" in await complaint(large)
    bad = make_group("a")
    bad.trajectories[1].rewards[0] = np.nan
    assert "trajectory 'a.1' rewards: a value is not finite" in await complaint(bad)
    bad = make_group("a")
    bad.trajectories[0].token_versions[:] = -1
    assert "token_versions must be >= 0 wherever loss_mask is set" in await complaint(bad)
    bad = make_group("a")
    bad.trajectories[0].loss_mask = bad.trajectories[0].loss_mask[:3]
    assert "loss_mask: length 3, expected 6" in await complaint(bad)
    bad = make_group("a")
    bad.trajectories[1].trajectory_id = bad.trajectories[0].trajectory_id
    assert "trajectory_id must be set and distinct" in await complaint(bad)
    bad = make_group("a", version=2**30)
    assert "is no policy version" in await complaint(bad)
    bad = make_group("a")
    bad.trajectories = []
    assert "has no trajectories" in await complaint(bad)
    assert await buffer.complete_task("a", token, make_group("a"), "w1")


async def test_numbers_when_out_of_range_then_invalid(buffer: BufferClient) -> None:
    calls = (
        buffer.take_batch(0, 1, 0),
        buffer.take_batch(1, 0, 0),
        buffer.take_batch(1, 2**60, 0),
        buffer.commit_step(1, 1, 2),
        buffer.lease_tasks("", 1, 0),
        buffer.lease_tasks("w", 0, 0),
        buffer.lease_tasks("w", 1001, 0),
        buffer.wait_tasks([], 0),
        buffer.take_batch(1, 1, 0, task_ids=["a", "a"]),
        buffer.complete_task("a", 0, make_group("a"), "w"),
        register(buffer, -1),
        buffer.list_dead_letters(-1),
        buffer.renew_leases("w", [("a", 1)] * 10_001),
    )
    for call in calls:
        with pytest.raises(InvalidInput):
            await call


async def test_memory_when_the_limit_is_tiny_then_refused_with_a_clear_line(
    buffer_redis: str, tmp_path: Path
) -> None:
    with start_buffer(tmp_path, buffer_redis, "buffer.max_memory_mb=1") as address:
        buffer = BufferClient(address)
        try:
            incarnation = await register(buffer)
            await buffer.submit_tasks([make_task("a"), make_task("b")])
            leases, _ = await buffer.lease_tasks("w", 2, 1)
            for lease in leases:
                name = lease.task.task_id
                await buffer.complete_task(name, lease.token, incompressible(name), "w")
            with pytest.raises(CapacityExceeded, match="near its memory limit"):
                await buffer.submit_tasks([make_task("s", Purpose.SERVE)])
            assert (await buffer.take_batch(incarnation, 1, 1)).state is TakeState.TAKEN
            batch = await buffer.take_batch(incarnation, 2, 1)
            assert batch.state is TakeState.CHECKPOINT_FIRST
        finally:
            await buffer.close()
