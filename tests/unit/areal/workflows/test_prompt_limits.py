"""Rows that no server would take are refused before the first step, whatever their workflow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.areal.workflows.test_rlvr import Engine

from areal.agents.workflow import AgentWorkflow
from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal.types import McpServer
from areal.workflows.base import RolloutWorkflow
from areal.workflows.environment import EnvWorkflow
from areal.workflows.multi_turn import MultiTurnWorkflow
from areal.workflows.prompt_limits import check_prompts
from areal.workflows.rlvr import RLVRWorkflow
from areal.workflows.tool import ToolWorkflow
from areal_torch.models.tiny import CHAT_TEMPLATE, END_ID, make_byte_tokenizer


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return 0.0


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer(
        make_byte_tokenizer(), chat_template=CHAT_TEMPLATE, eos_token_ids=[END_ID], **changes
    )


def check(workflow: RolloutWorkflow, rows: list[Any], most: int, **changes: Any) -> None:
    check_prompts(workflow, rows, lambda: tokenizer(**changes), most)


KNOWN = [RLVRWorkflow("math"), MultiTurnWorkflow("math"), ToolWorkflow([], "math")]


@pytest.mark.parametrize("workflow", KNOWN, ids=lambda each: type(each).__name__)
def test_prompts_when_one_is_too_long_then_its_row_is_named(workflow: RolloutWorkflow) -> None:
    rows = [{"messages": [{"role": "user", "content": "Oslo?"}]}]
    rows += [{"prompt": "x" * 90}, {"prompt": "x" * 91}]  # type: ignore[dict-item]
    check(workflow, rows[:2], 99)
    with pytest.raises(InvalidInput, match=r"row 3: a prompt of 93 tokens .* at most 92 \(model.c"):
        check(workflow, rows, 99)
    with pytest.raises(InvalidInput, match=r"row 2: .* 57"):
        check(workflow, rows, 99, longest=57)


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow])
def test_prompts_when_the_system_prompt_fills_the_context_then_short_rows_are_refused(
    kind: type,
) -> None:
    rows = [{"prompt": "x"}, {"prompt": "x" * 20}]
    check(kind("math", system_prompt="s" * 100), rows, 200)
    with pytest.raises(InvalidInput, match=r"row 1: a prompt of \d+ tokens leaves no room"):
        check(kind("math", system_prompt="s" * 200), rows, 200)
    with pytest.raises(InvalidInput, match=r"row 2: a prompt of \d+ tokens leaves no room"):
        check(kind("math", system_prompt="s" * 175), rows, 200)


def test_prompts_when_tools_fill_the_context_then_refused() -> None:
    template = "{{ tools | tojson }}" + CHAT_TEMPLATE
    engine = Engine(template)
    shown = len(ToolWorkflow([add]).prompt_ids(engine, {"prompt": "x"}))
    assert shown > len(ToolWorkflow([]).prompt_ids(engine, {"prompt": "x"}))
    read = lambda: Tokenizer(make_byte_tokenizer(), chat_template=template)  # noqa: E731
    check_prompts(ToolWorkflow([add]), [{"prompt": "x"}], read, shown + 7)
    with pytest.raises(InvalidInput, match=f"row 1: a prompt of {shown} tokens"):
        check_prompts(ToolWorkflow([add]), [{"prompt": "x"}], read, shown + 6)


@pytest.mark.parametrize("workflow", KNOWN, ids=lambda each: type(each).__name__)
def test_prompts_when_an_id_is_beyond_the_vocabulary_then_the_short_row_is_named(
    workflow: RolloutWorkflow,
) -> None:
    rows = [{"prompt": "x"}, {"prompt": "y"}]
    check(workflow, rows, 4096)
    beyond = max(tokenizer().encode("y"))
    template_ids = max(tokenizer().apply_chat_template([{"role": "user", "content": ""}]))
    with pytest.raises(InvalidInput, match=r"row 1: token id \d+, expected less than"):
        check(workflow, rows, 4096, vocab_size=min(beyond, template_ids))


def test_prompts_when_only_an_episode_knows_them_then_nothing_is_loaded() -> None:
    def never() -> Tokenizer:
        raise AssertionError

    for workflow in (AgentWorkflow(run), EnvWorkflow(dict)):
        check_prompts(workflow, [{"prompt": "x" * 10_000}], never, 100)
    check_prompts(RLVRWorkflow("math"), [], never, 100)


def test_prompts_when_a_row_is_malformed_then_it_is_named() -> None:
    for workflow in KNOWN:
        with pytest.raises(InvalidInput, match="row 1: data: expected 'messages'"):
            check(workflow, [{"question": "x"}], 100)
        with pytest.raises(InvalidInput, match="row 1: expected a dict, got str"):
            check(workflow, ["x"], 100)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "None: expected text"),
        ({"role": "user"}, "None: expected text"),
        ({"role": "user", "content": 3}, "3: expected text"),
        ({"role": "user", "content": float("nan")}, "nan: expected text"),
        ({"role": "assistant", "content": None}, "None: expected text, or null beside tool_calls"),
    ],
)
@pytest.mark.parametrize("system", [None, "Add."])
@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow, ToolWorkflow])
def test_prompts_when_a_content_is_no_text_then_the_message_is_named(
    kind: type, system: str | None, message: dict[str, Any], said: str
) -> None:
    workflow = kind(*([[]] if kind is ToolWorkflow else []), "math", system_prompt=system)
    rows = [{"messages": [{"role": "user", "content": "a"}, message]}]
    with pytest.raises(InvalidInput, match=rf"row 1: messages\[1\]\.content {said} .*template"):
        check(workflow, rows, 100)


def test_prompts_when_a_call_has_no_content_then_the_template_decides() -> None:
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call]}
    read = lambda: Tokenizer(make_byte_tokenizer(), chat_template=template)  # noqa: E731
    check_prompts(RLVRWorkflow("math"), [row], read, 100)


def test_prompts_when_tools_of_servers_are_unknown_then_the_rest_counts() -> None:
    workflow = ToolWorkflow([McpServer(["no-such-server"])])
    check(workflow, [{"prompt": "x", "tools": [{"name": "theirs"}]}], 100)
    with pytest.raises(InvalidInput, match="row 1: a prompt of"):
        check(workflow, [{"prompt": "x" * 100}], 100)
    with pytest.raises(InvalidInput, match="row 1: row field 'tools'"):
        check(ToolWorkflow([add]), [{"prompt": "x", "tools": [{"name": "theirs"}]}], 1000)


@given(
    st.lists(st.text(max_size=60), min_size=1, max_size=6),
    st.text(max_size=40),
    st.integers(20, 160),
)
def test_prompts_when_any_then_refused_exactly_when_one_does_not_fit(
    texts: list[str], system: str, most: int
) -> None:
    workflow = MultiTurnWorkflow("math", system_prompt=system)
    engine = Engine(CHAT_TEMPLATE)
    lengths = [len(workflow.prompt_ids(engine, {"prompt": text})) for text in texts]
    rows = [{"prompt": text} for text in texts]
    too_long = [number for number, length in enumerate(lengths, 1) if length > most - 7]
    if not too_long:
        check(workflow, rows, most)
        return
    with pytest.raises(InvalidInput, match=f"^row {too_long[0]}: "):
        check(workflow, rows, most)


def test_images_when_a_row_has_some_then_its_text_still_counts() -> None:
    content = "{{ m.content if m.content is string else m.content[-1].text }}"
    template = "{% for m in messages %}{{ m.role }}" + content + "{% endfor %}"
    read = lambda: Tokenizer(make_byte_tokenizer(), chat_template=template)  # noqa: E731
    seen: dict[str, Any] = {"prompt": "x", "images": [b"y" * 500]}
    check_prompts(RLVRWorkflow("math"), [seen], read, 100)
    with pytest.raises(InvalidInput, match="row 2: a prompt of 104 tokens"):
        check_prompts(RLVRWorkflow("math"), [seen, {**seen, "prompt": "x" * 100}], read, 100)
