"""Foreign clients, unchanged, each in the smallest agent: `python talk.py CLIENT BASE_URL KEY`.

Each asks, calls the tool that the model asks for, and returns the final answer's text. Asked once
more, it says by which of its own errors it recognizes a prompt that is too long. Both are printed
as JSON. It runs in the clients' own environment, so it imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

QUESTION = "What is 1+2?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def of_error(call: Any) -> str:
    """The name of the error that a call raises, and of its bases."""
    try:
        call()
    except Exception as error:
        return " ".join(kind.__name__ for kind in type(error).__mro__)
    return ""


def openai_chat(url: str, key: str) -> tuple[str, str]:
    import openai

    client = openai.OpenAI(base_url=url, api_key=key)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        made = client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        return made.choices[0].message

    said = ask()
    [call] = said.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
    text = ask().content
    try:
        ask()
    except openai.BadRequestError as error:
        return text, str(error.code)
    return text, ""


def openai_agents(url: str, key: str) -> tuple[str, str]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    model = agents.OpenAIResponsesModel(
        model="any", openai_client=openai.AsyncOpenAI(base_url=url, api_key=key)
    )
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add)])
    text = agents.Runner.run_sync(agent, QUESTION).final_output
    return text, of_error(lambda: agents.Runner.run_sync(agent, QUESTION))


def anthropic(url: str, key: str) -> tuple[str, str]:
    import anthropic as sdk

    client = sdk.Anthropic(base_url=url, api_key=key)
    tools: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        return client.messages.create(model="any", messages=messages, tools=tools, max_tokens=100)

    said = ask()
    call = said.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))}
    messages += [{"role": "assistant", "content": said.content}]
    messages += [{"role": "user", "content": [result]}]
    text = ask().content[0].text
    try:
        ask()
    except sdk.BadRequestError as error:
        return text, str(error)
    return text, ""


def _langchain(llm: Any) -> tuple[str, str]:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound, messages = llm.bind_tools([add]), [HumanMessage(QUESTION)]
    said = bound.invoke(messages)
    [call] = said.tool_calls
    messages += [said, ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])]
    return bound.invoke(messages).text, of_error(lambda: bound.invoke(messages))


def langchain_openai(url: str, key: str) -> tuple[str, str]:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model="any", base_url=url, api_key=key))


def langchain_responses(url: str, key: str) -> tuple[str, str]:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model="any", base_url=url, api_key=key, use_responses_api=True))


def langchain_anthropic(url: str, key: str) -> tuple[str, str]:
    from langchain_anthropic import ChatAnthropic

    return _langchain(ChatAnthropic(model="any", base_url=url, api_key=key, max_tokens=100))


def litellm(url: str, key: str) -> tuple[str, str]:
    import litellm as sdk

    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        made = sdk.completion("openai/any", messages, api_base=url, api_key=key, tools=[TOOL])
        return made.choices[0].message

    said = ask()
    [call] = said.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    return ask().content, of_error(ask)


def pydantic_ai(url: str, key: str) -> tuple[str, str]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, tools=[add])
    text = agent.run_sync(QUESTION).output
    try:
        agent.run_sync(QUESTION)
    except Exception as error:
        return text, str(error)
    return text, ""


def smolagents(url: str, key: str) -> tuple[str, str]:
    from smolagents import CodeAgent, OpenAIServerModel

    model = OpenAIServerModel(model_id="any", api_base=url, api_key=key)
    agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
    return str(agent.run(QUESTION)), of_error(lambda: model([{"role": "user", "content": "?"}]))


def dspy(url: str, key: str) -> tuple[str, str]:
    import dspy as sdk

    sdk.configure(lm=sdk.LM("openai/any", api_base=url, api_key=key, cache=False))
    predict = sdk.Predict("question -> answer")
    return predict(question=QUESTION).answer, of_error(lambda: predict(question=QUESTION))


def inspect(url: str, key: str) -> tuple[str, str]:
    from inspect_ai.model import ChatMessageTool, ChatMessageUser, get_model
    from inspect_ai.tool import ToolInfo, ToolParams

    model = get_model("openai-api/areal/any", base_url=url, api_key=key)
    parameters = ToolParams(**PARAMETERS)
    tools = [ToolInfo(name="add", description="Adds.", parameters=parameters)]

    async def run() -> tuple[str, str]:
        messages: list[Any] = [ChatMessageUser(content=QUESTION)]
        said = (await model.generate(messages, tools=tools)).message
        [call] = said.tool_calls or []
        result = str(add(**call.arguments))
        messages += [said, ChatMessageTool(content=result, tool_call_id=call.id, function="add")]
        text = (await model.generate(messages, tools=tools)).completion
        last = await model.generate(messages, tools=tools)
        return text, str(last.stop_reason)

    return asyncio.run(run())


if __name__ == "__main__":
    name, base_url, api_key = sys.argv[1:]
    answer, overflow = globals()[name](base_url, api_key)
    print(json.dumps({"text": answer, "overflow": overflow}))
