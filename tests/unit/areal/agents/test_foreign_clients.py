"""What agents of other projects send and look for in answers: each works, or is a 400."""

from __future__ import annotations

import contextlib
import json

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.agents.allowed import ROUTES
from areal.agents.fields import arguments_of
from areal.errors import InvalidInput, PromptTooLong

USER = {"role": "user", "content": "a question"}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Raw:
    """Requests as they are on the wire."""

    def __init__(self, url, key, http):
        self._url, self._http = url.removesuffix("/v1"), http
        self._headers = {"Authorization": f"Bearer {key}"}

    async def send(self, path, status=200, method="POST", **body):
        reply = await self._http.request(
            method, self._url + path, json=body or None, headers=self._headers
        )
        assert reply.status_code == status, reply.text
        return reply.json()

    async def chat(self, *messages, status=200, **more):
        return await self.send("/v1/chat/completions", status, messages=list(messages), **more)


@contextlib.asynccontextmanager
async def served(*answers, **gconfig):
    """(raw client, the scripted model, the session's calls)."""
    scripted = Scripted(*answers)
    async with (
        serving(scripted, **gconfig) as (url, key, _, calls),
        httpx.AsyncClient(timeout=60.0) as http,
    ):
        yield Raw(url, key, http), scripted, calls


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


# ---------------------------------------------------------------- context overflow


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_when_it_leaves_no_room_then_each_api_says_so_in_its_own_words(stream):
    async with served() as (raw, scripted, _):
        for path, body in [
            ("/v1/chat/completions", {"messages": [USER]}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/completions", {"prompt": "x"}),
        ]:
            scripted.errors.append(PromptTooLong("input_ids: no room", tokens=90, limit=50))
            error = (await raw.send(path, 400, stream=stream, **body))["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["type"] == "invalid_request_error"
            assert "This model's maximum context length is 50 tokens. However, " in error["message"]
            assert "90 tokens" in error["message"]
            assert "context_length_exceeded" in error["message"]
        scripted.errors.append(PromptTooLong("input_ids: no room", tokens=90, limit=50))
        whole = await raw.send("/v1/messages", 400, stream=stream, messages=[USER], max_tokens=5)
        assert whole["type"] == "error"
        assert whole["error"] == {
            "type": "invalid_request_error",
            "message": "prompt is too long: 90 tokens > 50 maximum",
        }


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("route", sorted(ROUTES))
@given(
    name=st.text(min_size=1, max_size=40), value=st.one_of(st.booleans(), st.text(), st.floats())
)
@settings(max_examples=50, deadline=None)
def test_field_when_it_is_not_on_the_list_of_its_route_then_refused_by_its_name(route, name, value):
    fields = ROUTES[route]
    fields.check({name: None})
    if name not in fields.honored | fields.ignored | fields.only.keys():
        with pytest.raises(InvalidInput, match="not supported; leave it out"):
            fields.check({name: value})


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "object"}},
        {"stop_token_ids": [5]},
        {"top_logprobs": 2},
        {"ignore_eos": True},
        {"enable_thinking": False},
        {"logit_bias": {"5": 1}},
        {"add_generation_prompt": False},
        {"max_token": 5},
    ],
)
async def test_chat_when_a_field_would_change_the_answer_and_is_unsupported_then_400(field):
    async with served("yes") as (raw, scripted, _):
        error = (await raw.chat(USER, status=400, **field))["error"]
        assert next(iter(field)) in error["message"]
        assert not scripted.requests


async def test_chat_when_fields_are_neutral_or_belong_to_the_recipe_then_answered():
    async with served("yes") as (raw, _, _):
        await raw.chat(
            USER, temperature=0.1, top_k=5, frequency_penalty=0.5, seed=3, reasoning_effort="low",
            top_logprobs=0, ignore_eos=False, stop_token_ids=[], tools=None, metadata={"a": "b"},
        )  # fmt: skip


async def test_routes_when_fields_are_unknown_then_400_and_messages_are_looked_at_too():
    async with served() as (raw, _, _):
        await raw.send("/v1/responses", 400, input="x", guided_json={})
        await raw.send("/v1/messages", 400, messages=[USER], max_tokens=3, stop=["x"])
        await raw.send("/v1/completions", 400, prompt="x", guided_regex="x")
        await raw.send("/inference/v1/generate", 400, token_ids=[5], stream=True)
        body = {"token_ids": [5], "sampling_params": {"structured_outputs": {"json": {}}}}
        error = await raw.send("/inference/v1/generate", 400, **body)
        assert "sampling_params.structured_outputs" in error["error"]["message"]
        await raw.send("/v1/reward", 400, reward=1, answer_id="x")
        await raw.chat(USER, said("", function_call={"name": "f"}), USER, status=400)


# ---------------------------------------------------------------- the chat template


async def test_chat_template_kwargs_when_given_then_the_prompt_is_rendered_with_them():
    scripted = Scripted("yes", "no", "well", family="qwen3")
    async with serving(scripted) as (url, key, _, calls), httpx.AsyncClient(timeout=60.0) as http:
        raw = Raw(url, key, http)
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        await raw.chat(USER, **off)
        await raw.chat(USER, said("yes"), USER, **off)
        await raw.chat(USER)
        tokenizer = scripted.tokenizer
        without = tokenizer.apply_chat_template([USER], enable_thinking=False)
        assert scripted.requests[0].input_ids == without
        assert tokenizer.decode(scripted.requests[1].input_ids).endswith("</think>\n\n")
        assert scripted.requests[2].input_ids == tokenizer.apply_chat_template([USER]) != without
        check_exact(calls, scripted, chains=[[0, 1], [2]])
        for name in ("messages", "tools", "add_generation_prompt", "not a name"):
            error = await raw.chat(USER, status=400, chat_template_kwargs={name: 1})
            assert f"chat_template_kwargs '{name}'" in error["error"]["message"]


PREFILLS = [
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": False},
    "prefix",
    "partial",
    "anthropic",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", PREFILLS, ids=str)
async def test_prefill_when_an_answer_is_begun_then_the_model_continues_it_in_one_trajectory(
    how, stream
):
    async with served(" is 4.", "No", " thanks.") as (raw, scripted, calls):

        async def ask(*messages):
            if how == "anthropic":
                body = {"messages": list(messages), "max_tokens": 50, "stream": stream}
                return await text_of(raw, "/v1/messages", body)
            if isinstance(how, str) and messages[-1]["role"] == "assistant":
                messages = (*messages[:-1], {**messages[-1], how: True})
            more = how if isinstance(how, dict) and messages[-1]["role"] == "assistant" else {}
            body = {"messages": list(messages), "stream": stream, **more}
            return await text_of(raw, "/v1/chat/completions", body)

        first = await ask(USER, said("The answer"))
        assert first == " is 4."
        rendered = scripted.tokenizer.render_chat([USER], add_generation_prompt=True)
        assert scripted.tokenizer.decode(scripted.requests[0].input_ids) == f"{rendered}The answer"
        whole = said("The answer is 4.")
        assert await ask(USER, whole, USER) == "No"
        assert await ask(USER, whole, USER, said("No"), USER, said("No,")) == " thanks."
        text = scripted.tokenizer.decode(scripted.requests[2].input_ids)
        assert text.endswith("<|im_start|>assistant\nNo,")
        check_exact(calls, scripted, chains=[[0, 1, 2]])


async def text_of(raw, path, body):
    """The text of an answer, streamed or not."""
    if not body["stream"]:
        whole = await raw.send(path, **body)
        return (
            whole["content"][0]["text"]
            if "content" in whole
            else whole["choices"][0]["message"]["content"]
        )
    reply = await raw._http.post(raw._url + path, json=body, headers=raw._headers)
    assert reply.status_code == 200, reply.text
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    texts = [
        event["delta"].get("text", "") if path == "/v1/messages"
        else event["choices"][0]["delta"].get("content") or ""
        for event in events
        if event.get("choices") or event.get("type") == "content_block_delta"
    ]  # fmt: skip
    return "".join(texts)


async def test_prefill_when_it_is_no_text_of_the_assistant_then_400():
    async with served() as (raw, scripted, _):
        await raw.chat(USER, status=400, continue_final_message=True)
        await raw.chat(said("x"), status=400, continue_final_message=True)
        await raw.send("/v1/messages", 400, messages=[said("x")], max_tokens=5)
        assert not scripted.requests


async def test_last_answer_when_no_one_says_that_it_is_to_be_continued_then_it_is_a_turn():
    """As with OpenAI's and vLLM's chat completions."""
    async with served("more") as (raw, scripted, _):
        await raw.chat(USER, said("x"))
        expected = scripted.tokenizer.apply_chat_template([USER, said("x")])
        assert scripted.requests[0].input_ids == expected


# ---------------------------------------------------------------- histories


@pytest.mark.parametrize("ended", ["</code>", ""])
async def test_stop_text_when_the_agent_puts_it_back_then_the_conversation_does_not_split(ended):
    async with served("a = 1\n</code> and", "b\n</code>", "c") as (raw, scripted, calls):
        messages = [USER]
        for _ in range(3):
            answer = await raw.chat(*messages, stop=["</code>", "Observation:"])
            text = answer["choices"][0]["message"]["content"]
            messages += [said(text + ended if len(messages) < 4 else text), USER]
        assert calls.merged(1.0).chains == [[0, 1, 2]]
        assert scripted.tokenizer.decode(scripted.requests[1].input_ids).count("</code>") == 1


@pytest.mark.parametrize(
    "arguments", ['{"x": 1', "null", "[1]", "", None, "3", '"x"', "NaN", "{}{}", '{"a": Infinity}']
)
async def test_arguments_when_a_history_has_malformed_ones_then_the_conversation_lives(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "an error"}
    tools = [{"type": "function", "function": TOOL}]
    async with served("yes", "yes", "yes") as (raw, scripted, _):
        await raw.chat(USER, said("", tool_calls=[call]), result, tools=tools)
        item = {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "an error"}
        await raw.send("/v1/responses", input=[USER, item, output])
        block = {"type": "tool_use", "id": "c", "name": "add", "input": arguments}
        back = {"type": "tool_result", "tool_use_id": "c", "content": "an error"}
        turns = [USER, said([block]), {"role": "user", "content": [back]}]
        await raw.send("/v1/messages", messages=turns, max_tokens=5)
        for request in scripted.requests:
            text = scripted.tokenizer.decode(request.input_ids)
            assert '{"name": "add", "arguments": {}}' in text


@given(st.one_of(st.text(), st.recursive(st.none() | st.floats() | st.text(), st.lists)))
@settings(deadline=None)
def test_arguments_when_they_are_anything_then_an_object(value):
    assert isinstance(arguments_of(value), dict)


async def test_item_reference_when_the_sdk_names_items_then_they_are_the_stored_ones():
    """As AI SDK's default OpenAI provider sends them, for text and call of one answer."""
    tools = [{"type": "function", **TOOL}]
    async with served(f"<think>\nhm\n</think>\n\n{CALL}", "It is 1.", "Bye.") as (
        raw,
        model,
        calls,
    ):
        first = await raw.send("/v1/responses", input=[USER], tools=tools)
        assert [item["type"] for item in first["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]
        items = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        known = first["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": known, "output": "1"}
        second = await raw.send("/v1/responses", input=[USER, *items, result], tools=tools)
        more = [{"type": "item_reference", "id": item["id"]} for item in second["output"]]
        asked = [USER, *items, result, *more, USER]
        await raw.send("/v1/responses", input=asked, tools=tools)
        check_exact(calls, model, chains=[[0, 1, 2]])
        one = items[0]["id"]
        for wrong in ("msg_1", one[:-1] + "9", f"{one}-0", "msg-resp-s1-0", one + "0" * 20, "fc-"):
            reference = {"type": "item_reference", "id": wrong}
            error = await raw.send("/v1/responses", 404, input=[USER, reference])
            assert "input[1].id" in error["error"]["message"]
        await raw.send("/v1/responses", 400, input=[{"type": "item_reference"}])


async def test_item_reference_when_its_answer_was_not_stored_then_404():
    async with served("yes") as (raw, _, _):
        first = await raw.send("/v1/responses", input=[USER], store=False)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await raw.send("/v1/responses", 404, input=[USER, reference])


# ---------------------------------------------------------------- routes and headers


async def test_models_when_one_is_retrieved_then_known_by_any_name():
    async with served() as (raw, _, _):
        assert (await raw.send("/v1/models/gpt-9", method="GET"))["id"] == "gpt-9"
        assert (await raw.send("/v1/models/org%2Fname", method="GET"))["id"] == "org/name"


async def test_count_tokens_when_asked_then_the_length_of_the_prompt_and_errors_are_anthropics():
    async with served("yes") as (raw, scripted, _):
        counted = await raw.send("/v1/messages/count_tokens", messages=[USER], system="Be nice.")
        await raw.send("/v1/messages", messages=[USER], system="Be nice.", max_tokens=5)
        assert counted == {"input_tokens": len(scripted.requests[0].input_ids)}
        error = await raw.send("/v1/messages/count_tokens", 400, messages=[])
        assert error["type"] == "error"
        assert (await raw.send("/v1/messages/nothing", 404))["type"] == "error"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "bearer KEY"},
        {"authorization": "BEARER  KEY"},
        {"api-key": "KEY"},
        {"X-Api-Key": "KEY"},
        {"Authorization": "KEY"},
    ],
)
async def test_key_when_a_client_spells_the_header_its_own_way_then_taken(headers):
    async with serving(Scripted()) as (url, key, _, _), httpx.AsyncClient(timeout=60.0) as http:
        given_ = {name: value.replace("KEY", key) for name, value in headers.items()}
        assert (await http.get(f"{url}/models", headers=given_)).status_code == 200
        assert (await http.get(f"{url}/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_when_there_are_several_then_each_has_an_id_that_rewards_take(stream):
    scripted = Scripted("a", "b", "c")
    async with serving(scripted) as (url, key, _, calls), httpx.AsyncClient(timeout=60.0) as http:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            ids = {}
            made = await client.chat.completions.create(
                model="any", messages=[USER], n=3, stream=stream
            )
            for whole in [each async for each in made] if stream else [made]:
                ids |= {choice.index: choice.id for choice in whole.choices}
        raw = Raw(url, key, http)
        for index, known in ids.items():
            await raw.send("/v1/reward", reward=index, completion_id=known)
        assert [t.reward for t in calls.merged(None).trajectories] == [0, 1, 2]
