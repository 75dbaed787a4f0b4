"""Which message and field of a history an agent changed: named for every API and every change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.agents import outlines as outlines_module
from areal.agents.chat import Answer, Call, ChatRequest
from areal.agents.outlines import Outline, differences
from areal.tokenizer import json_text
from areal.types import SPLIT_FIELDS, LLMResponse, StopReason, split_field, split_message

NOTHING = LLMResponse([], [], [], [], StopReason.STOP)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def asked(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


FIRST: list[dict[str, Any]] = [
    {"role": "system", "content": "it is 12:00"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [asked("weather", {"town": "Oslo"})]},
    {"role": "tool", "content": "rain"},
]
ANSWER = Answer(0, NOTHING, "It rains.")
LATER = [*FIRST, ANSWER.message, {"role": "user", "content": "more"}]


def outline(
    messages: list[dict[str, Any]], extends: int | None = None, answer: Answer = ANSWER, **more: Any
) -> str:
    request = ChatRequest(messages, **more)
    return Outline.of(request, extends, messages, answer).write()


def difference(outlines: list[str], number: int) -> str:
    [path] = differences(outlines, [number])
    return path


def changed(where: str, value: Any) -> list[dict[str, Any]]:
    """LATER with another value at a path, such as `0.content`."""
    found: Any = copy.deepcopy(LATER)
    *way, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    at = found
    for key in way:
        at = at[key]
    at[last] = value
    return found


@pytest.mark.parametrize(
    ("where", "value", "path"),
    [
        ("0.content", "it is 12:01", "messages[0].content"),
        ("1.role", "developer", "messages[1].role"),
        ("2.tool_calls.0.function.name", "rain", "messages[2].tool_calls[0].function.name"),
        (
            "2.tool_calls.0.function.arguments",
            {"town": "Bergen"},
            "messages[2].tool_calls[0].function.arguments",
        ),
        ("2.tool_calls", [], "messages[2].tool_calls"),
        ("2.content", "Calling weather", "messages[2].content"),
        ("3.content", "sun", "messages[3].content"),
        ("4.content", "It is raining.", "messages[4].content"),
        ("0.content", " it is 12:00\n", ""),
        ("2.tool_calls.0.id", "another", ""),
        ("2.tool_calls.0.function.arguments", {"town": "Oslo"}, ""),
        ("5.content", "other", ""),
    ],
)
def test_difference_when_a_message_was_changed_then_its_number_and_field_are_named(
    where: str, value: Any, path: str
) -> None:
    assert difference([outline(FIRST), outline(changed(where, value))], 1) == path
    # The same of a history that was stored in pieces.
    pieces = [outline(FIRST[:2]), outline(FIRST[2:], 0, ANSWER)]
    first = [*FIRST[:2], ANSWER.message, *FIRST[2:]]
    assert difference([outline(first), outline(changed(where, value))], 1) != ""
    assert difference([*pieces, outline([*first, ANSWER.message, LATER[-1]])], 2) == ""


def test_difference_when_messages_are_left_out_then_the_first_that_is_elsewhere_is_named() -> None:
    shorter = [LATER[0], *LATER[4:]]
    assert difference([outline(FIRST), outline(shorter)], 1) == "messages[1].role"
    assert difference([outline(FIRST), outline(LATER[:2])], 1) == "", "it is a branch"


def test_difference_when_tools_or_variables_changed_then_these_are_named() -> None:
    one = outline(FIRST)
    assert difference([one, outline(LATER, tools=[TOOL])], 1) == "tools"
    thinks = outline(LATER, variables={"enable_thinking": False})
    assert difference([one, thinks], 1) == "chat_template_kwargs"


def test_difference_when_several_conversations_are_there_then_the_nearest_is_compared() -> None:
    other = [{"role": "user", "content": "another conversation"}]
    later = outline(changed("3.content", "sun"))
    for outlines in ([outline(FIRST), outline(other), later], [outline(other), outline(FIRST)]):
        assert difference([*outlines[:2], later], 2) == "messages[3].content"


def test_difference_when_an_answer_is_sent_back_in_any_of_its_ways_then_none() -> None:
    stopped = Answer(0, NOTHING, "x = 1", stopped_by="</code>")
    for content in ("x = 1", "x = 1</code>"):
        later = [*FIRST, {"role": "assistant", "content": content}, LATER[-1]]
        assert difference([outline(FIRST, answer=stopped), outline(later)], 1) == ""
    begun = outline(FIRST, begun="It ")
    assert difference([begun, outline(changed("4.content", "It It rains."))], 1) == ""


def test_difference_when_a_call_of_the_answer_was_rewritten_then_it_is_named() -> None:
    answer = Answer(0, NOTHING, "", calls=(Call("call_1", "add", '{"a": 3.0}'),))
    for number, path in ((3, ""), (4, "messages[1].tool_calls[0].function.arguments")):
        sent = {"role": "assistant", "content": "", "tool_calls": [asked("add", {"a": number})]}
        later = outline([FIRST[0], sent, LATER[-1]])
        assert difference([outline(FIRST[:1], answer=answer), later], 1) == path


def test_difference_when_there_is_no_outline_then_nothing_is_named() -> None:
    assert difference(["", outline(LATER)], 1) == ""
    assert difference([outline(FIRST), ""], 1) == ""
    assert difference([outline(FIRST)], 0) == ""


@pytest.mark.parametrize("turns", [1, 100])
def test_differences_when_every_answer_splits_then_each_outline_is_read_once(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a conversation of so many answers, of which all share the beginning."""
    read: list[str] = []

    def loads(content: str) -> Any:
        read.append(content)
        return json_text.loads(content)

    monkeypatch.setattr(outlines_module, "loads", loads)
    talk = [
        outline(FIRST if turn == 0 else LATER[-1:], turn - 1 if turn else None)
        for turn in range(turns)
    ]
    splits = [outline(changed("0.content", f"it is 12:{minute}")) for minute in range(200)]
    outlines = [*talk, *splits]
    paths = differences(outlines, range(turns, len(outlines)))
    assert paths == ["messages[0].content"] * 200
    assert sorted(read) == sorted(outlines)


TEXT = st.text(max_size=3)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXT})


@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_difference_when_any_then_its_field_is_known(
    histories: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    outlines = [
        outline(each, data.draw(st.none() | st.integers(0, number)))
        for number, each in enumerate(histories)
    ]
    path = difference(outlines, len(outlines) - 1)
    assert not path or split_field(path) in SPLIT_FIELDS
    assert not path or split_message(path) is not None


def test_fields_when_read_from_a_path_then_numbers_are_left_out() -> None:
    path = "messages[12].tool_calls[3].function.arguments"
    assert (split_field(path), split_message(path)) == ("tool_calls.function.arguments", 12)
    assert (split_field("tools"), split_message("tools")) == ("tools", None)
    assert split_field("anything a stranger wrote") == "prompt"
