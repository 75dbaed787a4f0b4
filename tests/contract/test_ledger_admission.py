"""Which tasks may run: the bound of staleness (L4), serving beside training; the real scripts."""

from __future__ import annotations

import pytest
from tests.ledger_support import EMPTY, Book, make_group

from areal.errors import StaleIncarnation, WrongStep
from areal.protocol.trajectories import group_to_pb
from areal.types import Purpose


async def test_admission_when_bound_is_reached_then_no_lease_until_version_moves(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit(*(f"t{i}" for i in range(20)))
    first = await book.lease(10)
    assert len(first) == 4  # (1 + 1) * 2
    leases, reason = await book.leases(1)
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


async def test_admission_when_a_version_is_on_its_way_then_two_batches_count_and_leases_need_it_not(
    book: Book,
) -> None:
    await book.register(size=2, eta=2)
    await book.submit(*(f"t{i}" for i in range(20)))
    for task_id, token in (await book.lease(10)).items():
        await book.complete(task_id, token)
    assert (await book.take(1))[0] == "taken"
    taken = await book.store.take(book.incarnation, 2, (), limit=EMPTY, confirmed=0)
    assert taken.state == "taken"  # beside version 1, which no server serves yet
    leases, reason = await book.leases(10)
    assert [lease.policy_version for lease in leases] == []
    assert "0 running + 2 completed + 4 batched ahead of version 0" in reason
    with pytest.raises(WrongStep, match="ConfirmVersion 3: the last step taken is 2"):
        await book.store.confirm(book.incarnation, 3)
    with pytest.raises(StaleIncarnation):
        await book.store.confirm(book.incarnation - 1, 1)
    assert await book.store.confirm(book.incarnation, 1) == 1
    leases, _ = await book.leases(10)
    assert [lease.policy_version for lease in leases] == [1, 1]
    assert await book.store.confirm(book.incarnation, 0) == 1  # late: it never goes back


async def test_admission_when_a_trainer_says_nothing_of_versions_then_the_one_before_its_step(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    await book.run("a", "b")
    await book.take(1)
    await book.take(2)
    await book.submit("c")
    leases, _ = await book.leases(1)
    assert [lease.policy_version for lease in leases] == [1]


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
        assert (await book.leases(1))[1] == (
            "admission: max_concurrent_rollouts reached: 1 running"
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
    assert records[0].group == group_to_pb(make_group("s0"))
    assert await book.store.ended(["s0", "t0"]) == ["s0"]


async def test_serve_and_train_when_both_queue_then_they_alternate(book: Book) -> None:
    await book.register(size=10, eta=0)
    await book.submit(*(f"t{i}" for i in range(4)))
    await book.submit(*(f"s{i}" for i in range(4)), purpose=Purpose.SERVE)
    order = [next(iter(await book.lease())) for _ in range(8)]
    assert order == ["s0", "t0", "s1", "t1", "s2", "t2", "s3", "t3"]
