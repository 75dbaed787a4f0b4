"""The `anthropic` package drives sessions; what they come to are the ids that were sampled."""

from __future__ import annotations

import anthropic
import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.errors import CapacityExceeded

ASK = {"role": "user", "content": "What is 12 and 34?"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def client(base_url, key, **options):
    # The SDK appends /v1/messages.
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=key, **options)


def options(**more):
    return {"model": "any", "max_tokens": 300, "system": "Be brief.", **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_when_called_then_read_back_and_extended(stream):
    scripted = Scripted(CALL, "46.", "Yes.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:

        async def ask(messages):
            if not stream:
                return await llm.messages.create(**options(messages=messages, tools=[ADD]))
            async with llm.messages.stream(**options(messages=messages, tools=[ADD])) as events:
                return await events.get_final_message()

        first = await ask([ASK])
        words, use = first.content
        assert (words.text, use.name, use.input) == ("I add.", "add", {"a": 1})
        assert first.stop_reason == "tool_use"
        assert first.usage.output_tokens == len(scripted.sampled[0].output_tokens)
        if not stream:
            assert first.usage.input_tokens == len(scripted.sampled[0].input_tokens)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "46"}
        history = [ASK, {"role": "assistant", "content": first.content}]
        history += [{"role": "user", "content": [result]}]
        second = await ask(history)
        assert (second.content[0].text, second.stop_reason) == ("46.", "end_turn")
        reminder = {"role": "system", "content": "Still be brief."}  # as Claude Code sends them
        await ask([*history, {"role": "assistant", "content": "46."}, ASK, reminder])
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1, 2]])
    text = scripted.tokenizer.decode(trajectory.input_ids.tolist())
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert text.count("<tool_response>\n46\n</tool_response>") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_thought_when_sampled_then_a_block_of_its_own_and_its_ids_stay(stream):
    scripted = Scripted("<think>\n12+34\n</think>\n\n46.", "Yes.", family="qwen3")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        if stream:
            async with llm.messages.stream(**options(messages=[ASK])) as events:
                first = await events.get_final_message()
        else:
            first = await llm.messages.create(**options(messages=[ASK]))
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert first.content[0].thinking == "12+34"
        history = [ASK, {"role": "assistant", "content": first.content}, ASK]
        await llm.messages.create(**options(messages=history))
    check_exact(calls, scripted, chains=[[0, 1]])


async def test_stop_when_reached_then_named():
    scripted = Scripted("46. STOP and more", "The answer is 46, the sum")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        cut = await llm.messages.create(**options(messages=[ASK], stop_sequences=["STOP"]))
        assert (cut.content[0].text, cut.stop_reason) == ("46.", "stop_sequence")
        assert cut.stop_sequence == "STOP"
        short = await llm.messages.create(**{**options(messages=[ASK]), "max_tokens": 3})
        assert short.stop_reason == "max_tokens"


async def test_server_when_full_then_the_sdk_asks_again():
    scripted = Scripted("46.")
    scripted.errors = [CapacityExceeded("full; try again in 1 s")]
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        await llm.messages.create(**options(messages=[ASK]))
    assert calls.merged(1.0).orphans == [0]


async def test_request_when_it_cannot_be_done_then_an_error_of_this_api():
    async with serving(Scripted()) as (url, key, *_), client(url, key) as llm:
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        messages = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError) as caught:
            await llm.messages.create(**options(messages=messages))
    assert caught.value.body["type"] == "error"
    said = "messages[0].content[0]: a part of type 'image': expected text"
    assert caught.value.body["error"]["message"] == said
