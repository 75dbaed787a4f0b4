"""Tasks that end otherwise than complete: returned, dropped, cancelled; the real scripts."""

from __future__ import annotations

import pytest
from tests.ledger_support import EMPTY, Book, returned

from areal.errors import InvalidInput, LeaseLost, NotFound
from areal.types import Purpose


async def test_expiry_when_repeated_then_infrastructure_and_retry_brings_it_back(
    book: Book,
) -> None:
    await book.submit("a")
    for _ in range(3):
        await book.lease()
        await book.expire_lease("a")
    assert await book.counts() == {"dead_lettered": 1}
    letters = [letter async for letter in book.store.dead_letters(10)]
    assert letters[0].cause == "infrastructure"
    assert letters[0].record.infrastructure_attempts == 3
    assert "worker w was silent" in letters[0].record.reason
    assert await book.store.retry_dead_letters([]) == 1
    assert await book.counts() == {"queued": 1}
    token = (await book.lease())["a"]
    assert await book.complete("a", token)


async def test_return_when_causes_differ_then_each_has_its_own_limit(book: Book) -> None:
    await book.submit("a")
    for cause in ("drain", "drain", "drain", "workflow_error", "infrastructure", "infrastructure"):
        token = (await book.lease())["a"]
        assert await book.return_lease("a", token, cause) == "queued"
    token = (await book.lease())["a"]
    assert await book.return_lease("a", token, "workflow_error") == "dead_lettered"
    assert await book.return_lease("a", token, "workflow_error") == "dead_lettered"  # idempotent
    letter = await anext(book.store.dead_letters(10))
    assert (letter.cause, letter.traceback) == ("workflow_error", "where")
    assert (letter.record.attempts, letter.record.infrastructure_attempts) == (2, 2)


async def test_return_when_of_many_some_are_refused_then_the_others_are_given_back(
    book: Book,
) -> None:
    await book.submit("a", "b", "c", "d")
    tokens = await book.lease(4)
    await book.complete("c", tokens["c"])
    given = [
        returned("a", tokens["a"], partial=b"journal"),
        returned("b", tokens["b"] + 100),
        returned("x", 1),
        returned("c", tokens["c"]),
        returned("a", tokens["a"], partial=b"journal"),  # again: nothing changes
        returned("d", tokens["d"], "workflow_error"),
    ]
    lost = (LeaseLost, NotFound, LeaseLost)
    for _ in range(2):  # all of it again: nothing changes
        results = await book.store.return_leases(given, limit=EMPTY)
        assert [results[0], results[4], results[5]] == ["queued"] * 3
        assert tuple(type(each) for each in results[1:4]) == lost
        assert "task b: lease" in str(results[1])
    assert await book.counts() == {"queued": 2, "running": 1, "completed": 1}
    async for record in book.store.read(["a", "d"], groups=False):
        assert record.attempts == (1 if record.task.task_id == "d" else 0)
    leases, _ = await book.leases(1)
    assert (leases[0].task.task_id, leases[0].partial) == ("a", b"journal")


async def test_return_when_a_renewal_comes_after_it_then_the_lease_stays_returned(
    book: Book,
) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    await book.return_lease("a", token, partial=b"journal")
    assert await book.store.renew("w", [("a", token)]) == ["a"]
    assert await book.counts() == {"queued": 1}
    again = (await book.lease())["a"]
    assert await book.store.renew("w", [("a", again)]) == []
    await book.expire_lease("a")  # only silent: it may continue
    assert await book.store.renew("w", [("a", again)]) == []


async def test_return_when_many_then_each_script_call_is_bounded(book: Book) -> None:
    ids = [f"t{number}" for number in range(1100)]
    await book.register(concurrent=2000, size=1100)
    await book.submit(*ids)
    tokens = {**await book.lease(600), **await book.lease(600)}
    assert await book.store.return_leases([], limit=EMPTY) == []
    results = await book.store.return_leases(
        [returned(each, tokens[each]) for each in ids], limit=EMPTY
    )
    assert results == ["queued"] * 1100
    assert await book.counts() == {"queued": 1100}


async def test_drop_when_dead_then_off_the_list_for_good_and_still_counted(book: Book) -> None:
    await book.submit("a", "b")
    await book.submit("s", purpose=Purpose.SERVE)
    for _ in range(2):
        for task_id, token in (await book.lease(3)).items():
            await book.return_lease(task_id, token, "workflow_error")
    await book.submit("alive")
    assert await book.store.drop_dead_letters(["a", "s", "alive", "ghost"]) == 2
    assert await book.store.drop_dead_letters(["a"]) == 0
    assert [letter.record.task.task_id async for letter in book.store.dead_letters(10)] == ["b"]
    assert await book.counts() == {"dead_lettered": 3, "queued": 1}
    assert await book.store.retry_dead_letters(["a"]) == 0
    assert await book.store.retry_dead_letters([]) == 1
    assert await book.counts() == {"dead_lettered": 2, "queued": 2}
    assert await book.submit("a") == [False]
    assert await book.state("a") == "dead_lettered"
    left = await book.redis.hmget(f"{book.prefix}task:a", "cause", "traceback")
    assert left == [b"workflow_error", None]
    assert await book.store.drop_dead_letters([]) == 0


async def test_return_when_repeated_then_counted_once(book: Book) -> None:
    await book.submit("a")
    token = (await book.lease())["a"]
    for _ in range(5):
        assert await book.return_lease("a", token, "workflow_error") == "queued"
    assert await book.counts() == {"queued": 1}


async def test_return_when_partial_then_next_lease_has_it_and_front_of_queue(book: Book) -> None:
    await book.submit("a", "b")
    token = (await book.lease())["a"]
    await book.return_lease("a", token, "drain", partial=b"journal", failed_server="s1:1")
    lease = (await book.leases(1, "w2"))[0][0]
    assert (lease.task.task_id, lease.partial, lease.failed_servers) == ("a", b"journal", ["s1:1"])


async def test_partial_when_continued_then_tokens_of_the_first_lease_count(book: Book) -> None:
    await book.register(eta=1)
    await book.submit("x")
    token = (await book.lease())["x"]
    await book.return_lease("x", token, "drain", partial=b"journal")
    await book.submit("a", "b")
    leases = await book.lease(3)  # x again at version 0, a and b
    for each in ("a", "b"):
        await book.complete(each, leases[each])
    await book.return_lease("x", leases["x"], "drain", partial=b"journal")
    assert await book.take(1) == ("taken", ["a", "b"])
    await book.take(2)  # version 1
    lease = (await book.leases(1))[0][0]
    assert (lease.policy_version, lease.partial) == (1, b"journal")
    await book.run("c", version=1)
    assert await book.complete("x", lease.token, version=0)
    assert await book.take(2) == ("taken", ["x", "c"])


async def test_partial_when_too_stale_for_any_batch_then_dropped(book: Book) -> None:
    await book.register(size=1, eta=1)
    await book.submit("x")
    token = (await book.lease())["x"]
    await book.return_lease("x", token, "drain", partial=b"journal")
    await book.submit("a")
    leases = await book.lease(2)
    await book.complete("a", leases["a"])
    await book.return_lease("x", leases["x"], "drain", partial=b"journal")
    assert await book.take(1) == ("taken", ["a"])
    await book.redis.hset(f"{book.prefix}meta", "policy_version", 2)
    lease = (await book.leases(1))[0][0]
    assert (lease.task.task_id, lease.policy_version, lease.partial) == ("x", 2, b"")
    with pytest.raises(InvalidInput, match="the task was leased at version 2"):
        await book.complete("x", lease.token, version=1)


async def test_partial_when_its_last_batch_was_taken_meanwhile_then_dropped(book: Book) -> None:
    """The version moves with the next take only; what starts now is for a later batch."""
    await book.register(size=1, eta=1)
    await book.submit("x", "a")
    leases = await book.lease(2)
    await book.complete("a", leases["a"])
    await book.return_lease("x", leases["x"], "drain", partial=b"journal")
    assert await book.take(1) == ("taken", ["a"])
    await book.take(2)  # version 1: x is the oldest that step 2 may have
    await book.submit("b")
    leases = await book.lease(2)
    await book.return_lease("x", leases["x"], "drain", partial=b"journal")
    await book.complete("b", leases["b"], version=1)
    assert await book.take(2) == ("taken", ["b"])
    lease = (await book.leases(1))[0][0]
    assert (lease.task.task_id, lease.policy_version, lease.partial) == ("x", 1, b"")
    assert await book.complete("x", lease.token, version=1)
    assert await book.take(3) == ("taken", ["x"])
    assert (await book.store.stats()).regenerated == 0


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
