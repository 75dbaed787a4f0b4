"""Which groups make a batch (L5), and the end of the data (L7), against the real scripts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.ledger_support import EMPTY, Book, complete, finished, open_book

from areal.errors import NotFound, WorkflowError, WrongStep


async def test_take_when_too_few_then_waits_and_says_for_what(book: Book) -> None:
    await book.register()
    await book.run("a")
    take = await book.store.take(1, 1, (), limit=EMPTY)
    assert take.state == "waiting"
    assert take.waiting_for.startswith(
        "1 of 2 groups are completed; 0 queued; admission: 0 running"
    )
    assert (take.queued, take.running, take.completed) == (0, 0, 1)


async def test_take_when_repeated_then_the_same_groups(book: Book) -> None:
    await book.register()
    await book.run("a", "b", "c")
    first = await book.store.take(1, 1, (), limit=EMPTY)
    again = await book.store.take(1, 1, (), limit=EMPTY)
    assert first.groups == again.groups
    assert not again.replay
    assert [g.task_id for g in first.groups] == ["a", "b"]
    assert first.groups[0].lengths == (6, 6)


async def test_take_when_asked_with_groups_then_brings_the_small_ones_that_come_first(
    book: Book,
) -> None:
    await book.register(size=3)
    await book.submit("a", "b", "c")
    payloads = {"a": b"a", "b": b"b" * 256 * 1024, "c": b"c"}
    for task_id, token in (await book.lease(3)).items():
        group = replace(finished(task_id), payload=payloads[task_id])
        assert await complete(book.store, token, group, limit=EMPTY)
    take = await book.store.take(1, 1, (), limit=EMPTY, with_groups=True)
    assert [group.task_id for group in take.groups] == ["a", "b", "c"]
    assert take.first_groups == (b"a",)
    fetched = [each async for some in book.store.fetch(1, 1, ["a", "b", "c"]) for each in some]
    assert fetched == list(payloads.values())
    assert not (await book.store.take(1, 1, (), limit=EMPTY)).first_groups


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
    take = await book.store.take(1, 2, (), limit=EMPTY)
    assert take.state == "waiting"
    assert take.waiting_for.startswith("1 running groups leased at version 0 or before")
    await book.pass_straggler_deadline()
    assert await book.take(2) == ("taken", ["b"])
    assert await book.state("slow") == "queued"  # regenerated
    assert await book.store.renew("w", [("slow", leases["slow"])]) == ["slow"]
    assert (await book.store.stats()).regenerated == 1


async def test_take_when_the_clock_was_set_back_then_the_time_for_stragglers_begins_anew(
    book: Book,
) -> None:
    await book.register(size=1, eta=0)
    await book.take(1)
    await book.redis.hincrby(f"{book.prefix}meta", "take_since", 3_600_000)
    await book.take(1)
    seconds, _ = await book.redis.time()
    since = await book.redis.hget(f"{book.prefix}meta", "take_since")
    assert int(since) < (seconds + 2) * 1000


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
        await book.redis.zadd(f"{book.prefix}running:train", {"slow": 1})
        await book.redis.hdel(f"{book.prefix}task:slow", "infra")
        await book.store.sweep()
        await book.redis.zrem(f"{book.prefix}queue:train", "slow")
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
    assert "head version 3 at step 5, at least 4 is needed" in letter.record.reason
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


async def test_take_when_refused_after_it_gave_a_group_up_then_totals_and_indexes_say_so(
    redis_process: str,
) -> None:
    async with open_book(redis_process, max_regenerations=0) as book:
        await book.register(size=1, eta=1)
        await book.run("fresh", "stale")
        await book.register(size=1, eta=0)
        assert await book.take(1, "fresh") == ("taken", ["fresh"])
        with pytest.raises(WorkflowError, match="stale is dead_lettered"):
            await book.take(2, "stale")
        assert await book.counts() == {"batched": 1, "dead_lettered": 1}
        assert [each.record.task.task_id async for each in book.store.dead_letters(5)] == ["stale"]
        assert await book.redis.zcard(f"{book.prefix}completed") == 0  # type: ignore[attr-defined]


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


async def test_take_when_fewer_are_queued_than_the_watermark_then_rows_are_wanted(
    book: Book,
) -> None:
    await book.register(size=2)
    await book.submit("a", "b", "c")

    async def wanted(refill_below: int, *ids: str) -> bool:
        take = await book.store.take(1, 1, ids, limit=EMPTY, refill_below=refill_below)
        assert take.state == "waiting"
        return take.rows_wanted

    assert not await wanted(0)
    assert not await wanted(3)
    assert await wanted(4)
    assert await book.lease()
    assert await wanted(3)
    assert not await wanted(2)
    await book.submit("d")
    assert not await wanted(3)
    await book.submit("d", seal=True)  # no more rows will come
    assert not await wanted(100)


async def test_lease_when_it_empties_the_queue_below_the_watermark_then_the_take_is_woken(
    book: Book,
) -> None:
    await book.register(size=2)
    await book.submit("a", "b", "c", "d")
    async with book.redis.pubsub() as heard:
        await heard.subscribe(book.store.wake_channel)

        async def wakes() -> list[bytes]:
            found = []
            while message := await heard.get_message(timeout=0.1):
                found += [message["data"]] if message["type"] == "message" else []
            return found

        await wakes()
        await book.store.take(1, 1, (), limit=EMPTY, refill_below=3)
        await book.lease()
        assert await wakes() == []
        await book.lease()
        assert await wakes() == [b"take"]
        await book.lease()  # no one waits now
        assert await wakes() == []
        await book.store.take(1, 1, (), limit=EMPTY)
        await book.lease()  # that one waits for groups only
        assert await wakes() == []


async def test_take_when_the_deadline_passed_with_too_few_then_fresh_groups_run_on(
    book: Book,
) -> None:
    """Only what would be too stale is waited for no longer; what is as old as allowed still is."""
    await book.register(eta=1)
    await book.submit("a", "b")
    tokens = await book.lease(2)
    assert (await book.take(1))[0] == "waiting"
    await book.complete("a", tokens["a"])
    await book.pass_straggler_deadline()
    assert (await book.take(1))[0] == "waiting"
    assert await book.state("b") == "running"
    await book.complete("b", tokens["b"])
    assert await book.take(1) == ("taken", ["a", "b"])
    # Leased at version 0 for step 2: exactly as old as eta allows.
    await book.submit("c", "d")
    tokens = await book.lease(2)
    assert (await book.take(2))[0] == "waiting"
    await book.complete("c", tokens["c"], 1)
    await book.pass_straggler_deadline()
    assert (await book.take(2))[0] == "waiting"
    assert await book.state("d") == "running"
