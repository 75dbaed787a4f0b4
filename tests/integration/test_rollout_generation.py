"""The generation client against servers on loopback that behave in every bad way."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from tests.fake_sglang import FakeSGLang, answer, token_at

from areal.engines.server_table import ServerTable
from areal.engines.sglang import GenerationFailed, Interrupted, SGLangClient
from areal.engines.sglang_protocol import ModelLimits
from areal.errors import InvalidInput, WaitTimeout
from areal.servers import InferenceServer, ServerState
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason

PROMPT = [1, 2, 3]
EOS = 199


class Observer:
    def __init__(self):
        self.done, self.kinds, self.kept = [], [], []

    def request_done(self, seconds, tokens):
        self.done.append(tokens)

    def interruption(self, kind):
        self.kinds.append(kind)

    def salvaged(self, tokens):
        self.kept.append(tokens)


@asynccontextmanager
async def serving(*servers, request_timeout_s=10.0, setup_timeout_s=1.0, context=1000):
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.running())
        table, reports = ServerTable(), []

        async def report(url, cause):
            reports.append((url, cause))

        client = SGLangClient(
            table,
            ModelLimits(vocab_size=200, context_length=context, eos_token_ids=(EOS,)),
            report=report,
            observer=Observer(),
            request_timeout_s=request_timeout_s,
            setup_timeout_s=setup_timeout_s,
        )
        client.reports, client.observer = reports, client._observer
        await client.start()
        stack.push_async_callback(client.close)
        table.update([server.listed() for server in servers])
        yield client


def empty(prompt=PROMPT):
    return LLMResponse(list(prompt), [], [], [], StopReason.ABORT)


def request(n=6, prompt=PROMPT, **more):
    return LLMRequest(list(prompt), GenerationHyperparameters(max_new_tokens=n, **more))


def check(response, n, prompt=PROMPT):
    """The very tokens and logprobs of an uninterrupted run."""
    start = len(prompt)
    assert response.output_tokens == [token_at(start + i) for i in range(n)]
    assert response.output_logprobs == pytest.approx([-(start + i) / 100 for i in range(n)])
    assert len(response.output_versions) == n


async def until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        await asyncio.sleep(0.005)


async def test_generate_when_all_is_well_then_sends_and_reads_the_protocol():
    server = FakeSGLang(version="4")
    asked = request(6, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=[5])
    async with serving(server) as client:
        response = await client.generate(asked, empty(), min_version=4)
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
        response = await client.generate(request(6, greedy=True), empty())
    assert server.requests[0]["sampling_params"]["temperature"] == 0.0
    assert response.stop_reason is StopReason.STOP
    check(response, 2)


async def test_generate_when_updated_in_place_then_each_token_keeps_its_version():
    server = FakeSGLang(version="7")
    server.behave = lambda body: answer(3, 6, "8", old=(4, "7"))
    async with serving(server) as client:
        response = await client.generate(request(6), empty(), min_version=7)
    assert response.output_versions == [7, 7, 7, 7, 8, 8]


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
        task = asyncio.create_task(client.generate(request(600), empty(), min_version=4))
        await until(lambda: client.reports)
        client.table.update([dying.listed(), good.listed()])
        response = await task
    check(response, 600)
    assert response.output_versions == [4] * kept + [6] * (600 - kept)
    assert client.observer.kept == ([kept] if kept else [])
    assert dying.requests[0]["stream"] is True
    assert dying.requests[0]["sampling_params"]["stream_interval"] == 32
    assert len(good.requests[0]["input_ids"]) == len(PROMPT) + kept
    assert good.requests[0]["sampling_params"]["max_new_tokens"] == 600 - kept


async def test_generate_when_a_streaming_server_freezes_then_its_tokens_are_kept():
    dying, good = FakeSGLang(version="4", breaks_after=[(50, "4")]), FakeSGLang(version="4")
    dying.freezes = True
    async with serving(dying, good) as client:
        client.table.update([dying.listed()])
        task = asyncio.create_task(client.generate(request(600), empty()))
        await until(lambda: dying.frozen)
        client.table.update([dying.listed(ServerState.QUARANTINED, "no answer"), good.listed()])
        check(await asyncio.wait_for(task, 2.0), 600)
    assert client.observer.kept == [50]


async def test_generate_when_a_queue_is_full_then_another_answers_and_nobody_is_blamed():
    def full(_):
        busy.behave = None
        return web.json_response({"error": {"message": "The request queue is full."}}, status=503)

    busy, other = FakeSGLang(behave=full), FakeSGLang()
    async with serving(busy, other) as client:
        client.table.update([busy.listed()])
        task = asyncio.create_task(client.generate(request(6), empty()))
        await until(lambda: busy.requests)
        check(await task, 6)  # back to the same one, a moment later
        assert len(busy.requests) == 2
        busy.behave = full
        client.table.update([busy.listed(), other.listed()])
        responses = await asyncio.gather(*[client.generate(request(6), empty()) for _ in range(20)])
    for response in responses:
        check(response, 6)
        assert response.interruptions == 0
    assert client.reports == []
    assert client.observer.kinds == ["busy", "busy"]


async def test_generate_when_aborted_then_continues_elsewhere_from_its_tokens():
    first, second = FakeSGLang(version="1", hold=True), FakeSGLang(version="2")
    async with serving(first, second) as client:
        client.table.update([first.listed()])
        task = asyncio.create_task(client.generate(request(6, min_new_tokens=4), empty()))
        await until(lambda: first.requests)
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


async def test_generate_when_server_aborts_everything_then_does_not_spin():
    server = FakeSGLang()
    server.behave = lambda body: answer(3, 0, "0", "abort")
    async with serving(server, request_timeout_s=0.5) as client:
        with pytest.raises(WaitTimeout, match="only aborts came"):
            await client.generate(request(6), empty())
    assert len(server.requests) < 12


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
        (lambda _: _with(answer(3, 6, "3"), "weight_versions", []), "cover 0 of 6"),
        (lambda _: _with(answer(3, 6, "3"), "output_token_logprobs", [[None, 1]] * 6), "unusable"),
    ],
)
async def test_generate_when_a_server_misbehaves_then_reports_it_and_another_answers(bad, cause):
    broken, good = FakeSGLang(version="3", behave=bad), FakeSGLang(version="3")
    async with serving(broken, good) as client:
        client.table.update([broken.listed()])
        task = asyncio.create_task(client.generate(request(6), empty(), min_version=3))
        await until(lambda: client.reports)
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
        responses = await asyncio.gather(*[client.generate(request(6), empty()) for _ in range(50)])
        await until(lambda: client.reports)
    for response in responses:
        check(response, 6)
    # One burst, one report.
    assert [url for url, _ in client.reports] == [dead.url]


async def test_generate_when_every_try_fails_then_all_causes_are_kept():
    servers = [
        FakeSGLang(behave=lambda _: web.Response(status=500, text="no a")),
        FakeSGLang(behave=lambda _: web.Response(status=500, text="no b")),
    ]
    async with serving(*servers, request_timeout_s=30.0, setup_timeout_s=20.0) as client:
        client.table._servers[servers[0].url].failures = -10  # short blocks: the test is quick
        client.table._servers[servers[1].url].failures = -10
        with pytest.raises(GenerationFailed) as caught:
            await client.generate(request(6), empty())
    assert "failed 8 times" in str(caught.value)
    assert "no a" in str(caught.value)
    assert "no b" in str(caught.value)
    assert caught.value.failed_server in {s.url for s in servers}


async def test_generate_when_earlier_attempts_failed_somewhere_then_goes_elsewhere():
    servers = [FakeSGLang(), FakeSGLang()]
    async with serving(*servers) as client:
        for _ in range(6):
            await client.generate(request(6), empty(), avoid=[servers[0].url])
        assert len(servers[1].requests) == 6
        client.table.update([servers[0].listed()])
        await client.generate(request(6), empty(), avoid=[servers[0].url])
        assert len(servers[0].requests) == 1


async def test_generate_when_server_hangs_and_is_quarantined_then_another_answers():
    hangs, good = FakeSGLang(hold=True), FakeSGLang()
    async with serving(hangs, good) as client:
        client.table.update([hangs.listed()])
        task = asyncio.create_task(client.generate(request(6), empty()))
        await until(lambda: hangs.requests)
        client.table.update([hangs.listed(ServerState.QUARANTINED, "no answer"), good.listed()])
        check(await asyncio.wait_for(task, 2.0), 6)
        # Weight-sync said it: no need to tell it.
        assert client.reports == []


async def test_generate_when_no_answer_in_time_then_names_the_server_and_reports_it():
    server = FakeSGLang(hold=True)
    async with serving(server, request_timeout_s=0.2) as client:
        with pytest.raises(WaitTimeout, match=rf"0\.2 s for its tokens on {server.url}"):
            await client.generate(request(6), empty())
        await until(lambda: client.reports and server.aborted)
    assert server.aborted == [server.requests[0]["rid"]]


async def test_generate_when_no_server_is_new_enough_then_waits_and_says_for_what():
    server = FakeSGLang(version="2")
    async with serving(server, setup_timeout_s=0.2) as client:
        with pytest.raises(WaitTimeout) as caught:
            await client.generate(request(6), empty(), min_version=3)
    assert "an inference server at version 3 or newer on weight-sync" in str(caught.value)
    assert f"{server.url} serving at version 2" in str(caught.value)
    assert server.requests == []


async def test_generate_when_the_version_arrives_then_starts_within_milliseconds():
    server = FakeSGLang(version="2")
    async with serving(server, setup_timeout_s=5.0) as client:
        task = asyncio.create_task(client.generate(request(6), empty(), min_version=3))
        await asyncio.sleep(0.05)
        server.version = "3"
        start = time.monotonic()
        client.table.update([server.listed()])
        response = await task
    assert time.monotonic() - start < 0.1
    assert response.output_versions == [3] * 6


async def test_generate_when_400_then_it_is_the_requests_fault():
    refusal = {"error": {"message": "max_new_tokens must be\npositive"}}
    server = FakeSGLang(behave=lambda _: web.json_response(refusal, status=400))
    async with serving(server) as client:
        with pytest.raises(
            InvalidInput, match="refuses the request: max_new_tokens must be positi"
        ):
            await client.generate(request(6), empty())
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
            await client.generate(request(n, prompt), empty(prompt))
    assert server.requests == []


async def test_generate_when_context_is_short_then_asks_for_what_fits():
    server = FakeSGLang()
    async with serving(server, context=50) as client:
        response = await client.generate(request(100, [1] * 40), empty([1] * 40))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 4  # of 50, 6 stay free
    assert response.stop_reason is StopReason.LENGTH


async def test_interrupt_when_requests_run_then_their_tokens_are_kept_and_continue_later():
    first = FakeSGLang(version="1", hold=True)
    async with serving(first) as client:
        responses = [empty() for _ in range(20)]
        tasks = [asyncio.create_task(client.generate(request(6), r)) for r in responses]
        late = empty()
        tasks.append(asyncio.create_task(client.generate(request(6), late, min_version=9)))
        await until(lambda: len(first.requests) == 20)
        await client.interrupt(5.0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, Interrupted) for r in results)
        assert sorted(first.aborted) == sorted(r["rid"] for r in first.requests)
        with pytest.raises(Interrupted):
            await client.generate(request(6), empty())
    for response in responses:
        check(response, 2)
    assert late.output_tokens == []
    second = FakeSGLang(version="2")
    async with serving(second) as client:
        response = await client.generate(request(6), responses[0])
    check(response, 6)
    assert response.output_versions == [1, 1, 2, 2, 2, 2]


async def test_interrupt_when_a_server_never_answers_then_gives_up_at_the_deadline():
    async def never(_):
        await asyncio.sleep(30)

    server = FakeSGLang(behave=lambda body: never(body))
    async with serving(server) as client:
        response = empty()
        task = asyncio.create_task(client.generate(request(6), response))
        await until(lambda: server.requests)
        start = time.monotonic()
        await client.interrupt(0.2)
        with pytest.raises(Interrupted):
            await task
        assert time.monotonic() - start < 1.0


async def test_generate_when_cancelled_then_the_server_is_told():
    server = FakeSGLang(hold=True)
    async with serving(server) as client:
        task = asyncio.create_task(client.generate(request(6), empty()))
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
            await client.generate(request(1), empty())
    rids = [r["rid"] for r in server.requests]
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]
