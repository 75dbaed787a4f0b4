"""The generation client on servers that do as they should: protocol, versions, interruption."""

import asyncio
import time
from dataclasses import replace

import pytest
from aiohttp import web
from tests.fake_sglang import FakeSGLang, answer, token_at
from tests.integration.generation_rig import EOS, PROMPT, check, empty, generate, request, serving
from tests.waiting import until

from areal.errors import InvalidInput, WaitTimeout
from areal.types import StopReason
from areal.weights.servers import ServerState
from areal_rollout.generation.client import Interrupted


async def test_generate_when_all_is_well_then_sends_and_reads_the_protocol():
    server = FakeSGLang(version="4")
    asked = request(6, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=[5])
    async with serving(server) as client:
        response = await generate(client, asked, empty(), min_version=4)
    check(response, 6)
    assert response.output_versions == [4] * 6
    assert response.stop_reason is StopReason.LENGTH
    assert response.interruptions == 0
    [body] = server.requests
    assert body["input_ids"] == PROMPT
    assert body["extra_key"] == "4"
    assert body["return_logprob"] is True
    assert body["stream"] is False
    assert body["sampling_params"] == {
        "max_new_tokens": 6,
        "min_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "stop_token_ids": [5, EOS],
    }
    assert client.observer.done == [6]


async def test_generate_when_greedy_then_temperature_is_zero_and_stop_is_read():
    server = FakeSGLang()
    server.behave = lambda body: answer(3, 2, "0", "stop")
    async with serving(server) as client:
        response = await generate(client, request(6, greedy=True), empty())
    assert server.requests[0]["sampling_params"]["temperature"] == 0.0
    assert response.stop_reason is StopReason.STOP
    check(response, 2)


async def test_generate_when_updated_in_place_then_each_token_keeps_its_version():
    server = FakeSGLang(version="7")
    server.behave = lambda body: answer(3, 6, "8", old=(4, "7"))
    async with serving(server) as client:
        response = await generate(client, request(6), empty(), min_version=7)
    assert response.output_versions == [7, 7, 7, 7, 8, 8]


async def test_generate_when_a_streaming_server_freezes_then_its_tokens_are_kept():
    dying, good = FakeSGLang(version="4", breaks_after=[(50, "4")]), FakeSGLang(version="4")
    dying.freezes = True
    async with serving(dying, good) as client:
        client.table.update([dying.listed()])
        heard: list[int] = []
        asked = replace(request(600), on_tokens=lambda _, ids: heard.append(len(ids)))
        task = asyncio.create_task(generate(client, asked, empty()))
        await until(lambda: 50 in heard)  # what the server has sent may not have arrived
        client.table.update([dying.listed(ServerState.QUARANTINED, "no answer"), good.listed()])
        check(await asyncio.wait_for(task, 30.0), 600)
    assert client.observer.kept == [50]


async def test_generate_when_aborted_then_continues_elsewhere_from_its_tokens():
    first, second = FakeSGLang(version="1", hold=True), FakeSGLang(version="2")
    async with serving(first, second) as client:
        client.table.update([first.listed()])
        task = asyncio.create_task(generate(client, request(6, min_new_tokens=4), empty()))
        await until(lambda: first._held)
        client.table.update([first.listed(ServerState.DRAINING), second.listed()])
        first.abort_all()
        response = await task
    check(response, 6)
    assert response.output_versions == [1, 1, 2, 2, 2, 2]
    assert response.interruptions == 1
    assert second.requests[0]["input_ids"] == [*PROMPT, token_at(3), token_at(4)]
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 4
    assert second.requests[0]["sampling_params"]["min_new_tokens"] == 2
    assert client.reports == []


async def test_generate_when_it_has_a_grammar_and_is_aborted_then_begins_anew():
    """No server can begin in the middle of a grammar."""
    first, second = FakeSGLang(version="1", hold=True), FakeSGLang(version="2")
    async with serving(first, second) as client:
        client.table.update([first.listed()])
        asked = replace(request(6), grammar='{"type": "structural_tag"}')
        task = asyncio.create_task(generate(client, asked, empty()))
        await until(lambda: first._held)
        client.table.update([first.listed(ServerState.DRAINING), second.listed()])
        first.abort_all()
        response = await task
    check(response, 6)
    assert (response.output_versions, response.interruptions) == ([2] * 6, 1)
    for server in (first, second):
        assert server.requests[0]["input_ids"] == PROMPT
        assert server.requests[0]["sampling_params"]["structural_tag"] == asked.grammar
        assert server.requests[0]["sampling_params"]["max_new_tokens"] == 6


async def test_generate_when_no_server_is_new_enough_then_waits_and_says_for_what():
    server = FakeSGLang(version="2")
    async with serving(server, setup_timeout_s=0.2) as client:
        with pytest.raises(WaitTimeout) as caught:
            await generate(client, request(6), empty(), min_version=3)
    assert "an inference server at version 3 or newer on weight-sync" in str(caught.value)
    assert f"{server.url} serving at version 2" in str(caught.value)
    assert server.requests == []


async def test_generate_when_the_version_arrives_then_starts_within_milliseconds():
    server = FakeSGLang(version="2")
    async with serving(server, setup_timeout_s=5.0) as client:
        took = []
        for version in (3, 4, 5):
            task = asyncio.create_task(generate(client, request(6), empty(), min_version=version))
            await asyncio.sleep(0.02)
            server.version = str(version)
            start = time.monotonic()
            client.table.update([server.listed()])
            response = await task
            took.append(time.monotonic() - start)
            assert response.output_versions == [version] * 6
    # A busy machine may take one or two of the turns away.
    assert min(took) < 0.1, took


async def test_generate_when_400_then_it_is_the_requests_fault():
    refusal = {"error": {"message": "max_new_tokens must be\npositive"}}
    server = FakeSGLang(behave=lambda _: web.json_response(refusal, status=400))
    async with serving(server) as client:
        with pytest.raises(
            InvalidInput, match="refuses the request: max_new_tokens must be positi"
        ):
            await generate(client, request(6), empty())
    assert client.reports == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "no grammar", "code": 400}},
        {
            "output_ids": [],
            "meta_info": {
                "finish_reason": {"type": "abort", "message": "no grammar", "status_code": 400}
            },
        },
    ],
)
async def test_generate_when_refused_within_a_stream_then_it_is_the_requests_fault(refusal):
    server = FakeSGLang(behave=lambda _: refusal)
    async with serving(server) as client:
        with pytest.raises(InvalidInput, match="refuses the request: no grammar"):
            await generate(client, request(600), empty())
    assert client.reports == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("prompt", "n", "message"),
    [
        ([], 6, "input_ids: empty"),
        ([1, 200], 6, r"token id 200 is outside 0\.\.199"),
        ([1, -1], 6, r"token id -1 is outside"),
        ([1] * 44, 6, "a prompt of 44 tokens leaves no room in a context of 50"),
        ([1], 0, "max_new_tokens 0"),
    ],
)
async def test_generate_when_the_request_is_wrong_then_no_server_sees_it(prompt, n, message):
    server = FakeSGLang()
    async with serving(server, context=50) as client:
        with pytest.raises(InvalidInput, match=message):
            await generate(client, request(n, prompt), empty(prompt))
    assert server.requests == []


async def test_generate_when_context_is_short_then_asks_for_what_fits():
    server = FakeSGLang()
    async with serving(server, context=50) as client:
        response = await generate(client, request(100, [1] * 40), empty([1] * 40))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 4  # of 50, 6 stay free
    assert response.stop_reason is StopReason.LENGTH


async def test_interrupt_when_requests_run_then_their_tokens_are_kept_and_continue_later():
    first = FakeSGLang(version="1", hold=True)
    async with serving(first) as client:
        responses = [empty() for _ in range(20)]
        tasks = [asyncio.create_task(generate(client, request(6), r)) for r in responses]
        late = empty()
        tasks.append(asyncio.create_task(generate(client, request(6), late, min_version=9)))
        await until(lambda: len(first.requests) == 20)
        await client.interrupt(5.0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, Interrupted) for r in results)
        assert sorted(first.aborted) == sorted(r["rid"] for r in first.requests)
        with pytest.raises(Interrupted):
            await generate(client, request(6), empty())
    for response in responses:
        check(response, 2)
    assert late.output_tokens == []
    second = FakeSGLang(version="2")
    async with serving(second) as client:
        response = await generate(client, request(6), responses[0])
    check(response, 6)
    assert response.output_versions == [1, 1, 2, 2, 2, 2]


async def test_interrupt_when_a_server_never_answers_then_gives_up_at_the_deadline():
    async def never(_):
        await asyncio.sleep(30)

    server = FakeSGLang(behave=lambda body: never(body))
    async with serving(server) as client:
        response = empty()
        task = asyncio.create_task(generate(client, request(6), response))
        await until(lambda: server.requests)
        start = time.monotonic()
        await client.interrupt(0.2)
        with pytest.raises(Interrupted):
            await task
        assert time.monotonic() - start < 20.0, "the server would have taken 30 s"


async def test_generate_when_cancelled_then_the_server_is_told():
    server = FakeSGLang(hold=True)
    async with serving(server) as client:
        task = asyncio.create_task(generate(client, request(6), empty()))
        await until(lambda: server.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.aborted)
        assert client.table.choose(0, "", 1).outstanding == 0


async def test_generate_when_many_run_then_no_id_begins_another():
    """SGLang aborts by prefix: aborting ...-1 would end ...-10 too."""
    server = FakeSGLang()
    async with serving(server) as client:
        for _ in range(12):
            await generate(client, request(1), empty())
    rids = [r["rid"] for r in server.requests]
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]
