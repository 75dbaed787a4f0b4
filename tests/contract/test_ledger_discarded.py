"""What ended untrained, for the trainer to keep, against the real scripts on Redis."""

from __future__ import annotations

import pytest
from tests.ledger_support import FULL, Book, finished, open_book

from areal.errors import LeaseLost, StaleIncarnation, WrongStep
from areal.protocol.trajectories import unpack_group


async def discarded(book: Book, step: int) -> list[tuple[str, str, str, bool]]:
    """(task, outcome, reason, whether its group is there) in the order in which they ended."""
    _, found = await book.store.discarded(book.incarnation, step, 0)
    for each in found:
        assert not each.group or unpack_group(each.group).task_id == each.task_id
    return [(each.task_id, each.outcome, each.reason, bool(each.group)) for each in found]


async def reject(book: Book, task_id: str, token: int, reason: str = "equal") -> None:
    await book.store.reject(task_id, token, reason, finished(task_id).payload)


async def balanced(book: Book) -> None:
    assert await book.held() == await book.recount()


async def test_tasks_when_they_end_untrained_then_the_next_step_has_each_with_its_cause(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.submit("easy", "none", "broken", "lost")
    leases = await book.lease(4)
    await reject(book, "easy", leases["easy"])
    await book.store.reject("none", leases["none"], "arun_episode returned None")
    await book.return_lease("lost", leases["lost"], "infrastructure")  # queued again: not an end
    for _ in range(2):
        await book.return_lease("broken", leases["broken"], "workflow_error", detail="KeyError")
        leases |= await book.lease(4)
    ends = [
        ("easy", "rejected", "equal", True),
        ("none", "rejected", "arun_episode returned None", False),
        ("broken", "dead_lettered", "workflow_error after 2 attempts: KeyError", False),
    ]
    assert await discarded(book, 1) == ends  # of the step that has no batch yet: so far
    await book.complete("lost", leases["lost"])
    await book.run("a")
    assert await book.take(1) == ("taken", ["lost", "a"])
    assert await discarded(book, 1) == ends
    assert await discarded(book, 2) == []
    assert await discarded(book, 3) == []
    await balanced(book)


async def test_a_group_when_too_stale_or_cancelled_then_it_is_kept_and_its_task_continues(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    await book.run("old", "new", version=0)
    assert await book.take(1) == ("taken", ["old"])
    await book.register(resume=1, size=1, eta=0)
    assert (await book.take(2))[0] == "waiting"
    assert await book.state("new") == "queued"
    lease = await book.lease()
    await book.complete("new", lease["new"], 1)
    assert await book.take(2) == ("taken", ["new"])
    [(name, outcome, reason, whole)] = await discarded(book, 2)
    assert (name, outcome, whole) == ("new", "too_stale", True)
    assert reason == "head version 0 at step 2, at least 1 is needed"
    await book.store.confirm(book.incarnation, 2)
    await book.run("surplus", version=2)
    await book.submit("never-ran")
    await book.store.cancel(["surplus", "never-ran"], None, reason="run finished", incarnation=0)
    assert await discarded(book, 3) == [("surplus", "cancelled", "run finished", True)]
    await balanced(book)


async def test_a_step_when_replayed_then_what_was_discarded_is_the_same_until_released(
    book: Book,
) -> None:
    await book.register(size=1, eta=1)
    for step in (1, 2, 3):
        await book.submit(f"r{step}")
        await reject(book, f"r{step}", (await book.lease())[f"r{step}"])
        await book.run(f"t{step}", version=step - 1)
        assert (await book.take(step))[0] == "taken"
        await book.store.confirm(book.incarnation, step)
    await book.store.commit(book.incarnation, 2, 1)
    before = book.incarnation
    await book.register(resume=2, size=1, eta=1)
    assert await discarded(book, 2) == [("r2", "rejected", "equal", True)]
    assert await discarded(book, 3) == [("r3", "rejected", "equal", True)]
    with pytest.raises(WrongStep, match="step 1: its list of discarded groups has been released"):
        await discarded(book, 1)
    with pytest.raises(StaleIncarnation):
        await book.store.discarded(before, 3, 0)
    await book.store.commit(book.incarnation, 3, 3)
    assert not await book.redis.keys(f"{book.prefix}spare:*")
    assert not await book.redis.keys(f"{book.prefix}discarded*")
    assert await book.redis.hget(f"{book.prefix}meta", "bytes:spare") == b"0"
    await balanced(book)


async def test_a_rejection_when_repeated_or_late_then_it_is_noted_once_and_leaves_nothing(
    book: Book,
) -> None:
    await book.register(size=1)
    await book.submit("a", "b")
    leases = await book.lease(2)
    await reject(book, "a", leases["a"])
    await reject(book, "a", leases["a"])
    with pytest.raises(LeaseLost):
        await reject(book, "b", leases["b"] + 1)
    assert await discarded(book, 1) == [("a", "rejected", "equal", True)]
    assert not await book.redis.keys(f"{book.prefix}staged:*")
    await balanced(book)


@pytest.mark.parametrize("how", ["rejects", "returns"])
async def test_a_lease_when_its_group_was_made_again_then_it_ends_nothing_more(
    book: Book, how: str
) -> None:
    """It has completed, so its token is spent, though it is still the task's newest."""
    await book.register(size=1, eta=1)
    await book.submit("old", "new")
    leases = await book.lease(2)
    for name in ("old", "new"):
        await book.complete(name, leases[name], 0)
    assert await book.take(1) == ("taken", ["old"])
    await book.register(resume=1, size=1, eta=0)
    assert (await book.take(2))[0] == "waiting"
    assert await book.state("new") == "queued"
    ends = {
        "rejects": lambda: reject(book, "new", leases["new"]),
        "returns": lambda: book.return_lease("new", leases["new"], "workflow_error"),
    }
    with pytest.raises(LeaseLost, match="the task is queued, and this lease has completed"):
        await ends[how]()
    await balanced(book)
    assert await book.state("new") == "queued"
    [(name, outcome, _, whole)] = await discarded(book, 2)
    assert (name, outcome, whole) == ("new", "too_stale", True)


async def test_room_when_it_is_short_then_groups_go_and_their_causes_stay(redis_url: str) -> None:
    size = len(finished("a").payload)
    async with open_book(redis_url, spare_bytes=2 * size + size // 2) as book:
        await book.register(size=1)
        for name in "abc":
            await book.submit(name)
            await reject(book, name, (await book.lease())[name])
        ends = [("a", True), ("b", True), ("c", False)]
        assert [(each[0], each[3]) for each in await discarded(book, 1)] == ends
        await book.submit("d")
        lease = (await book.lease())["d"]
        assert await book.complete("d", lease, limit=FULL)  # what a batch needs has priority
        assert [each[3] for each in await discarded(book, 1)] == [False] * 3
        await balanced(book)


async def test_rollouts_when_none_are_kept_then_nothing_is_noted(redis_url: str) -> None:
    async with open_book(redis_url, spare_bytes=0) as book:
        await book.register(size=1)
        await book.submit("a")
        await reject(book, "a", (await book.lease())["a"])
        assert await discarded(book, 1) == []
        assert not await book.redis.keys(f"{book.prefix}spare:*")
        await balanced(book)


async def test_many_when_read_then_in_pages(book: Book) -> None:
    await book.register(size=1)
    names = [f"t{number}" for number in range(1500)]
    await book.submit(*names)
    while leases := await book.lease(60):
        for name, token in leases.items():
            await book.store.reject(name, token, "no")
    total, first = await book.store.discarded(book.incarnation, 1, 0)
    _, rest = await book.store.discarded(book.incarnation, 1, len(first))
    assert (total, len(first), len(rest)) == (1500, 1000, 500)
    assert [each.task_id for each in [*first, *rest]] == names
