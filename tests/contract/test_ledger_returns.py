"""Tasks that end otherwise than complete: given back, dropped, cancelled; the real scripts."""

from __future__ import annotations

import pytest
from tests.ledger_support import Book

from areal.errors import InvalidInput
from areal.types import Purpose


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
    await book.redis.hset(f"{book.prefix}meta", "policy_version", 2)
    lease = (await book.store.lease("w", 1))[0][0]
    assert (lease.task_id, lease.policy_version, lease.partial) == ("x", 2, b"")
    with pytest.raises(InvalidInput, match="the lease was given at 2"):
        await book.complete("x", lease.token, version=1)


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
