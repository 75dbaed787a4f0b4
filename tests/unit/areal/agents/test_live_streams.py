"""Text reaches a client while it is sampled; what is recorded is the same as without a stream."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import openai
import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving
from tests.waiting import until

from areal.errors import Unavailable

ASK = [{"role": "user", "content": "What is 12 and 34?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
TEXT = 'I add, été 1 < 2.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\n12 < 34\n</think>\n\n46."


async def chat(url, key, said):
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as llm:
        stream = await llm.chat.completions.create(
            model="any", messages=ASK, tools=[tool], stream=True
        )
        async for chunk in stream:
            delta = chunk.choices[0].delta
            said.append(("reasoning", getattr(delta, "reasoning_content", None) or ""))
            said.append(("content", delta.content or ""))
            said += [("call", call.function.arguments) for call in delta.tool_calls or []]


async def responses(url, key, said):
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    asked = {"model": "any", "input": ASK, "tools": [tool]}
    async with (
        openai.AsyncOpenAI(base_url=url, api_key=key) as llm,
        llm.responses.stream(**asked) as stream,
    ):
        async for event in stream:
            kind = {
                "response.reasoning_text.delta": "reasoning",
                "response.output_text.delta": "content",
                "response.function_call_arguments.delta": "call",
            }.get(event.type)
            if kind is not None:
                said.append((kind, event.delta))
        answer = await stream.get_final_response()
    told = "".join(text for kind, text in said if kind == "content")
    assert answer.output_text == told


async def messages(url, key, said):
    tool = {"name": "add", "input_schema": PARAMETERS}
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=key) as llm,
        llm.messages.stream(model="any", max_tokens=300, messages=ASK, tools=[tool]) as stream,
    ):
        async for event in stream:
            if event.type == "content_block_delta":
                for kind, name in (("reasoning", "thinking"), ("content", "text")):
                    said.append((kind, getattr(event.delta, name, "") or ""))
                said.append(("call", getattr(event.delta, "partial_json", "") or ""))


async def completions(url, key, said):
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as llm:
        stream = await llm.completions.create(model="any", prompt="12 and 34", stream=True)
        async for chunk in stream:
            said.append(("content", chunk.choices[0].text))


def joined(said, kind):
    return "".join(text for each, text in said if each == kind)


@pytest.mark.parametrize("drive", [chat, responses, messages])
@pytest.mark.parametrize("text", [TEXT, THOUGHT])
async def test_stream_when_sampled_then_its_words_come_before_its_end(drive, text):
    scripted = Scripted(text, family="qwen3")
    said, early, gate = [], [], asyncio.Event()

    async def step(_, end):
        if end == len(scripted.sampled[0].output_tokens) - 1:
            early.append(True)
            await gate.wait()

    scripted.step = step
    async with serving(scripted) as (url, key, _, calls):
        reading = asyncio.create_task(drive(url, key, said))
        await until(lambda: early and joined(said, "content"))
        assert not reading.done()
        assert joined(said, "call") == ""
        assert "<" not in joined(said, "content").replace("1 < 2", "")
        gate.set()
        await reading
    if text is TEXT:
        assert joined(said, "content") == "I add, été 1 < 2."
        assert joined(said, "call").replace(" ", "") == '{"a":1}'
    else:
        assert (joined(said, "reasoning"), joined(said, "content")) == ("12 < 34", "46.")
    check_exact(calls, scripted, chains=[[0]])


async def test_completion_when_streamed_then_each_part_once():
    scripted = Scripted(" 46, été \n")
    scripted.step = lambda *_: asyncio.sleep(0)
    said = []
    async with serving(scripted) as (url, key, *_):
        await completions(url, key, said)
    assert joined(said, "content") == " 46, été \n"
    assert len(said) > 2


@pytest.mark.parametrize("drive", [chat, responses, messages, completions])
async def test_stream_when_the_client_hangs_up_then_the_generation_stops(drive):
    scripted = Scripted("The answer is 46.")
    stopped = asyncio.Event()

    async def step(*_):
        try:
            await asyncio.sleep(0 if len(said) < 1 else 60)
        except asyncio.CancelledError:
            stopped.set()
            raise

    said, scripted.step = [], step
    async with serving(scripted) as (url, key, _, calls):
        reading = asyncio.create_task(drive(url, key, said))
        await until(lambda: said)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(60):
            await stopped.wait()
    assert [call.response.output_tokens for call in calls._calls] == [[]]


@pytest.mark.parametrize("drive", [chat, responses])
async def test_stream_when_it_fails_midway_then_its_last_event_is_the_error(drive):
    scripted = Scripted("The answer is 46.")
    said = []

    async def step(_, end):
        if end > 3:
            raise Unavailable("the server went away")

    scripted.step = step
    async with serving(scripted) as (url, key, session, _):
        with pytest.raises((openai.APIError, httpx.HTTPError), match="went away"):
            await drive(url, key, said)
        assert session.failure is not None
