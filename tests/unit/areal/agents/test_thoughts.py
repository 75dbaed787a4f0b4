"""A call that a model only thinks of is no call: calls come from the text after the thought."""

from __future__ import annotations

import pytest
from tests.unit.areal.agents.raw_calls import (
    APIS,
    answer_of,
    asking,
    continuing,
    events_of,
    send,
    session_of,
)
from tests.unit.areal.agents.scripted_model import Scripted, check_exact
from tests.unit.areal.workflows.chat_families import tokenizer
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.types import GenerationHyperparameters, LLMResponse, StopReason
from areal.workflows.conversation import Conversation
from areal.workflows.tool import ToolWorkflow


def call(family: str, a: int) -> str:
    if family == "glm-4.6":
        pair = f"<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>"
        return f"<tool_call>f\n{pair}\n</tool_call>"
    return f'<tool_call>\n{{"name": "f", "arguments": {{"a": {a}}}}}\n</tool_call>'


FAMILIES = ["qwen3", "glm-4.6"]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_call_when_in_the_thought_then_it_is_no_call(family, path):
    thought = f"I could write {call(family, 1)} but no."
    scripted = Scripted(f"<think>{thought}</think>The answer is 5.", "done", family=family)
    session, first = session_of(scripted), asking(path)
    _, content = await send(session, path, first)
    text, calls, kept = answer_of(path, content)
    assert (text, calls) == ("The answer is 5.", [])
    assert "I could write <tool_call>" in content.decode()  # it is reasoning
    status, _ = await send(session, path, continuing(path, first, kept, calls))
    assert status == 200
    check_exact(session.calls, scripted, chains=[[0, 1]])


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_call_when_the_thought_never_ends_then_it_is_no_call(family, path):
    session = session_of(Scripted(f"<think>hm {call(family, 1)} so", family=family))
    _, content = await send(session, path, asking(path))
    assert answer_of(path, content)[:2] == ("", [])


@pytest.mark.parametrize("family", FAMILIES)
async def test_call_when_in_a_thought_that_the_prompt_opened_then_it_is_no_call(family):
    scripted = Scripted(f"hm {call(family, 1)}</think>{call(family, 2)}", family=family)
    path = "/chat/completions"
    asked = asking(path, continue_final_message=True)
    asked["messages"].append({"role": "assistant", "content": "<think>So, "})
    _, content = await send(session_of(scripted), path, asked)
    text, [(_, name, arguments)], _ = answer_of(path, content)
    assert (text, name, arguments) == ("", "f", {"a": 2})


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_when_only_one_may_be_then_the_first_after_the_thought(family):
    draft, one, two = (call(family, number) for number in range(3))
    said = f"<think>Maybe {draft}{draft}?</think>\n\n{one}\n{two}"
    scripted = Scripted(said, "done", family=family)
    session, path = session_of(scripted), "/chat/completions"
    first = asking(path, parallel_tool_calls=False)
    _, content = await send(session, path, first)
    _, calls, kept = answer_of(path, content)
    assert [(name, arguments) for _, name, arguments in calls] == [("f", {"a": 1})]
    # What is recorded ends with that call, not within the thought.
    await send(session, path, continuing(path, first, kept, calls))
    known = scripted.tokenizer.decode(session.calls.merged(1.0).trajectories[0].input_ids.tolist())
    assert f"<think>Maybe {draft}{draft}?</think>\n\n{one}" in known
    assert two not in known


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_stream_when_a_call_is_in_the_thought_then_it_is_streamed_as_reasoning(family, path):
    scripted = Scripted(f"<think>hm {call(family, 1)}</think>46", family=family)

    async def step(index: int, end: int) -> None:
        return None

    scripted.step = step
    _, content = await send(session_of(scripted), path, asking(path, stream=True))
    assert "tool_use" not in content.decode()
    assert "function_call" not in content.decode()
    assert not any(
        choice["delta"].get("tool_calls")
        for event in events_of(content)
        for choice in event.get("choices", [])
    )


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


async def test_tools_when_called_in_the_thought_then_not_run():
    asks = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
    engine = ScriptedEngine([[f"<think>{asks}</think>408"]], lambda completion, data: 1.0)
    made = ToolWorkflow([multiply], "math", GenerationHyperparameters(n_samples=1))
    [one] = await made.arun_episode(engine, {"prompt": "12 * 34?", "answer": "408"})
    assert engine.trained(one) == [f"<think>{asks}</think>408"]


def test_conversation_when_a_cut_thought_continues_then_its_calls_are_none():
    model = tokenizer("qwen3")
    chat = Conversation(model, [{"role": "user", "content": "?"}])
    replies = []
    for text in ("<think>hm ", "hm ", call("qwen3", 1), "</think>" + call("qwen3", 2)):
        ids = model.encode(text, add_special_tokens=False)
        length, zeros = len(ids), [0.0] * len(ids)
        cut = LLMResponse(chat.input_ids, ids, zeros, [0] * length, StopReason.LENGTH)
        replies.append(chat.add_response(cut))
    found = [[each.arguments for each in reply.tool_calls] for reply in replies]
    assert found == [[], [], [], [{"a": 2}]]
