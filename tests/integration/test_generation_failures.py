"""The generation client against servers on loopback that behave in every bad way."""

import asyncio

import pytest
from aiohttp import web
from tests.fake_sglang import FakeSGLang, answer
from tests.integration.generation_rig import PROMPT, check, empty, generate, request, serving
from tests.waiting import until

from areal.errors import WaitTimeout
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation.client import GenerationFailed


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([(1, "4"), (40, "4"), (80, "4")], 80),
        # Which tokens the new version sampled is said in the last event only: none is guessed.
        ([(1, "4"), (40, "4"), (80, "5"), (120, "5")], 40),
        ([(1, "5"), (40, "5")], 0),
        ([], 0),
    ],
)
async def test_generate_when_a_stream_breaks_then_goes_on_elsewhere_from_its_tokens(events, kept):
    dying, good = FakeSGLang(version="4", breaks_after=events), FakeSGLang(version="6")
    async with serving(dying, good) as client:
        client.table.update([dying.listed()])
        task = asyncio.create_task(generate(client, request(600), empty(), min_version=4))
        await until(lambda: client.reports, "a report")
        client.table.update([dying.listed(), good.listed()])
        response = await task
    check(response, 600)
    assert response.output_versions == [4] * kept + [6] * (600 - kept)
    assert client.observer.kept == ([kept] if kept else [])
    assert dying.requests[0]["stream"] is True
    assert dying.requests[0]["sampling_params"]["stream_interval"] == 32
    assert len(good.requests[0]["input_ids"]) == len(PROMPT) + kept
    assert good.requests[0]["sampling_params"]["max_new_tokens"] == 600 - kept


async def test_generate_when_a_queue_is_full_then_another_answers_and_nobody_is_blamed():
    def full(_):
        busy.behave = None
        return web.json_response({"error": {"message": "The request queue is full."}}, status=503)

    busy, other = FakeSGLang(behave=full), FakeSGLang()
    async with serving(busy, other) as client:
        client.table.update([busy.listed()])
        task = asyncio.create_task(generate(client, request(6), empty()))
        await until(lambda: busy.requests)
        check(await task, 6)  # back to the same one, a moment later
        assert len(busy.requests) == 2
        busy.behave = full
        client.table.update([busy.listed(), other.listed()])
        responses = await asyncio.gather(
            *[generate(client, request(6), empty()) for _ in range(20)]
        )
    for response in responses:
        check(response, 6)
        assert response.interruptions == 0
    assert client.reports == []
    assert client.observer.kinds == ["busy", "busy"]


async def test_generate_when_server_aborts_everything_then_does_not_spin():
    server = FakeSGLang()
    server.behave = lambda body: answer(3, 0, "0", "abort")
    async with serving(server, request_timeout_s=0.5) as client:
        with pytest.raises(WaitTimeout, match="every answer was aborted"):
            await generate(client, request(6), empty())
    assert len(server.requests) < 12


@pytest.mark.parametrize("asleep_s", [60.0, 0.0])
async def test_generate_when_servers_sleep_longer_than_a_request_may_take_then_it_continues_after(
    asleep_s,
):
    server = FakeSGLang(version="4", hold=True)
    times = {"request_timeout_s": 4.0, "setup_timeout_s": 3.0, "asleep_s": asleep_s}
    async with serving(server, **times) as client:
        task = asyncio.create_task(generate(client, request(6), empty(), min_version=4))
        await until(lambda: server._held, "the request")
        client.table.update([server.listed(ServerState.SYNCING, "asleep")])
        server.abort_all()
        if not asleep_s:
            with pytest.raises(WaitTimeout, match=r"an inference server at version 4.*asleep"):
                await task
            return
        await asyncio.wait({task}, timeout=4.5)
        assert not task.done(), "neither limit counts the servers' sleep"
        server.version = "5"
        client.table.update([server.listed()])
        response = await task
    check(response, 6)
    assert response.output_versions == [4, 4, 5, 5, 5, 5]
    assert client.reports == []


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (lambda _: web.Response(status=500, text="CUDA error"), "HTTP 500: CUDA error"),
        (lambda _: web.Response(status=404), "HTTP 404"),
        (lambda _: web.Response(text="<html>"), "unusable answer"),
        (lambda _: {"output_ids": [1]}, "unusable answer"),
        (lambda _: answer(3, 6, "default"), "unusable answer"),
        (lambda _: answer(3, 6, "1"), "sampled at version 1"),
        (lambda _: answer(3, 6, "3", "unheard"), "unknown finish_reason"),
        (lambda _: answer(3, 6, "3") | {"output_ids": [1] * 6}, "do not belong"),
        (lambda _: _with(answer(3, 6, "3"), "weight_versions", []), "expected SGLang 0.5.19"),
        (lambda _: _with(answer(3, 6, "3"), "weight_versions", None), "expected SGLang 0.5.19"),
        (lambda _: _with(answer(3, 6, "3"), "output_token_logprobs", [[None, 1]] * 6), "unusable"),
    ],
)
async def test_generate_when_a_server_misbehaves_then_reports_it_and_another_answers(bad, cause):
    broken, good = FakeSGLang(version="3", behave=bad), FakeSGLang(version="3")
    async with serving(broken, good) as client:
        client.table.update([broken.listed()])
        task = asyncio.create_task(generate(client, request(6), empty(), min_version=3))
        await until(lambda: client.reports, "a report")
        client.table.update([broken.listed(), good.listed()])
        response = await task
    check(response, 6)
    assert client.reports[0][0] == broken.url
    assert cause in client.reports[0][1]
    assert good.requests[0]["input_ids"] == PROMPT


def _with(value, key, item):
    value["meta_info"][key] = item
    return value


async def test_generate_when_server_is_dead_then_another_answers():
    good = FakeSGLang()
    async with serving(good) as client:
        dead = InferenceServer("d", "http://127.0.0.1:9", ServerState.SERVING, 0)
        client.table.update([dead, good.listed()])
        responses = await asyncio.gather(
            *[generate(client, request(6), empty()) for _ in range(50)]
        )
        await until(lambda: client.reports, "a report")
    for response in responses:
        check(response, 6)
    # One burst, one report.
    assert [url for url, _ in client.reports] == [dead.url]


async def test_generate_when_a_server_answers_between_two_failures_then_both_block_it_as_briefly():
    """A server that fails now and then is not one that fails in a row."""
    outcomes = iter(["fails", "answers", "fails", "answers"])
    server = FakeSGLang(
        behave=lambda _: web.Response(status=500) if next(outcomes) == "fails" else None
    )
    async with serving(server, setup_timeout_s=30.0) as client:
        failures, failed = [], client.table.failed

        def counted(blocked):
            news = failed(blocked)
            failures.append(blocked.failures)
            return news

        client.table.failed = counted
        for _ in range(2):  # each fails, and is answered by the same one a moment later
            check(await generate(client, request(6), empty()), 6)
    assert failures == [1, 1]


async def test_generate_when_every_try_fails_then_all_causes_are_kept():
    servers = [
        FakeSGLang(behave=lambda _: web.Response(status=500, text="no a")),
        FakeSGLang(behave=lambda _: web.Response(status=500, text="no b")),
    ]
    async with serving(*servers, request_timeout_s=30.0, setup_timeout_s=20.0) as client:
        client.table._servers[servers[0].url].failures = -10  # short blocks: the test is quick
        client.table._servers[servers[1].url].failures = -10
        with pytest.raises(GenerationFailed) as caught:
            await generate(client, request(6), empty())
    assert "failed 8 times" in str(caught.value)
    assert "no a" in str(caught.value)
    assert "no b" in str(caught.value)
    assert caught.value.failed_server in {s.url for s in servers}


async def test_generate_when_earlier_attempts_failed_somewhere_then_goes_elsewhere():
    servers = [FakeSGLang(), FakeSGLang()]
    async with serving(*servers) as client:
        for _ in range(6):
            await generate(client, request(6), empty(), avoid=[servers[0].url])
        assert len(servers[1].requests) == 6
        client.table.update([servers[0].listed()])
        await generate(client, request(6), empty(), avoid=[servers[0].url])
        assert len(servers[0].requests) == 1


async def test_generate_when_server_hangs_and_is_quarantined_then_another_answers():
    hangs, good = FakeSGLang(hold=True), FakeSGLang()
    async with serving(hangs, good) as client:
        client.table.update([hangs.listed()])
        task = asyncio.create_task(generate(client, request(6), empty()))
        await until(lambda: hangs.requests)
        client.table.update([hangs.listed(ServerState.QUARANTINED, "no answer"), good.listed()])
        check(await asyncio.wait_for(task, 30.0), 6)
        # Weight-sync said it: no need to tell it.
        assert client.reports == []


async def test_generate_when_no_answer_in_time_then_names_the_server_and_reports_it():
    server = FakeSGLang(hold=True)
    async with serving(server, request_timeout_s=0.2) as client:
        with pytest.raises(WaitTimeout, match=rf"0\.2 s for its tokens on {server.url}"):
            await generate(client, request(6), empty())
        await until(lambda: client.reports and server.aborted)
    assert server.aborted == [server.requests[0]["rid"]]
