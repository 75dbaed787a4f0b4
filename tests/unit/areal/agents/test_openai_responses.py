"""The `openai` package drives sessions by responses; what they come to are the sampled ids."""

from __future__ import annotations

import json

import openai
import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

ASK = "What is 12 and 34?"
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    "strict": False,
}
CALLS = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"b": "ö"}, "name": "add"}\n</tool_call>'
)
NASTY = [300, 17, 301, 88, 5]  # not how the tokenizer would write their text


def client(base_url, key, **options):
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, **options)


def prompt_of(scripted, number):
    return scripted.tokenizer.decode(scripted.sampled[number].input_tokens)


async def streamed(llm, **arguments):
    """(the events' types, the final response) as the package reads a stream."""
    async with llm.responses.stream(model="any", **arguments) as stream:
        kinds = [event.type async for event in stream]
        return kinds, await stream.get_final_response()


async def test_response_when_items_are_sent_back_then_one_trajectory_of_the_sampled_ids():
    scripted = Scripted("46.", NASTY, "  Yes\n")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        items = [{"role": "user", "content": ASK}]
        for _ in range(3):
            answer = await llm.responses.create(model="any", instructions="Add.", input=items)
            items += [*answer.output, {"role": "user", "content": "Sure?"}]
        assert (answer.output_text, answer.status) == ("Yes", "completed")
        sampled = scripted.sampled[2]
        assert answer.usage.input_tokens == len(sampled.input_tokens)
        assert answer.usage.output_tokens == len(sampled.output_tokens)
        assert answer.id == "resp-s0-2"
    assert prompt_of(scripted, 0).startswith("<|im_start|>system\nAdd.<|im_end|>")
    check_exact(calls, scripted, chains=[[0, 1, 2]])


async def test_previous_id_when_given_then_that_very_answer_is_continued():
    scripted = Scripted("the answer", "", "Yes.", "No.", "Done.")
    ids = scripted.tokenizer.encode
    letters = [i for letter in "the answer" for i in ids(letter, add_special_tokens=False)]
    scripted.answers[1] = letters  # the same text by other ids
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        twice = [await llm.responses.create(model="any", input=ASK) for _ in range(2)]
        first = await llm.responses.create(
            model="any", input="Sure?", previous_response_id=twice[0].id
        )
        assert first.previous_response_id == twice[0].id
        await llm.responses.create(model="any", input="Sure?", previous_response_id=twice[1].id)
        await llm.responses.create(model="any", input="End.", previous_response_id=first.id)
    check_exact(calls, scripted, chains=[[0, 2, 4], [1, 3]])


async def test_previous_id_when_instructions_change_then_the_conversation_under_the_new_ones():
    scripted = Scripted("46.", "Yes.", "No.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        one = await llm.responses.create(model="any", instructions="Add.", input=ASK)
        two = await llm.responses.create(
            model="any", instructions="Doubt.", input="Sure?", previous_response_id=one.id
        )
        await llm.responses.create(
            model="any", instructions="Doubt.", input="End.", previous_response_id=two.id
        )
    text = prompt_of(scripted, 2)
    assert "Add." not in text
    assert [text.count(each) for each in ("Doubt.", ASK, "46.", "Sure?", "Yes.", "End.")] == [1] * 6
    check_exact(calls, scripted, chains=[[0], [1, 2]])


async def test_previous_id_when_the_items_were_sent_back_before_then_all_of_them_are_known():
    """A conversation is kept once, whichever way its requests name it."""
    scripted = Scripted("46.", "Yes.", "No.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        one = await llm.responses.create(model="any", input=ASK)
        items = [{"role": "user", "content": ASK}, *one.output, {"role": "user", "content": "Ok?"}]
        two = await llm.responses.create(model="any", input=items)
        await llm.responses.create(model="any", input="End.", previous_response_id=two.id)
        assert [len(json.loads(await calls.kept(i))["messages"]) for i in range(3)] == [2, 2, 2]
    check_exact(calls, scripted, chains=[[0, 1, 2]])


@pytest.mark.parametrize("known", ["resp-s0-7", "resp-s1-0", "resp_68a", "msg-s0-0", "resp-s0-0"])
async def test_previous_id_when_unknown_or_not_stored_then_404_names_it(known):
    scripted = Scripted("46.", "Yes.")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        await llm.responses.create(model="any", input=ASK, store=False)
        with pytest.raises(openai.NotFoundError, match=rf"previous_response_id '{known}'"):
            await llm.responses.create(model="any", input="?", previous_response_id=known)
    assert len(scripted.sampled) == 1


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_tools_when_called_in_parallel_then_their_outputs_continue(family, stream, by_id):
    scripted = Scripted(CALLS, "46.", family=family)
    asked = {"input": ASK, "tools": [ADD]}
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        if stream:
            kinds, answer = await streamed(llm, **asked)
            assert kinds.count("response.function_call_arguments.done") == 2
        else:
            answer = await llm.responses.create(model="any", **asked)
        assert answer.output_text == "I add."
        functions = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(each.arguments) for each in functions] == [{"a": 1}, {"b": "ö"}]
        outputs = [
            {"type": "function_call_output", "call_id": each.call_id, "output": "46"}
            for each in functions
        ]
        if by_id:
            more = {"input": outputs, "previous_response_id": answer.id}
        else:
            kept = [item.model_dump(exclude_none=True) for item in answer.output]
            more = {"input": [{"role": "user", "content": ASK}, *kept, *outputs]}
        last = await llm.responses.create(model="any", tools=[ADD], **more)
        assert last.output_text == "46."
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1]])
    text = scripted.tokenizer.decode(trajectory.input_ids.tolist())
    assert text.count("<tool_response>\n46\n</tool_response>") == 2


async def test_parallel_calls_when_forbidden_then_the_answer_ends_with_its_first():
    scripted = Scripted(CALLS, "46.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.responses.create(
            model="any", input=ASK, tools=[ADD], parallel_tool_calls=False
        )
        [call] = [item for item in answer.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
        await llm.responses.create(
            model="any", input=[output], tools=[ADD], previous_response_id=answer.id
        )
    whole = scripted.sampled[0].output_tokens
    [trajectory] = calls.merged(1.0).trajectories
    trained = trajectory.input_ids[trajectory.loss_mask].tolist()
    first = trained[: -len(scripted.sampled[1].output_tokens)]
    assert first == whole[: len(first)]
    assert scripted.tokenizer.decode(first).rstrip().endswith('{"a": 1}}\n</tool_call>')


async def test_stream_when_read_then_the_events_in_order_and_the_same_response():
    thought = "<think>\n12+34\n</think>\n\n46."
    scripted = Scripted(thought, thought, family="qwen3")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        kinds, answer = await streamed(llm, input=ASK)
        plain = await llm.responses.create(model="any", input=ASK)
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    for each in (answer, plain):
        assert [item.type for item in each.output] == ["reasoning", "message"]
        assert each.output[0].content[0].text == "12+34"
        assert each.output_text == "46."
    assert answer.usage == plain.usage


async def test_tokens_when_used_up_then_incomplete_and_continued_exactly():
    scripted = Scripted("The answer is 46, the sum of 12 and 34.", "Yes.", "The answer is 46, so")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answer = await llm.responses.create(model="any", input=ASK, max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        await llm.responses.create(model="any", input="?", previous_response_id=answer.id)
        stream = await llm.responses.create(
            model="any", input=ASK, max_output_tokens=3, stream=True
        )
        assert [event.type async for event in stream][-1] == "response.incomplete"
    check_exact(calls, scripted, chains=[[0, 1], [2]])


async def test_logprobs_when_included_then_those_of_the_sampler():
    scripted = Scripted("46.")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        answer = await llm.responses.create(
            model="any", input=ASK, include=["message.output_text.logprobs"]
        )
    logprobs = [each.logprob for each in answer.output[0].content[0].logprobs]
    assert logprobs == scripted.sampled[0].output_logprobs


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input: expected at least one item"),
        ({"input": 3}, "input: expected a list"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, r"input\[0\].type 'computer_call'"),
        ({"input": [{"role": "bot", "content": ""}]}, r"input\[0\].role 'bot'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"input\[0\].content\[0\]: a part of type 'input_image'",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type 'web_search'"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"conversation": "c"}, "conversation 'c': not supported"),
        ({"truncation": "auto"}, "truncation 'auto'"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected 1 to"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
            r"input\[0\].name: expected a string",
        ),
    ],
)
async def test_request_when_wrong_then_400_names_the_field(body, said):
    scripted = Scripted("46.")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            await llm.post("/responses", body={"input": ASK, **body}, cast_to=object)
    assert caught.value.type == "invalid_request_error"
    assert scripted.sampled == []


async def test_reward_when_for_one_response_then_at_its_answer():
    scripted = Scripted("46.", "47.")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        answers = [await llm.responses.create(model="any", input=ASK) for _ in range(2)]
        for reward, answer in enumerate(answers):
            body = {"reward": reward, "completion_id": answer.id}
            await llm.post("/reward", body=body, cast_to=object)
    assert [each.reward for each in calls.merged(None).trajectories] == [0.0, 1.0]
