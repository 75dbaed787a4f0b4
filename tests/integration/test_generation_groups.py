"""The generation client asks for a group: one request, and what continues after interruptions."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web
from tests.fake_sglang import FakeSGLang, answer, token_at
from tests.integration.generation_rig import PROMPT, check, empty, request, serving
from tests.waiting import until

from areal.images import data_url
from areal.types import StopReason
from areal.weights.servers import ServerState
from areal_rollout.generation.client import Interrupted


async def test_group_when_asked_for_then_one_request_whose_cost_counts_for_each_answer():
    server = FakeSGLang(version="3", hold=True)
    async with serving(server) as client:
        responses = [empty() for _ in range(4)]
        task = asyncio.create_task(client.generate(request(6), responses))
        await until(lambda: server.requests)
        outstanding = client.table.choose(0, "", 1).outstanding
        server.partial = 6
        server.abort_all()
        await task
        assert client.table.choose(0, "", 1).outstanding == 0
    assert outstanding == 4 * (len(PROMPT) + 6)
    [body] = server.requests
    assert body["input_ids"] == [PROMPT] * 4
    assert len(set(body["rid"])) == 4
    assert body["sampling_params"]["max_new_tokens"] == 6
    for response in responses:
        check(response, 6)
    assert len({id(response.output_tokens) for response in responses}) == 4


async def test_group_when_it_ends_in_different_ways_then_only_the_aborted_continue():
    def behave(body):
        if len(first.requests) > 1:
            return None
        return [
            answer(len(PROMPT), 6, "1"),
            answer(len(PROMPT), 2, "1", "abort"),
            answer(len(PROMPT), 3, "1", "stop"),
            answer(len(PROMPT), 0, "1", "abort"),
        ]

    first = FakeSGLang(version="1", behave=behave)
    async with serving(first) as client:
        responses = [empty() for _ in range(4)]
        await client.generate(request(6), responses)
    again = first.requests[1]
    assert again["input_ids"] == [[*PROMPT, token_at(3), token_at(4)], PROMPT]
    assert [each["max_new_tokens"] for each in again["sampling_params"]] == [4, 6]
    assert again["rid"][0] not in first.requests[0]["rid"]
    assert [response.stop_reason for response in responses] == [
        *(StopReason.LENGTH, StopReason.LENGTH, StopReason.STOP, StopReason.LENGTH)
    ]
    assert [len(response.output_tokens) for response in responses] == [6, 6, 3, 6]
    assert [response.interruptions for response in responses] == [0, 1, 0, 1]
    assert client.observer.kinds == ["abort"]


@pytest.mark.parametrize(
    "broken",
    [
        [answer(3, 6, "1")] * 2,
        answer(3, 6, "1"),
        [answer(3, 6, "1"), answer(3, 6, "1"), {"output_ids": [1]}],
        [answer(3, 6, "1"), answer(3, 6, "1"), answer(3, 6, "1", "tired")],
    ],
    ids=["too few", "not an array", "one unusable", "one unknown"],
)
async def test_group_when_an_answer_is_unusable_then_all_of_it_is_asked_elsewhere(broken):
    bad = FakeSGLang(version="1", behave=lambda _: web.json_response(broken))
    good = FakeSGLang(version="1")
    async with serving(bad, good) as client:
        client.table.update([bad.listed()])
        responses = [empty() for _ in range(3)]
        task = asyncio.create_task(client.generate(request(6), responses))
        await until(lambda: client.reports, "a report")
        client.table.update([bad.listed(), good.listed()])
        await task
    assert good.requests[0]["input_ids"] == [PROMPT] * 3
    for response in responses:
        check(response, 6)
        assert response.interruptions == 1
        assert response.servers == [good.url]  # the other one gave no token


async def test_group_when_a_stream_breaks_then_what_had_ended_stays_ended():
    dying = FakeSGLang(version="4", breaks_after=[(1, "4"), (40, "4")], ends_before=(1,))
    good = FakeSGLang(version="6")
    async with serving(dying, good) as client:
        client.table.update([dying.listed()])
        responses = [empty() for _ in range(3)]
        task = asyncio.create_task(client.generate(request(600), responses, min_version=4))
        await until(lambda: client.reports, "a report")
        client.table.update([dying.listed(), good.listed()])
        await task
    for response, kept in zip(responses, (40, 600, 40), strict=True):
        check(response, 600)
        assert response.output_versions == [4] * kept + [6] * (600 - kept)
    assert [response.interruptions for response in responses] == [1, 0, 1]
    assert [len(ids) for ids in good.requests[0]["input_ids"]] == [len(PROMPT) + 40] * 2
    assert client.observer.kept == [680]
    both = [dying.url, good.url]
    assert [response.servers for response in responses] == [both, [dying.url], both]


async def test_group_when_streamed_then_every_answer_is_whole():
    server = FakeSGLang(version="4")
    async with serving(server) as client:
        responses = [empty() for _ in range(3)]
        await client.generate(request(600), responses)
    assert server.requests[0]["stream"] is True
    for response in responses:
        check(response, 600)


async def test_group_when_continued_and_streamed_then_each_answer_continues_its_own_tokens():
    server = FakeSGLang(version="4")
    responses = [empty() for _ in range(3)]
    for response, had in zip(responses, (2, 0, 5), strict=True):
        response.output_tokens += [token_at(len(PROMPT) + i) for i in range(had)]
        response.output_logprobs += [-(len(PROMPT) + i) / 100 for i in range(had)]
        response.output_versions += [3] * had
    async with serving(server) as client:
        await client.generate(request(600), responses)
    assert server.requests[0]["stream"] is True
    for response, had in zip(responses, (2, 0, 5), strict=True):
        check(response, 600)
        assert response.output_versions == [3] * had + [4] * (600 - had)


async def test_group_when_the_worker_drains_then_every_answer_is_aborted_and_kept():
    first = FakeSGLang(version="1", hold=True)
    async with serving(first) as client:
        responses = [empty() for _ in range(4)]
        task = asyncio.create_task(client.generate(request(6), responses))
        await until(lambda: first.requests)
        await client.interrupt(5.0)
        with pytest.raises(Interrupted):
            await task
    assert sorted(first.aborted) == sorted(first.requests[0]["rid"])
    for response in responses:
        check(response, 2)
    second = FakeSGLang(version="2")
    async with serving(second) as client:
        await client.generate(request(6), responses)
    assert len(second.requests) == 1
    for response in responses:
        check(response, 6)
        assert response.output_versions == [1, 1, 2, 2, 2, 2]


async def test_group_when_its_server_leaves_then_it_continues_on_another():
    first, second = FakeSGLang(version="1", hold=True), FakeSGLang(version="2")
    async with serving(first, second) as client:
        client.table.update([first.listed()])
        responses = [empty() for _ in range(2)]
        task = asyncio.create_task(client.generate(request(6), responses))
        await until(lambda: first.requests)
        client.table.update([first.listed(ServerState.QUARANTINED, "no answer"), second.listed()])
        await task
        await until(lambda: len(first.aborted) == 2)
    for response in responses:
        check(response, 6)


async def test_group_when_it_has_images_then_what_continues_has_them_too():
    def behave(body):
        if len(server.requests) > 1:
            return None
        stops = ("length", "abort", "abort")
        return [answer(len(PROMPT), 6 - 4 * (n > 0), "1", stop) for n, stop in enumerate(stops)]

    server = FakeSGLang(version="1", behave=behave)
    file = b"\x89PNG\r\n\x1a\n of a picture"
    async with serving(server) as client:
        responses = [empty() for _ in range(3)]
        await client.generate(replace(request(6), images=(file,)), responses)
    first, again = server.requests
    assert first["image_data"] == [[data_url(file)]] * 3
    assert again["image_data"] == [[data_url(file)]] * 2
    assert again["input_ids"] == [[*PROMPT, token_at(3), token_at(4)]] * 2
    for response in responses:
        check(response, 6)
