"""Agents on a real engine: what is trained is what the engine sampled, id by id.

The model is random, so its tool calls are forced. `make test-sglang` runs it on SGLang as well.
"""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel
from tests.contract.engines import ENGINES, running_spelling
from tests.integration.engine_wire import Sampled
from tests.integration.generation_rig import Observer
from tests.integration.wired_gateway import check_sampled

from areal.agents.workflow import AgentWorkflow
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.episode import EpisodeEngine
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_torch.models.tiny import make_tiny_model

TEMPLATE = """
{%- if tools %}{{ '<|system|>' + tools | tojson }}{% endif %}
{%- for m in messages %}
{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>\\n' }}
{%- endfor %}
{%- if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture(scope="module", params=ENGINES)
def served(request, tmp_path_factory):
    """(address of an engine, its tokenizer)."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_spelling(request.param, folder, folder / "server.log") as (url, _):
        yield url, Tokenizer.load(folder)


@pytest.fixture
async def engine(served):
    url, tokenizer = served

    async def report(*_):
        pass

    table = ServerTable()
    client = SGLangClient(
        table,
        ModelLimits(tokenizer.vocab_size, 2048, tuple(tokenizer.eos_token_ids)),
        report=report,
        observer=Observer(),
        request_timeout_s=60.0,
        setup_timeout_s=60.0,
    )
    await client.start()
    table.update([InferenceServer(url, url, ServerState.SERVING, 0, "")])
    yield Recording(EpisodeEngine(client, None, tokenizer, group="t", min_version=0))
    await client.close()


class Recording:
    """An engine, and all that it sampled."""

    def __init__(self, engine):
        self.engine, self.tokenizer, self.sampled = engine, engine.tokenizer, []

    async def agenerate_group(self, request):
        responses = await self.engine.agenerate_group(request)
        self.sampled += responses
        return responses


async def chat_agent(task, base_url, api_key):
    """Several turns, streamed and not, a second sample of one of them, and a sub-agent."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        for turn in range(3):
            if turn == 1:
                text = ""
                stream = await llm.chat.completions.create(
                    model="any", messages=messages, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                said = {"role": "assistant", "content": text}
            else:
                answer = await llm.chat.completions.create(model="any", messages=messages, n=2)
                said = answer.choices[1].message
            messages += [said, {"role": "user", "content": f"again {turn}"}]
        sub = [{"role": "user", "content": "summarize"}]
        await asyncio.gather(
            *(llm.chat.completions.create(model="any", messages=sub) for _ in range(2))
        )
        await llm.completions.create(model="any", prompt="1+1=", max_tokens=5)
    return 1.0


async def message_agent(task, base_url, api_key):
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        for turn in range(3):
            arguments = {"model": "any", "max_tokens": 20, "messages": messages}
            if turn % 2:
                async with llm.messages.stream(**arguments) as stream:
                    said = await stream.get_final_message()
            else:
                said = await llm.messages.create(**arguments)
            messages += [
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": f"again {turn}"},
            ]
    return 1.0


async def token_agent(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        ids = list(range(40, 50))
        for _ in range(3):
            url = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 7, "logprobs": 1}}
            answer = await llm.post(url, body=body, cast_to=object)
            ids += answer["choices"][0]["token_ids"]
            ids.append(65)
    return 1.0


async def response_agent(task, base_url, api_key):
    """Turns by id and by items, streamed and not, with tools on offer, and a branch."""
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        asked = {"model": "any", "instructions": "Add.", "tools": [add]}
        first = await llm.responses.create(input=task["question"], **asked)
        stream = await llm.responses.create(
            input="again", previous_response_id=first.id, stream=True, **asked
        )
        events = [event async for event in stream]
        items = [
            {"role": "user", "content": task["question"]},
            *first.output,
            {"role": "user", "content": "again"},
            *events[-1].response.output,
            {"role": "user", "content": "and again"},
        ]
        await llm.responses.create(input=items, **asked)
        await llm.responses.create(input="or so", previous_response_id=first.id, **asked)
        await llm.responses.create(input="summarize", model="any", store=False)
    return 1.0


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": ARGUMENTS}}
SUM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ARGUMENTS}}


def read(arguments):
    """The arguments of a call, as a tool would; whatever is no call of ours raises."""
    [a] = arguments.values()
    return str(a + {1: 1, 2: 2, 3: 3}[a])


async def chat_tool_agent(task, base_url, api_key):
    """Streamed parallel calls, then one that is named, then an answer by a schema."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        asked = {"model": "any", "messages": messages, "tools": [ADD, SUB]}
        async with llm.chat.completions.stream(**asked, tool_choice="required") as stream:
            said = (await stream.get_final_completion()).choices[0].message
        for turn in range(2):
            assert said.tool_calls
            messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in said.tool_calls:
                result = read(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if turn == 0:
                named = {"type": "function", "function": {"name": "sub"}}
                answer = await llm.chat.completions.create(
                    **asked, tool_choice=named, parallel_tool_calls=False
                )
                said = answer.choices[0].message
                assert [call.function.name for call in said.tool_calls] == ["sub"]
        answer = await llm.chat.completions.create(
            model="any",
            messages=messages,
            tools=[ADD, SUB],
            tool_choice="none",
            response_format=SUM,
            n=2,
        )
        for choice in answer.choices:
            read(json.loads(choice.message.content))
    return 1.0


async def response_tool_agent(task, base_url, api_key):
    """A call, its result by id, streamed, and an answer by a schema."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        tool = {"type": "function", "strict": False, **ADD["function"]}
        asked = {"model": "any", "tools": [tool]}
        answer = await llm.responses.create(input=task["question"], tool_choice="required", **asked)
        for schema in (None, ARGUMENTS):
            results = [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": read(json.loads(item.arguments)),
                }
                for item in answer.output
                if item.type == "function_call"  # what the limit of tokens has cut is none
            ]
            # One call: of a random model's parallel ones, one answer in ten meets the limit.
            more = {"tool_choice": {"type": "function", "name": "add"}}
            more["parallel_tool_calls"] = False
            if schema:
                form = {"type": "json_schema", "name": "sum", "schema": schema}
                more = {"tool_choice": "none", "text": {"format": form}}
            async with llm.responses.stream(
                input=results, previous_response_id=answer.id, **asked, **more
            ) as stream:
                answer = await stream.get_final_response()
        read(json.loads(answer.output_text))
    return 1.0


async def message_tool_agent(task, base_url, api_key):
    """Calls of any tool and of one, streamed and not."""
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        tools = [{"name": name, "input_schema": ARGUMENTS} for name in ("add", "sub")]
        asked = {"model": "any", "max_tokens": 400, "messages": messages, "tools": tools}
        async with llm.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
            said = await stream.get_final_message()
        for turn in range(2):
            uses = [block for block in said.content if block.type == "tool_use"]
            assert uses
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": read(use.input)}
                for use in uses
            ]
            messages += [
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": results},
            ]
            if turn == 0:
                said = await llm.messages.create(
                    **asked, tool_choice={"type": "tool", "name": "add"}
                )
    return 1.0


def sdk_agent(api):
    """Agents of OpenAI's SDK: a tool that they must use, streamed and then not; a typed answer."""

    async def run(task, base_url, api_key):
        import agents

        kind = "OpenAIChatCompletionsModel" if api == "chat" else "OpenAIResponsesModel"
        quiet = agents.RunConfig(tracing_disabled=True)

        @agents.function_tool
        def add(a: Literal[1, 2, 3]) -> str:
            """Adds."""
            return f"sum {a + a}"

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
            model = getattr(agents, kind)("any", llm)
            adder = agents.Agent(
                "adder",
                instructions="Add.",
                tools=[add],
                model=model,
                model_settings=agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False
                ),
                tool_use_behavior="stop_on_first_tool",  # a random model's prose has no end
            )
            result = agents.Runner.run_streamed(adder, task["question"], run_config=quiet)
            kinds = {event.type async for event in result.stream_events()}
            assert "raw_response_event" in kinds
            assert result.final_output.startswith("sum ")
            said = [*result.to_input_list(), {"role": "user", "content": "again"}]
            result = await agents.Runner.run(adder, said, run_config=quiet)
            assert result.final_output.startswith("sum ")
            reader = agents.Agent("reader", model=model, output_type=Digit)
            result = await agents.Runner.run(reader, "1+1=", run_config=quiet)
            assert isinstance(result.final_output, Digit)
        return 1.0

    return run


class Digit(BaseModel):
    """What an agent of the SDK must answer."""

    digit: Literal[1, 2, 3]


with_sdk = pytest.mark.skipif(
    find_spec("agents") is None, reason="needs openai-agents: make test-agents-sdk"
)


@pytest.mark.parametrize(
    ("run", "calls", "trajectories", "most"),
    [
        (chat_agent, 8, 6, 16),
        (response_agent, 5, 3, 16),
        (message_agent, 3, 1, 16),
        (token_agent, 3, 1, 16),
        (chat_tool_agent, 4, 2, 400),
        (response_tool_agent, 3, 1, 400),
        (message_tool_agent, 2, 1, 400),
        pytest.param(sdk_agent("chat"), 3, 2, 400, id="sdk_chat", marks=with_sdk),
        pytest.param(sdk_agent("responses"), 3, 2, 400, id="sdk_responses", marks=with_sdk),
    ],
)
async def test_agent_when_run_then_its_trajectories_are_what_the_engine_sampled(
    engine, run, calls, trajectories, most
):
    samples = 2
    workflow = AgentWorkflow(run, GenerationHyperparameters(n_samples=samples, max_new_tokens=most))
    async with asyncio.timeout(240):
        found = await workflow.arun_episode(engine, {"question": "12+34="})
    assert (len(engine.sampled), len(found)) == (calls * samples, trajectories * samples)
    check_sampled(
        found,
        [Sampled(r.input_tokens, r.output_tokens, r.output_logprobs) for r in engine.sampled],
    )
