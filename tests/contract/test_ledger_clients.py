"""What clients put into Redis is counted, bounded, and goes when its time has come."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest
from tests.contract.test_ledger_sessions import Sessions
from tests.ledger_support import FULL, Book, open_book, returned

from areal.errors import InvalidInput
from areal.types import Purpose
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.sessions import check_update


@pytest.fixture
async def small(redis_url: str) -> AsyncIterator[Book]:
    """A ledger that keeps about four recipes of a thousand bytes."""
    async with open_book(redis_url, recipes_bytes=4 * 1600) as opened:
        yield opened


@pytest.fixture
def sessions(book: Book) -> Sessions:
    return Sessions(book)


def recipe(number: int) -> tuple[str, bytes]:
    source = f"{number}".encode() * 1000
    return hashlib.sha256(source).hexdigest(), source


async def kept(book: Book, count: int) -> list[int]:
    found = [await book.store.get_recipe(recipe(number)[0]) for number in range(count)]
    return [number for number, each in enumerate(found) if each is not None]


async def put(book: Book, number: int) -> None:
    digest, source = recipe(number)
    await book.store.put_recipe(digest, "recipe.py", source)
    # A time of its own: the order in which they were used is known.
    await book.redis.zadd(f"{book.prefix}recipes", {digest: number + 1})


async def test_recipes_when_many_are_put_then_those_used_longest_ago_go_and_all_are_counted(
    small: Book,
) -> None:
    for number in range(7):
        await put(small, number)
        assert await small.held() == await small.recount()
    assert await kept(small, 7) == [3, 4, 5, 6]
    assert (await small.held())[1] <= 4 * 1600
    await small.store.recipes_used([recipe(3)[0], "", "unknown"])
    await put(small, 7)
    assert await kept(small, 8) == [3, 5, 6, 7]
    assert len(await small.redis.keys(f"{small.prefix}recipe:*")) == 4


async def test_recipes_when_one_is_put_again_then_it_is_kept_once(small: Book) -> None:
    for _ in range(3):
        await put(small, 0)
    assert await small.held() == await small.recount() == (0, 512 + 9 + 1000)


async def test_recipe_when_a_trainer_runs_it_then_no_number_of_others_drives_it_out(
    small: Book,
) -> None:
    await put(small, 0)
    await small.store.register_trainer(0, 2, 1, 100, recipe(0)[0])
    for number in range(1, 9):
        await put(small, number)
    assert await kept(small, 9) == [0, 6, 7, 8]
    assert await small.held() == await small.recount()


async def test_session_when_it_has_many_keys_then_they_are_counted_until_it_goes(
    book: Book, sessions: Sessions
) -> None:
    await book.register()
    await sessions.open("s", keys=["a" * 64] * 64, salt=b"s" * 64)
    assert (await book.held())[0] > 64 * 65
    assert await book.held() == await book.recount()


async def test_call_when_it_asks_for_many_answers_then_about_what_redis_needs_is_counted(
    book: Book, sessions: Sessions
) -> None:
    await book.register()
    await sessions.open("s")
    before = sum(await book.held())
    for _ in range(20):
        await sessions.begin("s", 1, 2, 3, answers=128)
    counted = sum(await book.held()) - before
    needed = await book.redis.memory_usage(f"{book.prefix}calls:s/0", samples=0)
    assert needed is not None
    assert needed / 2 < counted < 2 * needed


async def test_dead_letters_when_memory_is_short_then_those_of_clients_go_and_the_runs_stay(
    book: Book,
) -> None:
    await book.register()
    await book.submit("client", purpose=Purpose.SERVE)
    await book.submit("mine")
    for _ in range(2):
        for task_id, token in (await book.lease(2)).items():
            ends = [returned(task_id, token, "workflow_error")]
            await book.store.return_leases(ends, limit=2**50)
    await book.redis.zadd(f"{book.prefix}dead", {"client": 1, "mine": 1})
    await book.submit("more", limit=FULL)
    assert await book.state("mine") == "dead_lettered"
    assert not await book.redis.exists(f"{book.prefix}task:client")
    assert await book.redis.zrange(f"{book.prefix}dead", 0, -1) == [b"mine"]
    assert await book.held() == await book.recount()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({str(n): 1.0 for n in range(33)}, "reward.parts: got 33, expected at most 32"),
        ({"x" * 65: 1.0}, "got 65 characters, expected at most 64"),
    ],
)
def test_reward_when_its_parts_are_many_or_long_then_refused(
    parts: dict[str, float], said: str
) -> None:
    reward = pb.SessionReward(value=1.0, parts=parts)
    lease = pb.LeaseRef(task_id="s", token=1)
    with pytest.raises(InvalidInput, match=said):
        check_update(pb.UpdateSessionRequest(lease=lease, attempt=0, reward=reward))


async def test_session_when_its_agent_never_calls_then_its_slot_is_free_long_before_its_idle_time(
    redis_url: str,
) -> None:
    week = 7 * 24 * 3600 * 1000
    async with open_book(redis_url, first_call_ms=100) as book:
        sessions = Sessions(book, first_call_ms=100)
        await book.register()
        await sessions.open("silent", idle_ms=week)
        await sessions.open("used", idle_ms=week)
        await sessions.begin("used", 1)
        used = await book.redis.zscore(f"{book.prefix}running:train", "used")
        silent = await book.redis.zscore(f"{book.prefix}running:train", "silent")
        assert used is not None
        assert silent is not None
        assert used - silent > week / 2
        await book.redis.zadd(f"{book.prefix}running:train", {"silent": 1})
        await book.store.sweep()
        assert (await book.state("silent"), await book.state("used")) == ("expired", "running")
        record = (await sessions.store.read("silent", 0)).record
        assert record.reason == "session expired: its agent made no call: it was silent for 0 s"
