"""A session whose agent waits for an answer is not silent, however long the answer takes."""

from __future__ import annotations

import asyncio

from tests.ledger_support import Book
from tests.session_hops import Hops


async def test_session_when_an_answer_takes_longer_than_its_ttl_then_it_does_not_expire(
    book: Book,
):
    hops = Hops(book, letters=3)
    await hops.open("s", idle_ms=600)
    running = f"{book.prefix}running:serve"
    worker, sample = hops.worker(), hops.sampler.generate

    async def slow(request, responses, **more):
        expiry = await book.redis.zscore(running, "s")
        async with asyncio.timeout(60):
            while await book.redis.zscore(running, "s") <= expiry + 600:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await sample(request, responses, **more)

    hops.sampler.generate = slow
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    await hops.ask(worker, "/v1/chat/completions", body)
    ended = await hops.ask(worker, "/end", {"reward": 1.0})
    assert ended["state"] == "delivered"


async def test_session_when_its_answer_is_there_then_its_silence_counts(book: Book):
    hops = Hops(book, letters=3)
    await hops.open("s", idle_ms=300)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    worker = hops.worker()
    await hops.ask(worker, "/v1/chat/completions", body)
    running = f"{book.prefix}running:serve"
    expiry = await book.redis.zscore(running, "s")
    await asyncio.sleep(0.25)  # more than the third after which a waiting call renews
    assert await book.redis.zscore(running, "s") == expiry
