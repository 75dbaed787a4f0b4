"""The `openai` package drives sessions; what they come to are the ids that were sampled."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving
from tests.waiting import until

from areal.errors import CapacityExceeded, Unavailable

ASK = {"role": "user", "content": "What is 12 and 34?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALLS = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"b": "ö"}, "name": "add"}\n</tool_call>'
)


def client(base_url, key, **options):
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, **options)


async def collect(stream):
    """(content, tool calls, finish reason, usage) of a stream with one choice."""
    content, calls, reason, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    return content, list(calls.values()), reason, usage


async def test_chat_when_turns_follow_then_one_trajectory_of_the_sampled_ids():
    nasty = [300, 17, 301, 88, 5]  # not how the tokenizer would write their text
    scripted = Scripted("46.", nasty, "  Yes\n")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        messages = [ASK]
        for _ in range(3):
            answer = await llm.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
        assert answer.choices[0].message.content == "Yes"
        assert answer.choices[0].finish_reason == "stop"
        sampled = scripted.sampled[2]
        assert answer.usage.prompt_tokens == len(sampled.input_tokens)
        assert answer.usage.completion_tokens == len(sampled.output_tokens)
    check_exact(calls, scripted, chains=[[0, 1, 2]])


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_when_called_in_parallel_then_read_back_and_extended(family, stream):
    scripted = Scripted(CALLS, "46.", family=family)
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        options = {"model": "any", "tools": [ADD], "stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        answer = await llm.chat.completions.create(messages=[ASK], **options)
        if stream:
            content, asked, reason, usage = await collect(answer)
        else:
            [choice] = answer.choices
            content, reason, usage = choice.message.content, choice.finish_reason, answer.usage
            asked = [
                {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
                for c in choice.message.tool_calls
            ]
        assert (content, reason) == ("I add.", "tool_calls")
        assert [json.loads(call["arguments"]) for call in asked] == [{"a": 1}, {"b": "ö"}]
        assert len({call["id"] for call in asked}) == 2
        assert usage.completion_tokens == len(scripted.sampled[0].output_tokens)
        said = {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in asked
            ],
        }
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "46"} for call in asked]
        await llm.chat.completions.create(model="any", messages=[ASK, said, *results], tools=[ADD])
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1]])
    text = scripted.tokenizer.decode(trajectory.input_ids.tolist())
    assert text.count("<tool_response>\n46\n</tool_response>") == 2


async def test_stream_when_read_then_its_words_are_those_of_the_ids():
    scripted = Scripted("The answer is 46.", "Yes.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        stream = await llm.chat.completions.create(
            model="any", messages=[ASK], stream=True, logprobs=True
        )
        content, _, reason, usage = await collect(stream)
        assert (content, reason, usage) == ("The answer is 46.", "stop", None)
        messages = [ASK, {"role": "assistant", "content": content}, ASK]
        await llm.chat.completions.create(model="any", messages=messages)
    check_exact(calls, scripted, chains=[[0, 1]])


async def test_history_when_rewritten_by_the_agent_then_a_branch_of_its_own():
    scripted = Scripted("46.", "Yes.", "No.", "Done.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:

        async def ask(*messages):
            answer = await llm.chat.completions.create(model="any", messages=list(messages))
            return answer.choices[0].message

        first = await ask(ASK)
        second = await ask(ASK, first, ASK)
        summary = {"role": "user", "content": "Summary: 12 and 34 are 46."}
        await ask(summary)  # compaction
        await ask(ASK, first, ASK, second, ASK)  # the first history continues
    check_exact(calls, scripted, chains=[[0, 1, 3], [2]])


async def test_n_when_several_are_asked_for_then_each_continues_by_itself():
    scripted = Scripted("46.", "47.", "48.", "Yes.", "No.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.chat.completions.create(model="any", messages=[ASK], n=3)
        assert [choice.message.content for choice in answer.choices] == ["46.", "47.", "48."]
        for choice in (answer.choices[2], answer.choices[0]):
            await llm.chat.completions.create(model="any", messages=[ASK, choice.message, ASK])
    check_exact(calls, scripted, chains=[[0, 4], [1], [2, 3]])


async def test_sampling_when_the_agent_sets_it_then_the_session_decides():
    scripted = Scripted("46.")
    async with serving(scripted, temperature=0.9) as (url, key, *_), client(url, key) as llm:
        await llm.chat.completions.create(
            model="gpt-4o", messages=[ASK], temperature=0.1, top_p=0.5, seed=7, max_tokens=9
        )
    [request] = scripted.requests
    assert (request.gconfig.temperature, request.gconfig.top_p) == (0.9, 1.0)
    assert (request.gconfig.max_new_tokens, request.affinity_key) == (9, "s0")


async def test_max_tokens_when_reached_then_length_and_the_bridge_ends_the_answer():
    scripted = Scripted("The answer is 46, the sum of 12 and 34.", "Yes.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.chat.completions.create(
            model="any", messages=[ASK], max_completion_tokens=3
        )
        [choice] = answer.choices
        assert choice.finish_reason == "length"
        await llm.chat.completions.create(model="any", messages=[ASK, choice.message, ASK])
    check_exact(calls, scripted, chains=[[0, 1]])


async def test_stop_when_sampled_then_the_answer_ends_with_the_token_that_completes_it():
    scripted = Scripted("The answer is 46. Observation: hm", "Yes.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.chat.completions.create(
            model="any", messages=[ASK], stop=["Observation:", "zzz"]
        )
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("The answer is 46.", "stop")
        await llm.chat.completions.create(model="any", messages=[ASK, choice.message, ASK])
    merged = calls.merged(1.0)
    whole = scripted.sampled[0].output_tokens
    first = scripted.requests[1].input_ids[len(scripted.requests[0].input_ids) :]
    kept = next(i for i, pair in enumerate(zip(first, whole, strict=False)) if pair[0] != pair[1])
    text = scripted.tokenizer.decode(whole[:kept])
    assert "Observation:" in text
    assert "Observation:" not in scripted.tokenizer.decode(whole[: kept - 1])
    assert merged.chains == [[0, 1]]
    trained = merged.trajectories[0].input_ids[merged.trajectories[0].loss_mask].tolist()
    assert trained == whole[:kept] + scripted.sampled[1].output_tokens


async def test_reasoning_when_sampled_then_apart_and_its_ids_stay():
    scripted = Scripted("<think>\n12+34\n</think>\n\n46.", "Yes.", family="qwen3")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.chat.completions.create(model="any", messages=[ASK])
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("46.", "12+34")
        said = {"role": "assistant", "content": "46."}  # without the thought, as agents do
        await llm.chat.completions.create(model="any", messages=[ASK, said, ASK])
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1]])
    assert "12+34" in scripted.tokenizer.decode(trajectory.input_ids.tolist())


async def test_logprobs_and_ids_when_asked_for_then_those_of_the_sampler():
    scripted = Scripted("46 and ö.")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        answer = await llm.chat.completions.create(
            model="any", messages=[ASK], logprobs=True, extra_body={"return_token_ids": True}
        )
    [sampled] = scripted.sampled
    [choice] = answer.choices
    assert [entry.logprob for entry in choice.logprobs.content] == sampled.output_logprobs
    assert choice.token_ids == sampled.output_tokens
    assert answer.prompt_token_ids == sampled.input_tokens


async def test_completions_when_text_or_ids_then_answered_and_extended_by_ids():
    scripted = Scripted([260, 261, 262], "Yes.", "No.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        first = await llm.completions.create(model="any", prompt="12 and 34", max_tokens=3)
        assert first.choices[0].text == scripted.tokenizer.decode([260, 261, 262])
        assert first.choices[0].finish_reason == "length"
        prompt = [*scripted.requests[0].input_ids, 260, 261, 262, 40]
        await llm.completions.create(model="any", prompt=prompt, logprobs=1)
        stream = await llm.completions.create(model="any", prompt=[40, 41], stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "No."
    check_exact(calls, scripted, chains=[[0, 1], [2]])


async def test_models_when_listed_then_the_one_there_is():
    async with serving(Scripted()) as (url, key, *_), client(url, key) as llm:
        assert [model.id async for model in llm.models.list()] == ["areal"]


async def test_server_when_away_then_the_sdk_asks_again_and_nothing_is_twice():
    scripted = Scripted("46.", "Yes.")
    scripted.errors = [Unavailable("no server"), CapacityExceeded("full; try again in 1 s")]
    async with serving(scripted) as (url, key, session, calls), client(url, key) as llm:
        answer = await llm.chat.completions.create(model="any", messages=[ASK])
        assert session.failure is None
        messages = [ASK, answer.choices[0].message, ASK]
        await llm.chat.completions.create(model="any", messages=messages)
        merged = calls.merged(1.0)
    assert (merged.orphans, merged.chains) == ([0, 1], [[2, 3]])


async def test_retry_when_the_client_gave_up_waiting_then_one_answer_counts():
    scripted = Scripted("46.", "Yes.")
    scripted.hold = asyncio.Event()
    async with serving(scripted) as (url, key, _, calls):
        async with client(url, key, timeout=1.0, max_retries=1) as llm:
            answer = await llm.chat.completions.create(model="any", messages=[ASK])
        assert answer.choices[0].message.content == "46."
        await until(lambda: scripted.cancelled == 1)  # the model stops for the lost call
        merged = calls.merged(1.0)
    assert (merged.orphans, merged.chains) == ([0], [[1]])


async def test_reward_when_posted_then_for_all_or_for_one_answer():
    scripted = Scripted("46.", "Yes.")
    async with serving(scripted) as (url, key, session, calls), client(url, key) as llm:
        first = await llm.chat.completions.create(model="any", messages=[ASK])
        messages = [ASK, first.choices[0].message, ASK]
        await llm.chat.completions.create(model="any", messages=messages)
        await llm.post("/reward", body={"reward": 0.25, "completion_id": first.id}, cast_to=object)
        await llm.post("/reward", body={"reward": 1}, cast_to=object)
        body = {"reward": 1, "completion_id": "chatcmpl-s0-9"}
        with pytest.raises(openai.NotFoundError, match="the session has only 2"):
            await llm.post("/reward", body=body, cast_to=object)
        [trajectory] = calls.merged(session.calls.outcome).trajectories
    assert [r for r in trajectory.rewards.tolist() if r] == [0.25, 1.0]


@pytest.mark.parametrize(
    "known",
    [
        *("chatcmpl-s1-0", "chatcmpl-other-0", "-0", "0", "", "s0-0", "chatcmpl-s0-00"),
        *("chatcmpl-s0-\u0660", "chatcmpl-s0-0\n", "chatcmpl-s0--0", "chatcmpl-s0-s0-0"),
        *("chatcmpl-S0-0", "chatcmpl-s0-0-0", "x-s0-0", " chatcmpl-s0-0", "chatcmpl-s0-9999999999"),
    ],
)
async def test_reward_when_the_id_is_of_another_session_then_refused_and_none_is_rewarded(known):
    scripted = Scripted("46.")
    async with serving(scripted) as (url, key, session, calls), client(url, key) as llm:
        await llm.chat.completions.create(model="any", messages=[ASK])
        with pytest.raises(openai.NotFoundError, match="no answer of this session has this id"):
            await llm.post("/reward", body={"reward": 1, "completion_id": known}, cast_to=object)
        await llm.post("/reward", body={"reward": 0.5}, cast_to=object)
        [trajectory] = calls.merged(session.calls.outcome).trajectories
    assert trajectory.reward == 0.5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages: expected at least one"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "messages[0].role 'bot': expected one of",
        ),
        ({"messages": [ASK], "n": 0}, "n: expected 1 to 128, got 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: a part of type 'image_url': expected text",
        ),
    ],
)
async def test_request_when_it_cannot_be_done_then_one_line_names_the_field(body, said):
    async with serving(Scripted()) as (url, key, *_), client(url, key) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.post("/chat/completions", body=body, cast_to=object)
    assert said in caught.value.body["message"]


async def test_key_when_wrong_then_refused():
    async with serving(Scripted()) as (url, *_), client(url, "sk-wrong") as llm:
        with pytest.raises(openai.AuthenticationError, match="expected the key of an open session"):
            await llm.chat.completions.create(model="any", messages=[ASK])
