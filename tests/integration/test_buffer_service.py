"""The buffer service as its callers see it: its own process, gRPC, a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.buffer_server import start_buffer
from tests.ledger_support import make_group, make_task
from tests.redis_server import start_redis

from areal.clients.buffer import BufferClient, ReturnCause, TakeState
from areal.clients.stores import connect_redis
from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    LeaseLost,
    NotFound,
    StaleIncarnation,
    WaitTimeout,
    WorkflowError,
    WrongStep,
)
from areal.types import Purpose, TaskState, WorkflowSpec
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal.wire import task_to_pb


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="module")
def buffer_address(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    overrides = (
        "train_dataset.batch_size=2",
        "rollout.max_group_bytes=100000",
        "rollout.lease_ttl_s=1",
    )
    with start_buffer(tmp_path_factory.mktemp("buffer"), redis_url, *overrides) as address:
        yield address


@pytest.fixture
async def client(redis_url: str, buffer_address: str) -> AsyncIterator[BufferClient]:
    """A client of an empty ledger."""
    connection = connect_redis(redis_url)
    await connection.flushdb()
    await connection.aclose()
    opened = BufferClient(buffer_address)
    try:
        yield opened
    finally:
        await opened.close()


async def register(client: BufferClient, resume_step: int = 0) -> int:
    registration = await client.register_trainer(
        resume_step=resume_step,
        batch_size=2,
        max_head_offpolicyness=1,
        max_concurrent_rollouts=64,
    )
    return registration.incarnation


async def test_whole_life_when_a_trainer_runs_then_groups_arrive_unchanged(
    client: BufferClient,
) -> None:
    incarnation = await register(client)
    tasks = [make_task(f"0:{i}", position=(0, i)) for i in range(4)]
    assert await client.submit_tasks(tasks, incarnation=incarnation) == [True] * 4
    assert await client.submit_tasks(tasks, incarnation=incarnation) == [False] * 4
    leases, reason = await client.lease_tasks("w1", 10, 0)
    assert (len(leases), reason) == (4, "")
    assert leases[0].task == tasks[0]
    assert (leases[0].policy_version, leases[0].time_to_live_s) == (0, 1.0)
    groups = {lease.task.task_id: make_group(lease.task.task_id) for lease in leases}
    for lease in leases:
        group = groups[lease.task.task_id]
        assert await client.complete_task(lease.task.task_id, lease.token, group, "w1")
        assert not await client.complete_task(lease.task.task_id, lease.token, group, "w1")
    batch = await client.take_batch(incarnation, 1, 1)
    assert batch.state is TakeState.TAKEN
    assert [group.task_id for group in batch.groups] == ["0:0", "0:1"]
    assert (batch.completed, batch.groups[0].lengths) == (2, (6, 6))
    fetched = await client.fetch_groups(incarnation, 1, ["0:1", "0:0"])
    for group in fetched:
        sent = groups[group.group_id]
        for a, b in zip(sent.trajectories, group.trajectories, strict=True):
            np.testing.assert_array_equal(a.input_ids, b.input_ids)
            np.testing.assert_array_equal(a.token_versions, b.token_versions)
            np.testing.assert_array_equal(a.behavior_logprobs, b.behavior_logprobs)
    assert [group.group_id for group in fetched] == ["0:1", "0:0"]
    assert await client.commit_step(incarnation, 1, 0) == 1
    records = await client.get_tasks(["0:0", "ghost", "0:3"], include_groups=True)
    assert [(r.task.task_id, r.state, r.step) for r in records] == [
        ("0:0", TaskState.TRAINED, 1),
        ("0:3", TaskState.COMPLETED, 0),
    ]
    assert records[1].group is not None
    assert records[0].end_time is not None
    assert abs(records[0].submit_time - time.time()) < 60
    stats = await client.get_stats()
    assert (stats.submitted, stats.trajectories, stats.generated_tokens) == (4, 8, 32)
    assert stats.redis_memory_bytes > 0
    assert await client.commit_step(incarnation, 1, 1) == 1
    (record,) = await client.get_tasks(["0:0"], include_groups=True)
    assert (record.state, record.group, record.task.data) == (TaskState.TRAINED, None, {})


async def test_lease_when_a_task_is_submitted_during_the_wait_then_woken_at_once(
    client: BufferClient,
) -> None:
    waiting = asyncio.create_task(client.lease_tasks("w1", 1, 20))
    while (await client.get_stats()).submitted == 0:
        await asyncio.sleep(0.3)
        await client.submit_tasks([make_task("a")])
    start = time.monotonic()
    leases, _ = await waiting
    assert leases[0].task.task_id == "a"
    assert time.monotonic() - start < 0.5


async def test_take_and_wait_when_completed_during_the_wait_then_woken_at_once(
    client: BufferClient,
) -> None:
    incarnation = await register(client)
    await client.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await client.lease_tasks("w1", 2, 1)
    take = asyncio.create_task(client.take_batch(incarnation, 1, 20))
    wait = asyncio.create_task(client.wait_tasks(["a", "b"], 20))
    await asyncio.sleep(0.3)
    assert not take.done()
    assert not wait.done()
    start = time.monotonic()
    await client.complete_task("a", leases[0].token, make_group("a"), "w1")
    assert await wait == ["a"]
    await client.complete_task("b", leases[1].token, make_group("b"), "w1")
    batch = await take
    assert time.monotonic() - start < 0.5
    assert [group.task_id for group in batch.groups] == ["a", "b"]


async def test_waits_when_nothing_comes_then_end_in_time_with_the_reason(
    client: BufferClient,
) -> None:
    incarnation = await register(client)
    await client.submit_tasks([make_task("a")])
    start = time.monotonic()
    assert await client.wait_tasks(["a"], 0.3) == []
    batch = await client.take_batch(incarnation, 1, 0.3)
    assert (batch.state, batch.queued) == (TakeState.WAITING, 1)
    assert batch.waiting_for.startswith("0 of 2 groups are completed; 1 queued")
    await client.lease_tasks("w1", 1, 0.1)
    assert await client.lease_tasks("w1", 1, 0.3) == ([], "queue empty")
    assert 0.9 < time.monotonic() - start < 3


async def test_lease_when_worker_is_silent_then_expires_and_another_has_it(
    client: BufferClient,
) -> None:
    await client.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await client.lease_tasks("w1", 2, 1)
    tokens = {lease.task.task_id: lease.token for lease in leases}
    deadline = time.monotonic() + 10
    again: list[str] = []
    while not again and time.monotonic() < deadline:
        assert await client.renew_leases("w1", [("b", tokens["b"])]) == set()
        again = [lease.task.task_id for lease in (await client.lease_tasks("w2", 2, 0.2))[0]]
    assert again == ["a"]
    assert await client.renew_leases("w1", list(tokens.items())) == {"a"}
    with pytest.raises(LeaseLost, match="task a"):
        await client.complete_task("a", tokens["a"], make_group("a"), "w1")


async def test_return_reject_and_dead_letters_when_used_then_states_follow(
    client: BufferClient,
) -> None:
    await client.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await client.lease_tasks("w1", 1, 1)
    assert (
        await client.return_task("a", leases[0].token, ReturnCause.DRAIN, partial=b"half")
        is TaskState.QUEUED
    )
    for left in (2, 1, 0):
        leases, _ = await client.lease_tasks("w1", 1, 1)
        assert leases[0].task.task_id == "a"
        state = await client.return_task(
            "a",
            leases[0].token,
            ReturnCause.WORKFLOW_ERROR,
            detail="ZeroDivisionError: division by zero",
            traceback="Traceback ...",
        )
        assert state is (TaskState.QUEUED if left else TaskState.DEAD_LETTERED)
    (letter,) = await client.list_dead_letters()
    assert (letter.cause, letter.traceback) == ("workflow_error", "Traceback ...")
    assert letter.record.reason == "workflow_error after 3: ZeroDivisionError: division by zero"
    assert letter.record.task == make_task("a")
    assert await client.drop_dead_letters(["b"]) == 0
    assert await client.retry_dead_letters(["a", "b"]) == 1
    leases, _ = await client.lease_tasks("w1", 1, 1)
    await client.reject_task("a", leases[0].token, "too easy")
    (record,) = await client.get_tasks(["a"])
    assert (record.state, record.reason) == (TaskState.REJECTED, "too easy")


async def test_take_when_asked_with_groups_then_fetch_asks_only_for_the_others(
    client: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    incarnation = await register(client)
    await client.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await client.lease_tasks("w1", 2, 1)
    groups = {"a": make_group("a"), "b": make_group("b", length=9)}
    for lease in leases:
        name = lease.task.task_id
        await client.complete_task(name, lease.token, groups[name], "w1")
    batch = await client.take_batch(incarnation, 1, 1, with_groups=True)
    assert [group.task_id for group in batch.groups] == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.delattr(client._stub, "FetchGroups")
        came = await client.fetch_groups(incarnation, 1, ["b", "a"])
    again = await client.fetch_groups(incarnation, 1, ["b", "a"])  # from the ledger now
    for fetched in (came, again):
        assert [len(group.trajectories[0].input_ids) for group in fetched] == [9, 6]
        assert [group.group_id for group in fetched] == ["b", "a"]


async def test_serve_when_no_trainer_then_delivered_with_its_group(client: BufferClient) -> None:
    await client.submit_tasks([make_task("s", Purpose.SERVE)])
    leases, _ = await client.lease_tasks("w1", 1, 1)
    await client.complete_task("s", leases[0].token, make_group("s"), "w1")
    (record,) = await client.get_tasks(["s"], include_groups=True)
    assert record.state is TaskState.DELIVERED
    assert record.group is not None
    assert record.group.trajectories[0].reward == 1.0


async def test_errors_when_crossing_the_wire_then_keep_their_class(client: BufferClient) -> None:
    old = await register(client)
    new = await register(client)
    with pytest.raises(StaleIncarnation, match="the current one is 2"):
        await client.take_batch(old, 1, 0)
    with pytest.raises(StaleIncarnation):
        await client.submit_tasks([], incarnation=old, seal=True)
    with pytest.raises(StaleIncarnation):
        await client.fetch_groups(old, 1, ["a"])
    with pytest.raises(WrongStep):
        await client.take_batch(new, 2, 0)
    with pytest.raises(WrongStep):
        await client.commit_step(new, 1, 0)
    with pytest.raises(NotFound):
        await client.wait_tasks(["ghost"], 0)
    with pytest.raises(NotFound, match="not part of the batch of step 1"):
        await client.fetch_groups(new, 1, ["ghost"])
    await client.submit_tasks([make_task("a")])
    await client.cancel_tasks(["a"])
    with pytest.raises(WorkflowError, match="none of the 1 tasks gave a group; a is cancelled"):
        await client.take_batch(new, 1, 0, task_ids=["a"])


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
    client: BufferClient, complaint: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        await client.submit_tasks([make_task("good"), BAD_TASKS[complaint]])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (await client.get_stats()).submitted == 0


async def test_submit_when_message_is_wrong_in_ways_the_client_prevents_then_invalid(
    client: BufferClient,
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
            await client._stub.SubmitTasks(request, timeout=10)
        assert complaint in (caught.value.details() or "")
    many = pb.BufferServiceSubmitTasksRequest(tasks=[good] * 10_001)
    with pytest.raises(grpc.aio.AioRpcError, match="at most 10000 a call"):
        await client._stub.SubmitTasks(many, timeout=10)
    assert (await client.get_stats()).submitted == 0


async def test_complete_when_group_is_malformed_then_named_and_the_lease_stays(
    client: BufferClient,
) -> None:
    await client.submit_tasks([make_task("a")])
    leases, _ = await client.lease_tasks("w1", 1, 1)
    token = leases[0].token

    async def complaint(group: object) -> str:
        with pytest.raises(InvalidInput) as caught:
            await client.complete_task("a", token, group, "w1")  # type: ignore[arg-type]
        return str(caught.value)

    assert "group_id 'b': expected the task's id 'a'" in await complaint(make_group("b"))
    large = make_group("a", length=8000)
    assert "at most 100000 (rollout.max_group_bytes)" in await complaint(large)
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
    assert await client.complete_task("a", token, make_group("a"), "w1")


async def test_numbers_when_out_of_range_then_invalid(client: BufferClient) -> None:
    calls = (
        client.take_batch(0, 1, 0),
        client.take_batch(1, 0, 0),
        client.take_batch(1, 2**60, 0),
        client.commit_step(1, 1, 2),
        client.lease_tasks("", 1, 0),
        client.lease_tasks("w", 0, 0),
        client.lease_tasks("w", 1001, 0),
        client.wait_tasks([], 0),
        client.take_batch(1, 1, 0, task_ids=["a", "a"]),
        client.complete_task("a", 0, make_group("a"), "w"),
        register(client, -1),
        client.list_dead_letters(-1),
        client.renew_leases("w", [("a", 1)] * 10_001),
    )
    for call in calls:
        with pytest.raises(InvalidInput):
            await call


async def test_recipe_when_stored_then_found_by_digest(client: BufferClient) -> None:
    digest = await client.put_recipe("recipe.py", b"print(1)\n")
    assert await client.put_recipe("recipe.py", b"print(1)\n") == digest
    assert await client.get_recipe(digest) == ("recipe.py", b"print(1)\n")
    with pytest.raises(NotFound):
        await client.get_recipe("0" * 64)
    with pytest.raises(InvalidInput, match=r"recipe 'big.py' has 1048577 bytes"):
        await client.put_recipe("big.py", b"#" * (1024 * 1024 + 1))


async def test_call_when_nobody_answers_then_says_what_and_on_whom() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silence, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = BufferClient(address)
    try:
        with pytest.raises(WaitTimeout, match=f"GetStats on {address}"):
            await client.get_stats(timeout=0.3)
    finally:
        await client.close()
        server.close()


async def test_memory_when_the_limit_is_tiny_then_refused_with_a_clear_line(
    redis_url: str, tmp_path: Path
) -> None:
    with start_buffer(tmp_path, redis_url, "buffer.max_memory_mb=0") as address:
        client = BufferClient(address)
        try:
            with pytest.raises(CapacityExceeded, match="near its memory limit"):
                await client.submit_tasks([make_task("s", Purpose.SERVE)])
            incarnation = await register(client)
            await client.submit_tasks([make_task("a"), make_task("b")])
            leases, _ = await client.lease_tasks("w", 2, 1)
            for lease in leases:
                name = lease.task.task_id
                await client.complete_task(name, lease.token, make_group(name), "w")
            assert (await client.take_batch(incarnation, 1, 1)).state is TakeState.TAKEN
            batch = await client.take_batch(incarnation, 2, 1)
            assert batch.state is TakeState.CHECKPOINT_FIRST
        finally:
            await client.close()


async def test_replicas_when_two_share_a_run_then_they_wake_each_other(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        start_buffer(tmp_path / "a", redis_url, namespace="pair") as one,
        start_buffer(tmp_path / "b", redis_url, namespace="pair") as two,
    ):
        first, second = BufferClient(one), BufferClient(two)
        try:
            waiting = asyncio.create_task(first.lease_tasks("w", 1, 20))
            await asyncio.sleep(0.5)
            start = time.monotonic()
            await second.submit_tasks([make_task("a")])
            leases, _ = await waiting
            assert leases[0].task.task_id == "a"
            assert time.monotonic() - start < 0.5
            await second.complete_task("a", leases[0].token, make_group("a"), "w")
            assert (await first.get_tasks(["a"]))[0].state is TaskState.COMPLETED
        finally:
            await first.close()
            await second.close()
