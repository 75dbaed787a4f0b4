"""The buffer service as its callers see it: its own process, gRPC, a real Redis."""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import register, start_buffer
from tests.ledger_support import make_group, make_task

from areal.errors import InvalidInput, LeaseLost, NotFound, WaitTimeout
from areal.protocol.leases import Return, ReturnCause, TakeState
from areal.types import Purpose, TaskState
from areal_launch.commands.dead_letters import list_dead_letters


async def test_whole_life_when_a_trainer_runs_then_groups_arrive_unchanged(
    buffer: BufferClient,
) -> None:
    incarnation = await register(buffer)
    tasks = [make_task(f"0:{i}", position=(0, i)) for i in range(4)]
    assert await buffer.submit_tasks(tasks, incarnation=incarnation) == [True] * 4
    assert await buffer.submit_tasks(tasks, incarnation=incarnation) == [False] * 4
    leases, reason = await buffer.lease_tasks("w1", 10, 0)
    assert (len(leases), reason) == (4, "")
    assert leases[0].task == tasks[0]
    assert (leases[0].policy_version, leases[0].time_to_live_s) == (0, 1.0)
    groups = {lease.task.task_id: make_group(lease.task.task_id) for lease in leases}
    for lease in leases:
        group = groups[lease.task.task_id]
        assert await buffer.complete_task(lease.task.task_id, lease.token, group, "w1")
        assert not await buffer.complete_task(lease.task.task_id, lease.token, group, "w1")
    batch = await buffer.take_batch(incarnation, 1, 1)
    assert batch.state is TakeState.TAKEN
    assert [group.task_id for group in batch.groups] == ["0:0", "0:1"]
    assert (batch.completed, batch.groups[0].lengths) == (2, (6, 6))
    fetched = await buffer.fetch_groups(incarnation, 1, ["0:1", "0:0"])
    for group in fetched:
        sent = groups[group.task_id]
        for a, b in zip(sent.trajectories, group.trajectories, strict=True):
            np.testing.assert_array_equal(a.input_ids, b.input_ids)
            np.testing.assert_array_equal(a.token_versions, b.token_versions)
            np.testing.assert_array_equal(a.behavior_logprobs, b.behavior_logprobs)
    assert [group.task_id for group in fetched] == ["0:1", "0:0"]
    assert await buffer.commit_step(incarnation, 1, 0) == 1
    records = await buffer.get_tasks(["0:0", "ghost", "0:3"], include_groups=True)
    assert [(r.task.task_id, r.state, r.step) for r in records] == [
        ("0:0", TaskState.TRAINED, 1),
        ("0:3", TaskState.COMPLETED, 0),
    ]
    assert records[1].group is not None
    assert records[0].end_time is not None
    assert abs(records[0].submit_time - time.time()) < 60
    stats = await buffer.get_stats()
    assert (stats.submitted, stats.trajectories, stats.generated_tokens) == (4, 8, 32)
    assert stats.redis_memory_bytes > 0
    assert await buffer.commit_step(incarnation, 1, 1) == 1
    (record,) = await buffer.get_tasks(["0:0"], include_groups=True)
    assert (record.state, record.group, record.task.data) == (TaskState.TRAINED, None, {})


async def woken(waiter: BufferClient, submitter: BufferClient) -> float:
    """Seconds from a task to the lease that waits for it: the least of a few.

    A busy machine may delay some. Without a wake-up, each would be found when the service looks
    by itself, 0.8 s later.
    """
    took = [math.inf]
    for number in range(10):
        if min(took) < 0.5:
            break
        waiting = asyncio.create_task(waiter.lease_tasks("w", 1, 20))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await submitter.submit_tasks([make_task(f"wakes-{number}")])
        leases, _ = await waiting
        took.append(time.monotonic() - start)
        assert leases[0].task.task_id == f"wakes-{number}"
        await submitter.cancel_tasks([f"wakes-{number}"])  # else it comes back when its lease ends
    return min(took)


async def test_lease_when_a_task_is_submitted_during_the_wait_then_woken_at_once(
    buffer: BufferClient,
) -> None:
    assert await woken(buffer, buffer) < 0.5


async def test_take_and_wait_when_completed_during_the_wait_then_woken_at_once(
    buffer: BufferClient,
) -> None:
    incarnation = await register(buffer)
    took = [math.inf]
    for step in range(1, 11):  # a busy machine may delay some
        if min(took) < 0.5:
            break
        a, b = f"a{step}", f"b{step}"
        await buffer.submit_tasks([make_task(a), make_task(b)])
        leases, _ = await buffer.lease_tasks("w1", 2, 20)
        tokens = {lease.task.task_id: lease.token for lease in leases}
        take = asyncio.create_task(buffer.take_batch(incarnation, step, 60))
        wait = asyncio.create_task(buffer.wait_tasks([a, b], 60))
        await asyncio.sleep(0.3)
        assert not take.done()
        assert not wait.done()
        start = time.monotonic()
        await buffer.complete_task(a, tokens[a], make_group(a, version=step - 1), "w1")
        assert await wait == [a]
        await buffer.complete_task(b, tokens[b], make_group(b, version=step - 1), "w1")
        batch = await take
        took.append(time.monotonic() - start)
        assert [group.task_id for group in batch.groups] == [a, b]
        await buffer.commit_step(incarnation, step, 0)
    assert min(took) < 0.5


async def test_waits_when_nothing_comes_then_end_in_time_with_the_reason(
    buffer: BufferClient,
) -> None:
    incarnation = await register(buffer)
    await buffer.submit_tasks([make_task("a")])
    start = time.monotonic()
    assert await buffer.wait_tasks(["a"], 0.3) == []
    batch = await buffer.take_batch(incarnation, 1, 0.3)
    assert (batch.state, batch.queued) == (TakeState.WAITING, 1)
    assert batch.waiting_for.startswith("0 of 2 groups are completed; 1 queued")
    await buffer.lease_tasks("w1", 1, 0.1)
    assert await buffer.lease_tasks("w1", 1, 0.3) == ([], "queue empty")
    assert 0.9 < time.monotonic() - start < 20


async def test_lease_when_worker_is_silent_then_expires_and_another_has_it(
    buffer: BufferClient,
) -> None:
    await buffer.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await buffer.lease_tasks("w1", 2, 1)
    tokens = {lease.task.task_id: lease.token for lease in leases}
    deadline = time.monotonic() + 60
    again: list[str] = []
    while not again and time.monotonic() < deadline:
        assert await buffer.renew_leases("w1", [("b", tokens["b"])]) == set()
        again = [lease.task.task_id for lease in (await buffer.lease_tasks("w2", 2, 0.2))[0]]
    assert again == ["a"]
    assert await buffer.renew_leases("w1", list(tokens.items())) == {"a"}
    with pytest.raises(LeaseLost, match="task a"):
        await buffer.complete_task("a", tokens["a"], make_group("a"), "w1")


async def test_return_reject_and_dead_letters_when_used_then_states_follow(
    buffer: BufferClient, buffer_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await buffer.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await buffer.lease_tasks("w1", 1, 1)
    assert (
        await buffer.return_task(
            "a", leases[0].token, Return(ReturnCause.DRAIN, partial=lambda: b"half")
        )
        is TaskState.QUEUED
    )
    for left in (2, 1, 0):
        leases, _ = await buffer.lease_tasks("w1", 1, 1)
        assert leases[0].task.task_id == "a"
        state = await buffer.return_task(
            "a",
            leases[0].token,
            Return(
                ReturnCause.WORKFLOW_ERROR,
                "ZeroDivisionError: division by zero",
                "Traceback ...",
            ),
        )
        assert state is (TaskState.QUEUED if left else TaskState.DEAD_LETTERED)
    (letter,) = await buffer.list_dead_letters()
    # As for a release elsewhere: no run folder, only an address.
    shown = partial(list_dead_letters, None, 5, as_json=True, endpoint=buffer_address)
    assert await asyncio.to_thread(shown) == 0
    assert json.loads(capsys.readouterr().out)["task_id"] == letter.record.task.task_id
    assert (letter.cause, letter.traceback) == ("workflow_error", "Traceback ...")
    cause = "workflow_error after 3 attempts: ZeroDivisionError: division by zero"
    assert letter.record.reason == cause
    assert letter.record.task == make_task("a")
    assert await buffer.drop_dead_letters(["b"]) == 0
    assert await buffer.retry_dead_letters(["a", "b"]) == 1
    leases, _ = await buffer.lease_tasks("w1", 1, 1)
    await buffer.reject_task("a", leases[0].token, "too easy")
    (record,) = await buffer.get_tasks(["a"])
    assert (record.state, record.reason) == (TaskState.REJECTED, "too easy")


async def test_take_when_asked_with_groups_then_fetch_asks_only_for_the_others(
    buffer: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    incarnation = await register(buffer)
    await buffer.submit_tasks([make_task("a"), make_task("b")])
    leases, _ = await buffer.lease_tasks("w1", 2, 1)
    groups = {"a": make_group("a"), "b": make_group("b", length=9)}
    for lease in leases:
        name = lease.task.task_id
        await buffer.complete_task(name, lease.token, groups[name], "w1")
    batch = await buffer.take_batch(incarnation, 1, 1, with_groups=True)
    assert [group.task_id for group in batch.groups] == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.delattr(buffer._stub, "FetchGroups")
        came = await buffer.fetch_groups(incarnation, 1, ["b", "a"])
    again = await buffer.fetch_groups(incarnation, 1, ["b", "a"])  # from the ledger now
    for fetched in (came, again):
        assert [len(group.trajectories[0].input_ids) for group in fetched] == [9, 6]
        assert [group.task_id for group in fetched] == ["b", "a"]


async def test_serve_when_no_trainer_then_delivered_with_its_group(buffer: BufferClient) -> None:
    await buffer.submit_tasks([make_task("s", Purpose.SERVE)])
    leases, _ = await buffer.lease_tasks("w1", 1, 1)
    await buffer.complete_task("s", leases[0].token, make_group("s"), "w1")
    (record,) = await buffer.get_tasks(["s"], include_groups=True)
    assert record.state is TaskState.DELIVERED
    assert record.group is not None
    assert record.group.trajectories[0].reward == 1.0


async def test_recipe_when_stored_then_found_by_digest(buffer: BufferClient) -> None:
    digest = await buffer.put_recipe("recipe.py", b"print(1)\n")
    assert await buffer.put_recipe("recipe.py", b"print(1)\n") == digest
    assert await buffer.get_recipe(digest) == ("recipe.py", b"print(1)\n")
    with pytest.raises(NotFound):
        await buffer.get_recipe("0" * 64)
    with pytest.raises(InvalidInput, match=r"recipe 'big.py' has 1048577 bytes"):
        await buffer.put_recipe("big.py", b"#" * (1024 * 1024 + 1))


async def test_call_when_nobody_answers_then_says_what_and_on_whom() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def silence(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(silence, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    buffer = BufferClient(address, timeout_s=0.3)
    try:
        with pytest.raises(WaitTimeout, match=f"GetStats on {address}"):
            await buffer.get_stats()
    finally:
        await buffer.close()
        server.close()
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_replicas_when_two_share_a_run_then_they_wake_each_other(
    buffer_redis: str, tmp_path: Path
) -> None:
    with (
        start_buffer(tmp_path / "a", buffer_redis, namespace="pair") as one,
        start_buffer(tmp_path / "b", buffer_redis, namespace="pair") as two,
    ):
        first, second = BufferClient(one), BufferClient(two)
        try:
            assert await woken(first, second) < 0.5
            await second.submit_tasks([make_task("a")])
            leases, _ = await first.lease_tasks("w", 1, 20)
            await second.complete_task("a", leases[0].token, make_group("a"), "w")
            assert (await first.get_tasks(["a"]))[0].state is TaskState.COMPLETED
        finally:
            await first.close()
            await second.close()
