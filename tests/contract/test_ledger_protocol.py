"""Every rule of the ledger's protocol, against the real scripts on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.containers import store_in_container
from tests.ledger_support import Book, complete, finished, make_group, open_book
from tests.redis_server import start_redis

from areal.compression import expand
from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    LeaseLost,
    NotFound,
    StaleIncarnation,
    WorkflowError,
    WrongStep,
)
from areal.types import Purpose
from areal.wire import group_to_pb, pack_group


@pytest.fixture(scope="module", params=["process", "container"])
def redis_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("ledger")
    in_container = request.param == "container"
    with store_in_container("redis") if in_container else start_redis(folder) as url:
        yield url


@pytest.fixture
async def book(redis_url: str) -> AsyncIterator[Book]:
    async with open_book(redis_url) as opened:
        yield opened


# -- L1, L6: submitting -----------------------------------------------------------------------


async def test_submit_when_id_is_known_then_nothing_changes(book: Book) -> None:
    assert await book.submit("a", "b", "a") == [True, True, False]
    assert await book.submit("b") == [False]
    assert await book.counts() == {"queued": 2}


async def test_submit_when_position_was_seen_then_not_accepted(book: Book) -> None:
    assert await book.submit("a", position=(0, 7)) == [True]
    assert await book.submit("b", position=(0, 7)) == [False]
    assert await book.submit("c", position=(1, 7)) == [True]
    assert await book.submit("d", position=(0, 6)) == [True]


async def test_lease_when_several_queued_then_in_order_of_submission(book: Book) -> None:
    await book.submit("c", "a", "b")
    assert list(await book.lease(2)) == ["c", "a"]
    assert list(await book.lease(2)) == ["b"]


async def test_lease_when_nothing_is_queued_then_says_so(book: Book) -> None:
    leases, reason = await book.store.lease("w", 1)
    assert leases == []
    assert reason == "queue empty"


# -- L2: leases -------------------------------------------------------------------------------


async def test_complete_when_lease_expired_and_not_released_then_counts(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    await book.expire_lease("a")
    assert await book.state("a") == "queued"
    assert await book.complete("a", token)
    assert await book.counts() == {"completed": 1}


async def test_complete_when_task_was_released_then_refused(book: Book) -> None:
    await book.submit("a")
    first = (await book.lease())["a"]
    await book.expire_lease("a")
    second = (await book.lease())["a"]
    assert second > first
    with pytest.raises(LeaseLost, match=r"task a: lease .* no longer holds; the task is running"):
        await book.complete("a", first)
    assert await book.complete("a", second)
    with pytest.raises(LeaseLost):
        await book.complete("a", first)


async def test_lease_when_a_worker_was_started_again_then_its_leases_are_given_back_at_once(
    book: Book,
) -> None:
    await book.submit("a", "b", "c")
    await book.submit("s", purpose=Purpose.SERVE)
    await book.lease(1, worker="other", boot=5)  # one of them
    mine = await book.lease(2, worker="w0", boot=7)
    assert await book.counts() == {"queued": 1, "running": 3}
    assert await book.lease(1, worker="w0", boot=7) != {}  # the same life: nothing changes
    assert await book.counts() == {"running": 4}
    again = await book.lease(9, worker="w0", boot=8)
    assert set(again) >= set(mine)
    assert all(again[task_id] > mine[task_id] for task_id in mine)
    assert await book.counts() == {"running": 4}  # the other worker's lease was left alone
    task_id = next(iter(mine))
    async for record in book.store.read([task_id], groups=False):
        assert record.reason == "worker w0 died and was started again"
        assert record.infrastructure_attempts == 1
    with pytest.raises(LeaseLost, match="no longer holds"):
        await book.complete(task_id, mine[task_id])
    assert await book.complete(task_id, again[task_id])


async def test_lease_when_a_newer_life_of_the_worker_has_begun_then_the_older_is_refused(
    book: Book,
) -> None:
    await book.submit("a", "b")
    first = await book.lease(1, worker="w0", boot=7)
    await book.lease(0, worker="w0", boot=8)
    # Its late answer still counts, for nobody has the task yet; but it gets no more.
    assert await book.complete("a", first["a"])
    with pytest.raises(LeaseLost, match="worker w0: a newer process of this name has begun"):
        await book.lease(1, worker="w0", boot=7)
    assert await book.counts() == {"completed": 1, "queued": 1}


async def test_lease_when_named_workers_come_and_go_then_what_is_known_of_them_goes_too(
    book: Book,
) -> None:
    async def named() -> dict[str, int]:
        keys = [key async for key in book.redis.scan_iter(f"{book.prefix}*")]
        return {
            key.decode().rpartition(":")[2]: await book.redis.ttl(key)
            for key in keys
            if b"pod-" in key or b"boots" in key
        }

    for number in range(3):
        await book.lease(1, worker=f"pod-{number}", boot=7)
    assert set(await named()) == {"pod-0", "pod-1", "pod-2"}
    assert all(0 < seconds <= 86400 for seconds in (await named()).values())
    # One that goes on working stays known, also through the day's end.
    await book.redis.expire(f"{book.prefix}life:pod-1", 60)
    await book.lease(1, worker="pod-1", boot=7)
    assert (await named())["pod-1"] > 80000
    with pytest.raises(LeaseLost, match="a newer process of this name"):
        await book.lease(1, worker="pod-1", boot=6)


async def test_lease_when_journals_pass_a_message_then_the_rest_comes_with_the_next_call(
    book: Book,
) -> None:
    ids = ["a", "b", "c", "d"]
    await book.submit(*ids)
    journal = bytes(20 * 1024 * 1024)
    for task_id, token in (await book.lease(4)).items():
        nothing = {"detail": "", "traceback": "", "failed_server": ""}
        await book.store.return_task(task_id, token, "", partial=journal, **nothing)
    assert sorted(await book.lease(4)) == ["a", "b"]
    assert sorted(await book.lease(4)) == ["c", "d"]


async def test_lease_when_workers_have_no_lasting_name_then_none_gives_back(book: Book) -> None:
    await book.submit("a", "b")
    await book.lease(1)
    await book.lease(1)
    assert await book.counts() == {"running": 2}


async def test_complete_when_task_has_ended_then_refused(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    assert await book.store.cancel(["a"], None, reason="enough", incarnation=0) == 1
    with pytest.raises(LeaseLost, match="the task is cancelled"):
        await book.complete("a", token)
    assert await book.counts() == {"cancelled": 1}


async def test_complete_when_repeated_then_recorded_once(book: Book) -> None:
    await book.register()
    await book.submit("a", "b")
    leases = await book.lease(2)
    assert await book.complete("a", leases["a"])
    assert not await book.complete("a", leases["a"])
    await book.complete("b", leases["b"])
    assert await book.take(1) == ("taken", ["a", "b"])
    assert not await book.complete("a", leases["a"])
    await book.store.commit(book.incarnation, 1, 0)
    assert not await book.complete("a", leases["a"])
    await book.store.commit(book.incarnation, 1, 1)
    with pytest.raises(LeaseLost, match="the task is trained"):
        await book.complete("a", leases["a"])
    assert await book.counts() == {"trained": 2}


async def test_complete_when_token_is_older_than_lease_then_refused(book: Book) -> None:
    await book.register()
    await book.run("a", "b")
    assert await book.take(1) == ("taken", ["a", "b"])
    await book.take(2)
    await book.submit("c")
    token = (await book.lease())["c"]
    with pytest.raises(InvalidInput, match="sampled at version 0, the lease was given at 1"):
        await book.complete("c", token, version=0)
    assert await book.complete("c", token, version=1)


async def test_complete_when_some_of_several_are_refused_then_the_others_are_recorded(
    book: Book,
) -> None:
    await book.submit("a", "b", "c")
    leases = await book.lease(3)
    await book.complete("a", leases["a"])
    await book.store.reject("b", leases["b"], "")
    groups = [
        replace(finished(task_id), token=token)
        for task_id, token in [*leases.items(), ("nobody", 1)]
    ]
    again, refused, recorded, unknown = await book.store.complete(groups, full=[False] * 4)
    assert (again, recorded) == (False, True)
    assert isinstance(refused, LeaseLost)
    assert str(refused).startswith("task b: lease ")
    assert "\n" not in str(refused)
    assert isinstance(unknown, NotFound)
    assert str(unknown) == "task nobody: unknown"
    assert await book.counts() == {"completed": 2, "rejected": 1}


async def test_complete_when_unknown_task_then_not_found(book: Book) -> None:
    with pytest.raises(NotFound, match="task nobody"):
        await book.complete("nobody", 1)


async def test_renew_when_lease_is_held_then_extended_and_others_named(book: Book) -> None:
    await book.submit("a", "b", "c")
    leases = await book.lease(3)
    await book.store.cancel(["b"], None, reason="", incarnation=0)
    await book.expire_lease("c")
    await book.lease()  # c again
    assert await book.store.renew("w", list(leases.items())) == ["b", "c"]


async def test_renew_when_expired_and_not_released_then_runs_again(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    await book.expire_lease("a")
    assert await book.store.renew("w", [("a", token)]) == []
    assert await book.state("a") == "running"
    assert await book.complete("a", token)


async def test_expiry_when_repeated_then_suspected_poison_and_retry_brings_it_back(
    book: Book,
) -> None:
    await book.submit("a")
    for _ in range(3):
        await book.lease()
        await book.expire_lease("a")
    assert await book.counts() == {"dead_lettered": 1}
    letters = [letter async for letter in book.store.dead_letters(10)]
    assert letters[0].cause == "suspected_poison"
    assert letters[0].infrastructure_attempts == 3
    assert "worker w was silent" in letters[0].reason
    assert await book.store.retry_dead_letters([]) == 1
    assert await book.counts() == {"queued": 1}
    token = (await book.lease())["a"]
    assert await book.complete("a", token)


async def give_back(book: Book, task_id: str, token: int, cause: str, **more: object) -> str:
    options: dict[str, object] = {
        "detail": "why",
        "traceback": "where",
        "partial": b"",
        "failed_server": "",
        **more,
    }
    return await book.store.return_task(task_id, token, cause, **options)  # type: ignore[arg-type]


async def test_return_when_causes_differ_then_each_has_its_own_limit(book: Book) -> None:
    await book.submit("a")
    for cause in ("", "", "", "workflow_error", "suspected_poison", "suspected_poison"):
        token = (await book.lease())["a"]
        assert await give_back(book, "a", token, cause) == "queued"
    token = (await book.lease())["a"]
    assert await give_back(book, "a", token, "workflow_error") == "dead_lettered"
    assert await give_back(book, "a", token, "workflow_error") == "dead_lettered"  # idempotent
    letter = await anext(book.store.dead_letters(10))
    assert (letter.cause, letter.traceback) == ("workflow_error", "where")
    assert (letter.attempts, letter.infrastructure_attempts) == (2, 2)


async def test_drop_when_dead_then_off_the_list_for_good_and_still_counted(book: Book) -> None:
    await book.submit("a", "b")
    await book.submit("s", purpose=Purpose.SERVE)
    for _ in range(2):
        for task_id, token in (await book.lease(3)).items():
            await give_back(book, task_id, token, "workflow_error")
    await book.submit("alive")
    assert await book.store.drop_dead_letters(["a", "s", "alive", "ghost"]) == 2
    assert await book.store.drop_dead_letters(["a"]) == 0
    assert [letter.task_id async for letter in book.store.dead_letters(10)] == ["b"]
    assert await book.counts() == {"dead_lettered": 3, "queued": 1}
    assert await book.store.retry_dead_letters(["a"]) == 0
    assert await book.store.retry_dead_letters([]) == 1
    assert await book.counts() == {"dead_lettered": 2, "queued": 2}
    assert await book.submit("a") == [False]
    records = [record async for record in book.store.read(["a"], groups=False)]
    assert (records[0].state.value, records[0].cause, records[0].traceback) == (
        "dead_lettered",
        "workflow_error",
        "",
    )
    assert await book.store.drop_dead_letters([]) == 0


async def test_return_when_repeated_then_counted_once(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    for _ in range(5):
        assert await give_back(book, "a", token, "workflow_error") == "queued"
    assert await book.counts() == {"queued": 1}


async def test_return_when_partial_then_next_lease_has_it_and_front_of_queue(book: Book) -> None:
    await book.submit("a", "b")
    token = (await book.lease())["a"]
    await give_back(book, "a", token, "", partial=b"journal", failed_server="s1:1")
    lease = (await book.store.lease("w2", 1))[0][0]
    assert (lease.task_id, lease.partial, lease.failed_servers) == ("a", b"journal", ("s1:1",))


async def test_partial_when_continued_then_tokens_of_the_first_lease_count(book: Book) -> None:
    await book.register(eta=1)
    await book.submit("x")
    token = (await book.lease())["x"]
    await give_back(book, "x", token, "", partial=b"journal")
    await book.submit("a", "b")
    leases = await book.lease(3)  # x again at version 0, a and b
    for each in ("a", "b"):
        await book.complete(each, leases[each])
    await give_back(book, "x", leases["x"], "", partial=b"journal")
    assert await book.take(1) == ("taken", ["a", "b"])
    await book.take(2)  # version 1
    lease = (await book.store.lease("w", 1))[0][0]
    assert (lease.policy_version, lease.partial) == (1, b"journal")
    await book.run("c", version=1)
    assert await book.complete("x", lease.token, version=0)
    assert await book.take(2) == ("taken", ["x", "c"])


async def test_partial_when_too_stale_for_any_batch_then_dropped(book: Book) -> None:
    await book.register(size=1, eta=1)
    await book.submit("x")
    token = (await book.lease())["x"]
    await give_back(book, "x", token, "", partial=b"journal")
    await book.submit("a")
    leases = await book.lease(2)
    await book.complete("a", leases["a"])
    await give_back(book, "x", leases["x"], "", partial=b"journal")
    assert await book.take(1) == ("taken", ["a"])
    await book.redis.hset(f"{book.prefix}meta", "policy_version", 2)  # type: ignore[attr-defined]
    lease = (await book.store.lease("w", 1))[0][0]
    assert (lease.task_id, lease.policy_version, lease.partial) == ("x", 2, b"")
    with pytest.raises(InvalidInput, match="the lease was given at 2"):
        await book.complete("x", lease.token, version=1)


# -- L4: admission ----------------------------------------------------------------------------


async def test_admission_when_bound_is_reached_then_no_lease_until_version_moves(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit(*(f"t{i}" for i in range(20)))
    first = await book.lease(10)
    assert len(first) == 4  # (1 + 1) * 2
    leases, reason = await book.store.lease("w", 1)
    assert leases == []
    assert reason == (
        "admission: 4 running + 0 completed + 0 batched ahead of version 0, at most (1 + 1) * 2"
    )
    for task_id, token in first.items():
        await book.complete(task_id, token)
    assert await book.lease() == {}
    assert (await book.take(1))[0] == "taken"
    assert await book.lease() == {}  # the batch of step 1 still counts at version 0
    assert (await book.take(2))[0] == "taken"  # version 1 now: step 1 is done, step 2 counts
    assert len(await book.lease(10)) == 2


async def test_admission_when_the_batch_is_let_go_before_its_version_then_it_still_counts(
    book: Book,
) -> None:
    await book.register(size=1, eta=0)
    await book.run("a")
    assert await book.take(1) == ("taken", ["a"])
    await book.store.commit(1, 1, 1)
    await book.submit("b")
    assert await book.lease() == {}  # servers still have version 0
    await book.take(2)
    assert list(await book.lease()) == ["b"]


async def test_admission_when_a_group_is_rejected_or_cancelled_at_eta_0_then_no_starvation(
    book: Book,
) -> None:
    await book.register(size=2, eta=0)
    await book.submit("a", "b", "c", "d")
    leases = await book.lease(10)
    assert list(leases) == ["a", "b"]
    await book.store.reject("a", leases["a"], "too easy")
    await book.store.reject("a", leases["a"], "too easy")  # idempotent
    await book.store.cancel(["b"], None, reason="", incarnation=0)
    leases = await book.lease(10)
    assert list(leases) == ["c", "d"]
    for task_id, token in leases.items():
        await book.complete(task_id, token)
    assert await book.take(1) == ("taken", ["c", "d"])


async def test_admission_when_concurrency_is_below_batch_then_batch_still_fills(
    book: Book,
) -> None:
    await book.register(size=3, eta=0, concurrent=1)
    await book.submit("a", "b", "c")
    for each in ("a", "b", "c"):
        leases = await book.lease(10)
        assert list(leases) == [each]
        assert (await book.store.lease("w", 1))[1] == (
            "admission: max_concurrent_rollouts 1 are running"
        )
        await book.complete(each, leases[each])
    assert await book.take(1) == ("taken", ["a", "b", "c"])


async def test_serve_tasks_when_train_is_blocked_then_still_run_and_are_delivered(
    book: Book,
) -> None:
    await book.register(size=1, eta=0)
    await book.submit("t0", "t1")
    await book.submit("s0", "s1", purpose=Purpose.SERVE)
    leases = await book.lease(10)
    assert set(leases) == {"s0", "t0", "s1"}
    assert await book.complete("s0", leases["s0"])
    assert await book.state("s0") == "delivered"
    records = [r async for r in book.store.read(["s0"], groups=True)]
    assert records[0].payload == finished("s0").payload
    assert await book.store.ended(["s0", "t0"]) == ["s0"]


async def test_serve_and_train_when_both_queue_then_they_alternate(book: Book) -> None:
    await book.register(size=10, eta=0)
    await book.submit(*(f"t{i}" for i in range(4)))
    await book.submit(*(f"s{i}" for i in range(4)), purpose=Purpose.SERVE)
    order = [next(iter(await book.lease())) for _ in range(8)]
    assert order == ["s0", "t0", "s1", "t1", "s2", "t2", "s3", "t3"]


# -- L5: take ---------------------------------------------------------------------------------


async def test_take_when_too_few_then_waits_and_says_for_what(book: Book) -> None:
    await book.register()
    await book.run("a")
    take = await book.store.take(1, 1, (), near_limit=False)
    assert take.state == "waiting"
    assert take.waiting_for.startswith(
        "1 of 2 groups are completed; 0 queued; admission: 0 running"
    )
    assert (take.queued, take.running, take.completed) == (0, 0, 1)


async def test_take_when_repeated_then_the_same_groups(book: Book) -> None:
    await book.register()
    await book.run("a", "b", "c")
    first = await book.store.take(1, 1, (), near_limit=False)
    again = await book.store.take(1, 1, (), near_limit=False)
    assert first.groups == again.groups
    assert not again.replay
    assert [g.task_id for g in first.groups] == ["a", "b"]
    assert first.groups[0].lengths == (6, 6)


async def test_take_when_step_is_skipped_then_wrong_step(book: Book) -> None:
    await book.register()
    with pytest.raises(WrongStep, match="TakeBatch step 2: the next step is 1"):
        await book.take(2)


async def test_take_when_straggler_is_running_then_waits_for_it_until_the_deadline(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    await book.submit("slow", "a", "b")
    leases = await book.lease(2)
    assert set(leases) == {"slow", "a"}
    await book.complete("a", leases["a"])
    assert await book.take(1) == ("taken", ["a"])
    await book.take(2)
    token = (await book.lease())["b"]
    await book.complete("b", token, version=1)
    take = await book.store.take(1, 2, (), near_limit=False)
    assert take.state == "waiting"
    assert take.waiting_for.startswith("1 running groups leased at version 0 or before")
    await book.pass_straggler_deadline()
    assert await book.take(2) == ("taken", ["b"])
    assert await book.state("slow") == "queued"  # regenerated
    assert await book.store.renew("w", [("slow", leases["slow"])]) == ["slow"]
    assert (await book.store.stats()).regenerated == 1


async def test_take_when_straggler_arrives_in_time_then_it_goes_first(book: Book) -> None:
    await book.register(size=1, eta=1)
    await book.submit("a", "slow", "b")
    leases = await book.lease(2)
    await book.complete("a", leases["a"])
    assert await book.take(1) == ("taken", ["a"])
    await book.take(2)
    token = (await book.lease())["b"]
    await book.complete("b", token, version=1)
    await book.complete("slow", leases["slow"], version=0)
    assert await book.take(2) == ("taken", ["slow"])
    assert await book.take(3) == ("taken", ["b"])
    stats = await book.store.stats()
    assert (stats.staleness_max, stats.staleness_mean) == (1, 2 / 3)


async def test_take_when_late_group_is_too_stale_then_regenerated_three_times_then_dead(
    book: Book,
) -> None:
    await book.register(size=1, eta=0)
    step = 1
    for round_ in range(4):
        await book.submit("slow", f"quick{round_}")
        lease = await book.lease()
        assert list(lease) == ["slow"]
        # Silent: its lease goes, the next task runs, fills the batch, and only then it answers.
        token = lease["slow"]
        await book.redis.zadd(f"{book.prefix}running:train", {"slow": 1})  # type: ignore[attr-defined]
        await book.redis.hdel(f"{book.prefix}task:slow", "infra")  # type: ignore[attr-defined]
        await book.store.sweep()
        await book.redis.zrem(f"{book.prefix}queue:train", "slow")  # type: ignore[attr-defined]
        quick = await book.lease()
        assert list(quick) == [f"quick{round_}"]
        await book.complete(f"quick{round_}", quick[f"quick{round_}"], version=step - 1)
        assert await book.take(step) == ("taken", [f"quick{round_}"])
        await book.complete("slow", token, version=step - 1)
        step += 1
        assert (await book.take(step))[0] == "waiting"
        assert await book.state("slow") == ("dead_lettered" if round_ == 3 else "queued")
    letter = await anext(book.store.dead_letters(10))
    assert letter.cause == "too_stale"
    assert "head version 3 at step 5, at least 4 is needed" in letter.reason
    assert (await book.store.stats()).regenerated == 4


async def test_take_of_named_tasks_when_all_ended_then_the_accepted_in_order(book: Book) -> None:
    await book.register(size=2, eta=0)
    await book.submit("a", "b", "c")
    assert (await book.take(1, "c", "a", "b"))[0] == "waiting"
    # All three are wanted: they pass the bound of two.
    leases = await book.lease(10)
    assert list(leases) == ["a", "b", "c"]
    await book.complete("a", leases["a"])
    await book.store.reject("b", leases["b"], "no")
    assert (await book.take(1, "c", "a", "b"))[0] == "waiting"
    await book.complete("c", leases["c"])
    assert await book.take(1, "c", "a", "b") == ("taken", ["c", "a"])
    assert await book.take(1, "c", "a", "b") == ("taken", ["c", "a"])


async def test_take_of_named_tasks_when_others_fill_the_bound_then_they_run_first(
    book: Book,
) -> None:
    await book.register(size=1, eta=0)
    await book.submit("other0", "other1", "mine")
    token = (await book.lease())["other0"]
    await book.complete("other0", token)
    assert await book.lease() == {}
    assert (await book.take(1, "mine"))[0] == "waiting"
    token = (await book.lease())["mine"]
    await book.expire_lease("mine")
    token = (await book.lease())["mine"]
    await book.complete("mine", token)
    assert await book.take(1, "mine") == ("taken", ["mine"])
    assert await book.state("other0") == "completed"


async def test_take_of_named_tasks_when_none_is_accepted_then_an_error_says_so(
    book: Book,
) -> None:
    await book.register()
    await book.submit("a", "b")
    leases = await book.lease(2)
    await book.store.reject("a", leases["a"], "all samples equal")
    await book.store.cancel(["b"], None, reason="", incarnation=0)
    with pytest.raises(WorkflowError, match=r"none of the 2 tasks .* a is rejected: all samples"):
        await book.take(1, "a", "b")
    await book.run("c")
    assert await book.take(1, "c") == ("taken", ["c"])


async def test_take_of_named_tasks_when_unknown_then_not_found(book: Book) -> None:
    await book.register()
    with pytest.raises(NotFound, match="task ghost"):
        await book.take(1, "ghost")


# -- L7: sealed data --------------------------------------------------------------------------


async def test_take_when_sealed_then_a_short_batch_and_then_exhausted(book: Book) -> None:
    await book.register(size=2)
    await book.submit("a", "b", "c", seal=True)
    leases = await book.lease(3)
    for task_id, token in leases.items():
        assert (await book.take(1))[0] in ("waiting", "taken")
        await book.complete(task_id, token)
    assert await book.take(1) == ("taken", ["a", "b"])
    assert await book.take(2) == ("taken", ["c"])
    assert await book.take(3) == ("exhausted", [])


async def test_take_when_unsealed_by_new_tasks_then_waits_again(book: Book) -> None:
    await book.register(size=2)
    await book.submit("a", seal=True)
    await book.submit("a")  # known: nothing new
    token = (await book.lease())["a"]
    await book.complete("a", token)
    await book.submit("b")
    assert (await book.take(1))[0] == "waiting"


# -- L2, L3: commit, resume, two trainers -----------------------------------------------------


async def train(book: Book, steps: int) -> list[list[str]]:
    """Runs that many steps of two groups; returns the batches."""
    batches = []
    for step in range(1, steps + 1):
        assert (await book.take(step))[0] == "waiting"
        await book.run(f"s{step}a", f"s{step}b", version=step - 1)
        state, ids = await book.take(step)
        assert state == "taken"
        batches.append(ids)
    return batches


async def test_commit_when_cumulative_and_repeated_then_fine_and_above_taken_refused(
    book: Book,
) -> None:
    await book.register()
    await train(book, 3)
    with pytest.raises(WrongStep, match="CommitStep 4: the last step taken is 3"):
        await book.store.commit(1, 4, 0)
    assert await book.store.commit(1, 2, 0) == 2
    assert await book.store.commit(1, 2, 0) == 2
    assert await book.store.commit(1, 1, 0) == 2
    assert await book.counts() == {"trained": 4, "batched": 2}
    assert await book.store.commit(1, 3, 2) == 3
    assert await book.counts() == {"trained": 6}
    with pytest.raises(WrongStep, match="TakeBatch step 2: its payload was let go"):
        await book.take(2)
    with pytest.raises(NotFound, match=r"not part of the batch|was let go"):
        _ = [p async for p in book.store.fetch(1, 2, ["s2a"])]
    assert [len(p) async for p in book.store.fetch(1, 3, ["s3b", "s3a"])]


@pytest.mark.parametrize("resume", [1, 2, 3, 4])
async def test_resume_when_from_any_retained_step_then_the_same_batches(
    book: Book, resume: int
) -> None:
    await book.register()
    batches = await train(book, 4)
    await book.store.commit(1, 3, 1)
    trainer = await book.store.register_trainer(resume, 2, 1, 100)
    assert (trainer.last_taken_step, trainer.last_committed_step) == (4, 3)
    book.incarnation = trainer.incarnation
    # The first call after a resume repeats the commit of the checkpoint.
    assert await book.store.commit(book.incarnation, resume, min(resume, 1)) >= resume
    for step in range(resume + 1, 5):
        take = await book.store.take(book.incarnation, step, (), near_limit=True)
        assert [group.task_id for group in take.groups] == batches[step - 1]
        assert take.replay
        some = book.store.fetch(book.incarnation, step, batches[step - 1])
        got = [payload async for payloads in some for payload in payloads]
        assert got == [finished(each, step - 1).payload for each in batches[step - 1]]
    assert (await book.take(5))[0] == "waiting"
    await book.run("x", "y", version=4)
    assert await book.take(5) == ("taken", ["x", "y"])


async def test_resume_when_below_what_is_kept_then_names_the_oldest(book: Book) -> None:
    await book.register()
    await train(book, 4)
    await book.store.commit(1, 4, 2)
    with pytest.raises(WrongStep, match="the oldest resumable step is 2"):
        await book.register(resume=1)
    with pytest.raises(WrongStep, match="given out batches up to step 4 only"):
        await book.register(resume=5)
    assert await book.register(resume=2) == 2


async def test_resume_when_the_ledger_is_empty_then_goes_on_from_the_checkpoint(
    book: Book,
) -> None:
    await book.register(resume=7)
    assert (await book.take(8))[0] == "waiting"
    await book.run("a", "b", version=7)
    assert await book.take(8) == ("taken", ["a", "b"])


async def test_resume_when_generation_went_on_then_bound_holds_and_nothing_is_too_stale(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await train(book, 3)  # step 3 is in training; version 2
    await book.submit(*(f"n{i}" for i in range(10)))
    leases = await book.lease(10)
    assert len(leases) == 2  # 2 batched ahead + 2 = (1 + 1) * 2
    for task_id, token in leases.items():
        await book.complete(task_id, token, version=2)
    await book.register(resume=0, size=2, eta=1)
    assert await book.lease(10) == {}
    for step in (1, 2, 3):
        await book.take(step)
    assert await book.lease(10) == {}
    assert await book.take(4) == ("taken", list(leases))
    assert (await book.store.stats()).staleness_max == 1


async def test_two_trainers_when_the_older_calls_then_fenced_everywhere(book: Book) -> None:
    old = await book.register()
    await train(book, 1)
    new = await book.register()
    assert new == old + 1
    store = book.store
    for call in (
        store.take(old, 1, (), near_limit=False),
        store.take(old, 2, (), near_limit=False),
        store.commit(old, 1, 0),
        store.submit([], incarnation=old, seal=True, full=False),
        store.cancel([], Purpose.TRAIN, reason="", incarnation=old),
        anext(store.fetch(old, 1, ["s1a"])),
    ):
        with pytest.raises(StaleIncarnation, match="incarnation 1: the current one is 2"):
            await call
    assert await store.commit(new, 1, 0) == 1


# -- sweeps -----------------------------------------------------------------------------------


async def test_sweep_when_there_was_an_outage_then_leases_are_extended(book: Book) -> None:
    await book.submit("a")
    await book.lease()
    await book.store.sweep()
    await book.redis.zadd(f"{book.prefix}running:train", {"a": 1})  # type: ignore[attr-defined]
    await book.redis.hincrby(f"{book.prefix}meta", "last_sweep", -10_001)  # type: ignore[attr-defined]
    swept = await book.store.sweep()
    assert (swept.extended, swept.requeued) == (1, 0)
    assert swept.gap_ms >= 10_001
    assert await book.state("a") == "running"
    await book.expire_lease("a")
    assert await book.state("a") == "queued"


async def test_sweep_when_time_to_live_has_passed_then_expired_unless_completed(
    book: Book,
) -> None:
    await book.submit("a", "b", "c", time_to_live_ms=1)
    leases = await book.lease(2)
    assert await book.complete("a", leases["a"])
    while (await book.store.sweep()).expired == 0:
        pass
    assert await book.counts() == {"completed": 1, "expired": 2}
    with pytest.raises(LeaseLost, match="the task is expired"):
        await book.complete("b", leases["b"])


# -- memory -----------------------------------------------------------------------------------


async def test_memory_when_near_limit_then_checkpoint_first_only_if_that_helps(
    book: Book,
) -> None:
    await book.register()
    await train(book, 1)
    await book.run("a", "b", version=0)
    take = await book.store.take(1, 2, (), near_limit=True)
    assert take.state == "checkpoint_first"
    assert "commit step 1" in take.waiting_for
    await book.store.commit(1, 1, 1)
    assert await book.take(2, near_limit=True) == ("taken", ["a", "b"])


async def test_memory_when_full_then_only_what_the_next_batch_needs_is_completed(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit("a", "b", "c", "d")
    leases = await book.lease(4)
    assert await book.complete("a", leases["a"], full=True)
    assert await book.complete("b", leases["b"], full=True)
    with pytest.raises(CapacityExceeded, match="task c: the ledger is near its memory limit"):
        await book.complete("c", leases["c"], full=True)
    assert await book.state("c") == "running"
    assert await book.take(1, near_limit=True) == ("taken", ["a", "b"])
    assert await book.complete("c", leases["c"], full=True)


async def test_memory_when_full_then_submission_is_refused_only_with_enough_queued(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    assert await book.submit("a", "b", full=True) == [True, True]
    with pytest.raises(CapacityExceeded, match="has 2 tasks queued"):
        await book.submit("c", full=True)
    assert await book.submit("a", full=True) == [False]
    with pytest.raises(CapacityExceeded):
        await book.submit("s", purpose=Purpose.SERVE, full=True)


async def test_group_when_large_then_stored_as_handed_in_and_read_back_whole(book: Book) -> None:
    await book.register(size=2)
    await book.submit("large", "plain")
    await book.submit("served", purpose=Purpose.SERVE)
    leases = await book.lease(3)
    large = make_group("large", length=2000)
    whole = group_to_pb(large).SerializeToString()
    group = replace(finished("large"), payload=pack_group(large))
    assert await complete(book.store, leases["large"], group, full=False)
    served = replace(group, task_id="served")
    assert await complete(book.store, leases["served"], served, full=False)
    assert await book.complete("plain", leases["plain"])
    # As a worker that does not compress hands it in.
    plain = expand(finished("plain").payload)
    await book.redis.set(f"{book.prefix}group:plain", plain)  # type: ignore[attr-defined]
    stored = await book.redis.strlen(f"{book.prefix}group:large")  # type: ignore[attr-defined]
    assert stored == len(group.payload) < len(whole) / 2
    assert await book.take(1) == ("taken", ["large", "plain"])
    some = book.store.fetch(book.incarnation, 1, ["large", "plain"])
    assert [each async for payloads in some for each in payloads] == [group.payload, plain]
    (record,) = [r async for r in book.store.read(["served"], groups=True)]
    assert record.payload == whole


async def test_cancel_when_all_of_a_purpose_then_batched_ones_stay(book: Book) -> None:
    await book.register()
    await book.run("a", "b", "c")
    await book.take(1)
    await book.submit(*(f"t{i}" for i in range(1200)))
    await book.submit("s", purpose=Purpose.SERVE)
    await book.lease()
    assert await book.store.cancel([], Purpose.TRAIN, reason="done", incarnation=1) == 1201
    assert (await book.counts())["batched"] == 2
    assert (await book.counts())["cancelled"] == 1201
