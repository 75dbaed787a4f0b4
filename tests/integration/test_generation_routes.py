"""The experts that servers chose, through continued, broken and shared answers."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.fake_sglang import FakeSGLang, answer, route_at, routed
from tests.integration.generation_rig import PROMPT, check, empty, generate, request, serving
from tests.waiting import until

from areal.model_directory import RouteShape
from areal.types import LLMRequest
from areal_rollout.generation.routes import RouteReader

SHAPE, OTHER = (3, 2, 8), (3, 2, 5)
ASKED = RouteShape(*SHAPE)


def expected(tokens, of=lambda position: SHAPE):
    """The experts of the first tokens; those of a token in a layer in ascending order."""
    return np.sort([route_at(position, of(position)) for position in range(tokens)], axis=-1)


async def test_routes_when_a_server_says_them_then_the_answer_has_them_in_a_byte_each():
    server = FakeSGLang(routes=SHAPE)
    async with serving(server, routes=ASKED) as client:
        found = await generate(client, request(6), empty())
    check(found, 6)
    assert found.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(found.routed_experts, expected(len(PROMPT) + 5))
    assert server.requests[0]["return_routed_experts"] is True


async def test_routes_when_the_model_has_no_experts_then_none_are_asked_for():
    server = FakeSGLang(routes=SHAPE)
    async with serving(server) as client:
        found = await generate(client, request(6), empty())
    assert found.routed_experts is None
    assert "return_routed_experts" not in server.requests[0]


async def test_routes_when_an_answer_is_continued_then_each_token_has_those_that_sampled_it():
    def behave(body):
        first = len(server.requests) == 1
        tokens = len(body["input_ids"])
        part = answer(tokens, 2 if first else 4, "0", "abort" if first else "length")
        chosen = routed(body, tokens + len(part["output_ids"]), SHAPE if first else OTHER)
        part["meta_info"]["routed_experts"] = chosen
        return part

    server = FakeSGLang(behave=behave)
    async with serving(server, routes=ASKED) as client:
        response = await generate(client, request(6), empty())
    check(response, 6)
    known = len(PROMPT) + 2 - 1  # the last token of a part has none yet
    assert [each["routed_experts_start_len"] for each in server.requests] == [0, known]
    wanted = expected(len(PROMPT) + 5, lambda at: SHAPE if at < known else OTHER)
    np.testing.assert_array_equal(response.routed_experts, wanted)


async def test_routes_when_a_stream_breaks_then_the_next_call_asks_for_what_is_missing():
    broken = FakeSGLang(routes=SHAPE, breaks_after=[(40, "0")])
    whole = FakeSGLang(routes=SHAPE)
    async with serving(broken, routes=ASKED) as client, whole.running():
        response = empty()
        running = asyncio.create_task(generate(client, request(300), response))
        await until(lambda: broken.requests)
        client.table.update([broken.listed(), whole.listed()])
        await running
    check(response, 300)
    assert len(whole.requests[0]["input_ids"]) == len(PROMPT) + 40  # the tokens were kept
    assert whole.requests[0]["routed_experts_start_len"] == 0
    np.testing.assert_array_equal(response.routed_experts, expected(len(PROMPT) + 299))


async def test_routes_when_a_group_is_asked_for_then_each_answer_has_its_own():
    server = FakeSGLang(routes=SHAPE)
    async with serving(server, routes=ASKED) as client:
        responses = [empty(), empty()]
        await client.generate(request(4), responses)
    for response in responses:
        np.testing.assert_array_equal(response.routed_experts, expected(len(PROMPT) + 3))


@pytest.mark.parametrize("value", [7, "", "AAAA", "ÿ", [[1]], {"a": 1}, True])
async def test_routes_when_they_are_malformed_then_the_answer_is_good_and_one_line_says_so(value):
    def behave(body):
        good = answer(len(PROMPT), 6, "0")
        good["meta_info"]["routed_experts"] = value
        return good

    with capture_logs() as logs:
        async with serving(FakeSGLang(behave=behave), routes=ASKED) as client:
            for _ in range(3):
                found = await generate(client, request(6), empty())
                check(found, 6)
                assert found.routed_experts is None
    assert [each["event"] for each in logs].count("routes_missing") == 1
    assert client.reports == []


async def test_routes_when_the_answers_might_be_too_long_then_none_are_asked_for():
    server = FakeSGLang(routes=SHAPE)
    with capture_logs() as logs:
        async with serving(server, routes=RouteShape(60_000, 100, 8), context=10_000) as client:
            found = await generate(client, request(6), empty())
    check(found, 6)
    assert "return_routed_experts" not in server.requests[0]
    assert "max_new_tokens" in next(e["cause"] for e in logs if e["event"] == "routes_missing")


async def test_routes_when_the_prompt_has_images_then_none_are_asked_for():
    server = FakeSGLang(routes=SHAPE)
    plain = request(6)
    seeing = LLMRequest(plain.input_ids, plain.gconfig, images=(b"\x89PNG\r\n\x1a\n",))
    async with serving(server, routes=ASKED) as client:
        await generate(client, seeing, empty())
    assert "return_routed_experts" not in server.requests[0]


LONG = (60, 8, 256)
"""Routes of 600 tokens take 1.5 MB."""


@pytest.fixture
def reading(monkeypatch):
    """Routes are read once the loop says so, which it can while it is not blocked."""
    begun, released = threading.Event(), threading.Event()
    plain = RouteReader._decoded

    def decoded(self, value, rows):
        begun.set()
        assert released.wait(30.0), "the event loop is blocked while routes are read"
        return plain(self, value, rows)

    monkeypatch.setattr(RouteReader, "_decoded", decoded)
    yield begun, released
    released.set()


@pytest.mark.parametrize("streamed", [False, True])
async def test_routes_when_they_are_large_then_the_loop_serves_others_while_they_are_read(
    reading, streamed
):
    begun, released = reading
    asked = replace(request(600), on_tokens=(lambda index, tokens: None) if streamed else None)
    async with serving(FakeSGLang(routes=LONG), routes=RouteShape(*LONG)) as client:
        running = asyncio.create_task(generate(client, asked, empty()))
        await until(begun.is_set, "routes that are read", 30.0)
        released.set()
        response = await running
    check(response, 600)
    wanted = expected(len(PROMPT) + 599, lambda position: LONG)
    np.testing.assert_array_equal(response.routed_experts, wanted)


async def test_routes_when_their_call_is_cancelled_while_they_are_read_then_nothing_is_appended(
    reading,
):
    begun, released = reading
    response = empty()
    async with serving(FakeSGLang(routes=LONG), routes=RouteShape(*LONG)) as client:
        running = asyncio.create_task(generate(client, request(600), response))
        await until(begun.is_set, "routes that are read", 30.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        released.set()
        await asyncio.get_running_loop().shutdown_default_executor()  # the thread has ended
    assert response == empty()
    assert response.routed_experts is None
