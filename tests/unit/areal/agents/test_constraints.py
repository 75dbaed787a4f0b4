"""Forced calls and JSON schemas: what each API asks for becomes the grammar of the request."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from pydantic import BaseModel
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

ASK = {"role": "user", "content": "What is 12 and 34?"}
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
SUB = {"type": "function", "function": {"name": "sub"}}
FLAT = {"type": "function", "name": "add", "parameters": ARGUMENTS, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Sum(BaseModel):
    value: int


def client(base_url, key):
    return openai.AsyncOpenAI(base_url=base_url, api_key=key)


def form(scripted, index=0):
    """The format of a request's grammar."""
    tag = json.loads(scripted.requests[index].grammar)
    assert tag["type"] == "structural_tag"
    return tag["format"]


def names(calls):
    return [json.loads(tag["begin"].partition('"name": ')[2].partition(",")[0]) for tag in calls]


def tag(begin, end, arguments=ARGUMENTS, **more):
    content = {"type": "json_schema", "json_schema": arguments, **more}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


HERMES = tag('<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>")
LLAMA = tag('{"name": "add", "parameters": ', "}")
GLM = tag("<tool_call>add\n", "</tool_call>", style="glm_xml")
SAID = {
    "qwen2.5": CALL,
    "qwen3": f"<think>\nHm.\n</think>\n\n{CALL}",
    "llama-3.1": '{"name": "add", "parameters": {"a": 1}}',
    "glm-4.6": "<think>Hm.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"
    "\n</tool_call>",
}


@pytest.mark.parametrize(
    ("family", "call", "several"),
    [
        ("qwen2.5", HERMES, True),
        ("qwen3", HERMES, True),
        ("llama-3.1", LLAMA, False),
        ("glm-4.6", GLM, True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_when_a_call_is_required_then_it_is_written_as_the_template_writes_it(
    family, call, several, stream
):
    scripted = Scripted(SAID[family], "46.", family=family)
    scripted.step = lambda *_: pytest.fail("streamed before it was complete")
    async with serving(scripted) as (url, key, _, calls), client(url, key) as llm:
        asked = {"model": "any", "messages": [ASK], "tools": [ADD], "tool_choice": "required"}
        if stream:
            async with llm.chat.completions.stream(**asked) as events:
                said = (await events.get_final_completion()).choices[0].message
        else:
            said = (await llm.chat.completions.create(**asked)).choices[0].message
        [made] = said.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        result = {"role": "tool", "tool_call_id": made.id, "content": "46"}
        await llm.chat.completions.create(model="any", messages=[ASK, said, result], tools=[ADD])
    check_exact(calls, scripted, chains=[[0, 1]])
    assert scripted.requests[1].grammar == ""
    found = form(scripted)
    if family in ("qwen3", "glm-4.6"):  # it may think first
        optional, found = found["elements"]
        assert optional["type"] == "optional"
        assert optional["content"]["elements"][0]["end"] == "</think>"
    assert found == {
        "type": "tags_with_separator",
        "tags": [call],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not several,
    }


async def test_chat_when_one_function_is_named_then_only_it_and_one_call_when_not_parallel():
    scripted = Scripted(CALL, CALL)
    asked = {"model": "any", "messages": [ASK], "tools": [ADD, SUB]}
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        named = {"type": "function", "function": {"name": "sub"}}
        await llm.chat.completions.create(**asked, tool_choice=named)
        await llm.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False
        )
    first, second = form(scripted), form(scripted, 1)
    assert (names(first["tags"]), first["stop_after_first"]) == (["sub"], False)
    assert first["tags"][0]["content"]["json_schema"] == {"type": "object"}
    assert (names(second["tags"]), second["stop_after_first"]) == (["add", "sub"], True)


async def test_schema_when_asked_for_then_the_sdk_parses_the_answer():
    scripted = Scripted('{"value": 46}', '{"value": 46}', CALL, "{}")
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        asked = {"model": "any", "messages": [ASK]}
        answer = await llm.chat.completions.parse(**asked, response_format=Sum)
        assert answer.choices[0].message.parsed == Sum(value=46)
        response = await llm.responses.parse(model="any", input="12+34", text_format=Sum)
        assert response.output_parsed == Sum(value=46)
        answer = await llm.chat.completions.parse(
            **asked,
            response_format=Sum,
            tools=[{**ADD, "function": {**ADD["function"], "strict": True}}],
        )
        assert answer.choices[0].message.tool_calls
        await llm.chat.completions.create(**asked, response_format={"type": "json_object"})
    for index in (0, 1):
        assert form(scripted, index)["type"] == "json_schema"
        assert form(scripted, index)["json_schema"]["properties"]["value"]["type"] == "integer"
    calls, schema = form(scripted, 2)["elements"]
    assert (form(scripted, 2)["type"], names(calls["tags"])) == ("or", ["add"])
    assert schema["type"] == "json_schema"
    assert form(scripted, 3) == {"type": "json_schema", "json_schema": {"type": "object"}}


async def test_responses_when_a_call_is_required_then_its_item_is_one():
    scripted = Scripted(CALL, CALL)
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        asked = {"model": "any", "input": "12+34", "tools": [FLAT]}
        answer = await llm.responses.create(**asked, tool_choice="required")
        assert [item.type for item in answer.output] == ["function_call"]
        async with llm.responses.stream(
            **asked, tool_choice={"type": "function", "name": "add"}
        ) as stream:
            answer = await stream.get_final_response()
        assert json.loads(answer.output[0].arguments) == {"a": 1}
    assert form(scripted)["tags"] == form(scripted, 1)["tags"] == [HERMES]


async def test_messages_when_a_call_is_required_then_its_block_is_one():
    scripted = Scripted(CALL, CALL, '{"value": 46}')
    tool = {"name": "add", "input_schema": ARGUMENTS}
    async with (
        serving(scripted) as (url, key, *_),
        anthropic.AsyncAnthropic(base_url=url, api_key=key) as llm,
    ):
        asked = {"model": "any", "max_tokens": 99, "messages": [ASK]}
        answer = await llm.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
        assert answer.content[0].input == {"a": 1}
        async with llm.messages.stream(
            **asked, tools=[tool], tool_choice={"type": "tool", "name": "add"}
        ) as stream:
            answer = await stream.get_final_message()
        assert answer.content[0].name == "add"
        schema = {"type": "json_schema", "schema": Sum.model_json_schema()}
        answer = await llm.messages.create(**asked, output_config={"format": schema})
        assert answer.content[0].text == '{"value": 46}'
    assert form(scripted)["tags"] == form(scripted, 1)["tags"] == [HERMES]
    assert form(scripted, 2)["type"] == "json_schema"


async def test_call_when_the_prompt_opened_the_reasoning_then_the_thought_ends_first():
    scripted = Scripted(f"Hm.</think>{CALL}", family="qwen3")
    scripted.tokenizer = scripted.tokenizer.__class__(
        scripted.tokenizer.backend,
        chat_template=scripted.tokenizer.chat_template
        + "{{ '<think>\\n' if add_generation_prompt }}",
        special_tokens=scripted.tokenizer.special_tokens,
        eos_token_ids=scripted.tokenizer.eos_token_ids,
    )
    async with serving(scripted) as (url, key, *_), client(url, key) as llm:
        answer = await llm.chat.completions.create(
            model="any", messages=[ASK], tools=[ADD], tool_choice="required"
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "add"
        assert answer.choices[0].message.reasoning_content == "Hm."
    thought, space, calls = form(scripted)["elements"]
    assert (thought["begin"], thought["end"]) == ("", "</think>")
    assert (space["type"], calls["tags"]) == ("regex", [HERMES])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice 'required': expected tools, got none"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice 'any': expected 'auto', 'none'"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "'allowed_tools': expected"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "mul"}}},
            "the function 'mul' is not among the tools (add)",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type 'grammar': expected"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema: expected an obj"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema: expected an object, got none",
        ),
    ],
)
async def test_constraint_when_it_is_wrong_then_one_line_names_the_field(body, said):
    async with serving(Scripted()) as (url, key, *_), client(url, key) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.post("/chat/completions", body={"messages": [ASK], **body}, cast_to=object)
    assert said in caught.value.body["message"]


async def test_call_when_the_template_writes_none_that_is_known_then_refused():
    async with serving(Scripted(family="minimax-m2")) as (url, key, *_), client(url, key) as llm:
        with pytest.raises(openai.BadRequestError, match="writes tool calls in no known form"):
            await llm.chat.completions.create(
                model="any", messages=[ASK], tools=[ADD], tool_choice="required"
            )
