"""Refuses a chat of which the template would leave something out: training would never show it.

Templates ignore what they do not know. Plain words stand in for what the chat has, and the ones
that are missing from the text tell what was left out:

    {"role": "tool", "content": "22 °C"} --> {"role": "tool", "content": "ARRIVED3X"}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal.errors import InvalidInput
from areal.tokenizer.chat_template import REASONING, Message, plain_messages, plain_tools

Render = Callable[[Sequence[Message], Sequence[Message] | None], str]
"""Returns the text of a conversation and its tools, without the header of another answer."""

_END_OF_THOUGHT = "</think>"


def refuse_left_out(render: Render, messages: Sequence[Message], tools: Any = None) -> None:
    """Raises an error if the template leaves out the tools, a message or a part of one.

    A template may drop a part of an earlier message, as many do with reasoning, if it shows the
    part while the message is the last one.

    Args:
        render: Renders with the template.
        messages: The conversation.
        tools: The JSON schemas of the tools, or their JSON text.

    Raises:
        InvalidInput: Something is left out; the message names the field. Or the messages are
            malformed, or the template refuses them.
    """
    offered = plain_tools(tools)
    plain = plain_messages(messages)
    text = render(plain, offered)
    if offered and text == render(plain, None):
        raise InvalidInput(f"tools: the chat template has no place for them ({_names(offered)})")
    words = _Words()
    probe = [
        words.stand_in(index, message, _reasoning_name(given))
        for index, (message, given) in enumerate(zip(plain, messages, strict=True))
    ]
    shown = _try(render, probe, offered)
    if shown is None:
        return  # it reads contents, so no placeholder can replace one
    for index, message in enumerate(plain):
        fields = words.of(index)
        gone = [field for field, word in fields.items() if word not in shown]
        if gone:
            as_last = _try(render, probe[: index + 1], offered) or ""
            gone = [field for field in gone if fields[field] not in as_last]
        if gone and len(gone) == len(fields) and message["role"] != "assistant":
            raise _left_out(f"messages[{index}].role", repr(message["role"]))
        if gone:
            raise _left_out(f"messages[{index}].{gone[0]}", "it")
        for field, word in fields.items():
            if f"'text': '{word}'" in shown:
                raise _left_out(f"messages[{index}].{field}", "a list of parts")


def _reasoning_name(message: Message) -> str:
    return next((name for name in REASONING if message.get(name) is not None), "")


def _left_out(field: str, what: str) -> InvalidInput:
    return InvalidInput(
        f"{field}: the chat template has no place for {what}; remove it from the row, or use "
        "another template"
    )


def _names(tools: Sequence[Message]) -> str:
    return ", ".join(
        str((tool.get("function") or tool).get("name", "without a name")) for tool in tools
    )


def _try(render: Render, messages: list[Message], tools: Sequence[Message] | None) -> str | None:
    try:
        return render(messages, tools)
    except InvalidInput:
        return None


class _Words:
    """The words that stand for the parts of a chat, by message and field."""

    def __init__(self) -> None:
        self._words: dict[int, dict[str, str]] = {}
        self._count = 0

    def of(self, index: int) -> dict[str, str]:
        """The words of a message that must arrive, by field."""
        return self._words[index]

    def stand_in(self, index: int, message: Message, reasoning: str) -> Message:
        """Returns the message with a word for each text in it; `reasoning` names its reasoning."""
        self._words[index] = {}
        probe = dict(message)
        if isinstance(content := message.get("content"), str) and content.strip():
            probe["content"] = self._content(index, message["role"], content)
        elif isinstance(content, (list, tuple)):
            probe["content"] = [
                self._part(index, number, part) for number, part in enumerate(content)
            ]
        if reasoning and str(message[reasoning]).strip():
            probe |= dict.fromkeys(REASONING, self._expect(index, reasoning))
        if calls := message.get("tool_calls"):
            probe["tool_calls"] = [
                self._call(index, number, call) for number, call in enumerate(calls)
            ]
        if message.get("function_call"):
            probe["function_call"] = {"name": self._expect(index, "function_call"), "arguments": ""}
        return probe

    def _content(self, index: int, role: str, content: str) -> str:
        thought, end, said = content.rpartition(_END_OF_THOUGHT)
        if role != "assistant" or not end:
            return self._expect(index, "content")
        probe = end
        if thought.replace("<think>", "").strip():
            word = self._expect(index, "content (its reasoning)")
            opening = "<think>\n" if "<think>" in thought else ""
            probe = f"{opening}{word}\n{end}"
        return f"{probe}\n\n{self._expect(index, 'content')}" if said.strip() else probe

    def _part(self, index: int, number: int, part: Any) -> Any:
        if not (isinstance(part, dict) and str(part.get("text") or "").strip()):
            return part
        return {**part, "text": self._expect(index, f"content[{number}]")}

    def _call(self, index: int, number: int, call: Message) -> Message:
        name = self._expect(index, f"tool_calls[{number}]")
        if "function" in call:
            return {**call, "function": {**call["function"], "name": name}}
        return {**call, "name": name}

    def _expect(self, index: int, field: str) -> str:
        self._count += 1
        self._words[index][field] = word = f"ARRIVED{self._count}X"
        return word
