"""Redis comes back without its latest writes, which workers still have and must not build on."""

from __future__ import annotations

import orjson
import pytest
from tests.ledger_support import Book
from tests.session_hops import Hops

from areal.types import StopReason


@pytest.fixture
async def hops(book: Book) -> Hops:
    opened = Hops(book, letters=3)
    await opened.open("s")
    return opened


class Past:
    """The session as Redis had it on its disk."""

    def __init__(self, hops: Hops) -> None:
        self._redis, prefix = hops.book.redis, hops.book.prefix
        self._keys = [f"{prefix}task:s", f"{prefix}calls:s/0"]
        self._dumps: list[bytes | None] = []

    async def save(self) -> None:
        self._dumps = [await self._redis.dump(key) for key in self._keys]

    async def restore(self) -> None:
        for key, content in zip(self._keys, self._dumps, strict=True):
            await self._redis.delete(key)
            if content is not None:
                await self._redis.restore(key, 0, content)


def talk(*texts: str) -> dict[str, object]:
    """Agent's and model's texts in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": 8}


async def said(hops: Hops, worker, body) -> str:
    answer = await hops.ask(worker, "/v1/chat/completions", body)
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def ended(hops: Hops, worker) -> list[list[int]]:
    """Ends the session; returns its trajectories, which must be what the model saw and said."""
    await hops.ask(worker, "/end", {"reward": 1.0})
    assert hops.groups.group is not None
    found = hops.groups.group.trajectories
    for each in found:
        # Each sampled token is one that the model gave to exactly the ids before it.
        ids, mask = each.input_ids.tolist(), each.loss_mask
        starts = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
        assert starts
        for start in starts:
            prompts = enumerate(hops.sampler.prompts, 1)
            assert ids[start] in {97 + turn % 26 for turn, each in prompts if each == ids[:start]}
    return [each.input_ids.tolist() for each in found]


async def test_answer_when_redis_lost_it_then_it_is_context_of_the_next_turn(hops):
    worker, past = hops.worker(), Past(hops)
    first = await said(hops, worker, talk("a"))
    await past.save()
    second = await said(hops, worker, talk("a", first, "b"))
    await past.restore()
    await said(hops, worker, talk("a", first, "b", second, "c"))
    [trajectory] = await ended(hops, worker)
    assert trajectory[: len(hops.sampler.prompts[2])] == hops.sampler.prompts[2]
    [found] = hops.groups.group.trajectories
    assert int(found.loss_mask.sum()) == 4 + 4


async def test_answer_when_redis_lost_it_and_its_number_is_taken_then_it_is_not_extended(hops):
    worker, other, past = hops.worker(), hops.worker(), Past(hops)
    first = await said(hops, worker, talk("a"))
    await past.save()
    second = await said(hops, worker, talk("a", first, "b"))
    await past.restore()
    await said(hops, other, talk("a", first, "other"))  # number 1 again
    await said(hops, worker, talk("a", first, "b", second, "c"))
    assert len(await ended(hops, worker)) == 2


@pytest.mark.parametrize("taken", [False, True])
async def test_prompt_when_redis_loses_it_during_generation_then_the_agent_asks_again(hops, taken):
    worker, other, past = hops.worker(), hops.worker(), Past(hops)
    first = await said(hops, worker, talk("a"))
    await past.save()
    sample = hops.sampler.generate

    async def losing(request, responses, **more):
        hops.sampler.generate = sample
        await past.restore()
        if taken:
            await said(hops, other, talk("a", first, "other"))
        await sample(request, responses, **more)

    hops.sampler.generate = losing
    body = talk("a", first, "b")
    reply = await hops.reply(worker, "/v1/chat/completions", body)
    assert reply.status == 503
    assert b": try again in 1 s" in reply.body
    again = await hops.reply(worker, "/v1/chat/completions", body, retry=1)
    assert again.status == 200
    assert len(await ended(hops, worker)) == 1 + taken


async def test_extended_answer_when_redis_loses_it_before_the_prompt_then_the_agent_asks_again(
    hops,
):
    worker, past = hops.worker(), Past(hops)
    await past.save()
    first = await said(hops, worker, talk("a"))
    store, update = hops.store, hops.store.update

    async def losing(request):
        store.update = update
        await past.restore()
        return await update(request)

    store.update = losing
    body = talk("a", first, "b")
    reply = await hops.reply(worker, "/v1/chat/completions", body)
    assert (reply.status, b"answer 0 of session s" in reply.body) == (503, True)
    assert (await hops.reply(worker, "/v1/chat/completions", body, retry=1)).status == 200
    assert len(await ended(hops, worker)) == 1


async def test_call_when_its_generation_failed_then_others_need_not_read_all_again(hops):
    worker = hops.worker()
    sample = hops.sampler.generate

    async def failing(request, responses, **more):
        await sample(request, responses, **more)
        responses[0].stop_reason = StopReason.ABORT

    hops.sampler.generate = failing
    assert (await hops.reply(worker, "/v1/chat/completions", talk("a"))).status == 503
    hops.sampler.generate = sample
    texts = ["a"]
    for turn in range(6):
        texts += [await said(hops, worker, talk(*texts)), str(turn)]
    before = hops.sent["read"]
    await said(hops, worker, talk(*texts))
    assert hops.sent["read"] - before < 400
    reply = await hops.reply(worker, "", method="GET")
    assert orjson.loads(reply.body)["calls"] == 8
    assert len(await ended(hops, worker)) == 1
