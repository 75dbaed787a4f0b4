import asyncio
import sys
import time
from typing import Annotated, Literal

import pytest
from pydantic import Field
from tests.unit.areal.workflows.chat_families import build
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters
from areal.workflows.specs import build_workflow, describe_workflow
from areal.workflows.tool import ToolWorkflow
from areal.workflows.tool_schema import arguments_of, schema_of

ROW = {"prompt": "What is 12 times 34?", "answer": "408"}


def multiply(a: int, b: Annotated[int, Field(description="The other one.")] = 2) -> int:
    """Multiplies two numbers."""
    return a * b


async def slow(unit: Literal["s", "ms"]) -> str:
    await asyncio.sleep(60)
    return unit


def fails(a: float) -> float:
    return a / 0


def call(name, **arguments):
    written = str(arguments).replace("'", '"')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def workflow(*tools, n=1, **options):
    return ToolWorkflow(list(tools), "math", GenerationHyperparameters(n_samples=n), **options)


def scored(completion, data):
    return float(data["answer"] in completion)


async def test_tools_when_called_then_results_are_context_and_the_last_answer_is_scored():
    asks = call("multiply", a=12, b=34) + "\n" + call("multiply", a=3)
    engine = ScriptedEngine([[asks], ["It is 408."]], scored)
    [one] = await workflow(multiply).arun_episode(engine, ROW)
    assert (one.reward, engine.scored) == (1.0, ["It is 408."])
    assert engine.trained(one) == [asks, "It is 408."]
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert "<tool_response>\n408\n</tool_response>\n<tool_response>\n6\n</tool_response>" in text
    assert '"name": "multiply", "description": "Multiplies two numbers."' in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("divide", a=1), "error: no tool 'divide'; expected one of multiply, slow, fails"),
        (call("multiply", a="x"), "error: a: Input should be a valid integer"),
        (call("multiply", c=1), "error: a: Field required"),
        (call("multiply", a=1, c=1), "error: c: Extra inputs are not permitted"),
        (call("fails", a=1), "error: ZeroDivisionError: float division by zero"),
        (call("slow", unit="s"), "error: no result within 0.2 s"),
    ],
)
async def test_call_when_it_fails_then_the_model_is_told_and_continues(asked, told):
    engine = ScriptedEngine([[asked], ["408"]], scored)
    made = workflow(multiply, slow, fails, tool_timeout_s=0.2)
    [one] = await made.arun_episode(engine, ROW)
    assert f"<tool_response>\n{told}" in engine.tokenizer.decode(one.input_ids.tolist())
    assert engine.trained(one) == [asked, "408"]


async def test_calls_when_in_one_answer_then_they_run_at_once():
    running, most = 0, 0

    async def wait(a: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return a

    def blocks(a: int) -> int:
        time.sleep(0.05)
        return a

    asks = "\n".join([call("wait", a=1), call("wait", a=2), call("blocks", a=3)])
    engine = ScriptedEngine([[asks], ["408"]], scored)
    [one] = await workflow(wait, blocks).arun_episode(engine, ROW)
    assert most == 2
    text = engine.tokenizer.decode(one.input_ids.tolist())
    places = [text.index(f"<tool_response>\n{i}\n") for i in (1, 2, 3)]
    assert places == sorted(places)  # in the order of the calls


async def test_turns_when_over_then_the_last_answer_counts_as_it_is():
    asks = call("multiply", a=1)
    engine = ScriptedEngine([[asks], [asks]], scored)
    [one] = await workflow(multiply, max_turns=2).arun_episode(engine, ROW)
    assert (one.reward, engine.trained(one)) == (0.0, [asks, asks])


async def test_group_when_sampled_then_each_conversation_has_its_own_turns():
    # One request for the first answers of all; each conversation continues by itself.
    engine = ScriptedEngine([["408", call("multiply", a=12, b=34), "1"], ["408"]], scored)
    group = await workflow(multiply, n=3).arun_episode(engine, ROW)
    assert [t.reward for t in group] == [1.0, 1.0, 0.0]
    assert [len(engine.trained(t)) for t in group] == [1, 2, 1]
    assert len(engine.requests) == 2


def test_schema_when_made_from_a_signature_then_types_defaults_and_descriptions():
    assert schema_of(multiply, arguments_of(multiply)) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "default": 2, "description": "The other one."},
                },
                "required": ["a"],
            },
        },
    }


def test_tool_when_a_parameter_has_no_type_then_refused():
    def untyped(a, b: int):
        return a

    def any_number(*a: int):
        return a

    with pytest.raises(InvalidInput, match="tool untyped: parameter a: expected"):
        workflow(untyped)
    with pytest.raises(InvalidInput, match="tool any_number: parameter"):
        workflow(any_number)


def test_workflow_when_described_then_a_worker_rebuilds_it():
    spec = describe_workflow(workflow(multiply, slow, n=5))
    rebuilt = build_workflow(spec, sys.modules[__name__])
    names = [schema["function"]["name"] for schema in rebuilt.calls.schemas([])]
    assert names == ["multiply", "slow"]
    assert rebuilt.gconfig.n_samples == 5


async def test_tool_when_glm_writes_text_that_looks_like_json_then_it_gets_the_text():
    def look_up(code: str) -> str:
        """Looks up."""
        return f"place {code!r}"

    pair = "<arg_key>code</arg_key>\n<arg_value>12345</arg_value>"
    asks = f"<tool_call>look_up\n{pair}\n</tool_call>"
    engine = ScriptedEngine([[asks], ["408"]], scored, family="glm-4.6")
    [one] = await workflow(look_up).arun_episode(engine, ROW)
    assert "place '12345'" in engine.tokenizer.decode(one.input_ids.tolist())


async def test_tools_when_the_template_has_no_place_for_them_then_refused():
    engine = ScriptedEngine([], scored)
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    engine.tokenizer = build(template, ["<end>"], [], ["<end>"])
    with pytest.raises(InvalidInput, match=r"no place for them \(multiply\)"):
        await workflow(multiply).arun_episode(engine, ROW)
