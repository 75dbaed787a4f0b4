"""Tool calls in an answer's text, in the forms of Qwen, Hermes, GLM and Llama 3.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    {"name": "add", "parameters": {"a": 1}}                                  the whole answer

What is not exactly a call stays text: JSON that is cut off, NaN, half a character, a thousand
brackets. The text is read once from left to right, so that the repetition of an opening tag, which
is how models collapse, costs no more than other text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areal.tokenizer.json_text import loads

MAX_DEPTH = 150
"""Levels of nesting in a call: fewer than in a request, in which clients send the call back."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"[\w.-]++")
_PLAIN_KEY = re.compile(r"[^<]*+")
# What ends or nests a JSON object: brackets outside of strings. A string that no quote ends is one
# token as well, without its quote, and a call never has a tag outside of its strings.
_JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+(?P<quote>"?)|[{}\[\]<]')


@dataclass(frozen=True)
class ToolCall:
    """A function that the model asks for."""

    name: str
    arguments: dict[str, Any]


def read_calls(text: str) -> tuple[ToolCall, ...]:
    """Returns the calls in an answer; never raises."""
    return tuple(call for _, _, call in _calls(text))


def without_calls(text: str) -> str:
    """Returns what is left of the text of an answer: all but the calls of `read_calls`."""
    parts, start = [], 0
    for begin, end, _ in _calls(text):
        parts.append(text[start:begin])
        start = end
    return "".join([*parts, text[start:]])


def _calls(text: str) -> Iterator[tuple[int, int, ToolCall]]:
    """Yields the begin and the end of each call, and the call."""
    tagged, at = False, 0
    values_until = text.rfind(_VALUE_END)
    while (begin := text.find(_OPEN, at)) >= 0:
        start = _after_space(text, begin + len(_OPEN))
        if text.startswith("{", start):
            at, call = _json_call(text, start)
        else:
            at, call = _glm_call(text, start, values_until)
        if call is not None:
            tagged = True
            yield begin, at, call
    bare = "" if tagged else text.strip()
    if bare.startswith("{") and (call := _call(bare)) is not None:
        yield 0, len(text), call


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing at all, too
    return found.end()


def _json_call(text: str, start: int) -> tuple[int, ToolCall | None]:
    """Returns where to continue, and the call whose object starts there, if it is one."""
    depth = 0
    for token in _JSON_TOKEN.finditer(text, start):
        mark = token[0]
        if mark[0] == '"':
            if token["quote"]:
                continue
            return token.end(), None
        if mark == "<":
            return token.start(), None
        depth += 1 if mark in "{[" else -1
        if depth == 0:
            end = _after_space(text, token.end())
            if not text.startswith(_CLOSE, end):
                return end, None
            return end + len(_CLOSE), _call(text[start : token.end()])
    return len(text), None


def _glm_call(text: str, start: int, values_until: int) -> tuple[int, ToolCall | None]:
    """Reads a call like `_json_call`; no value ends after `values_until`."""
    name = _NAME.match(text, start)
    if name is None:
        return start, None
    arguments: dict[str, Any] = {}
    at = _after_space(text, name.end())
    while text.startswith(_KEY, at):
        key = _PLAIN_KEY.match(text, at + len(_KEY))
        assert key is not None
        if not text.startswith(_KEY_END, key.end()):
            return key.end(), None
        at = _after_space(text, key.end() + len(_KEY_END))
        if not text.startswith(_VALUE, at):
            return at, None
        at += len(_VALUE)
        if at > values_until:
            return at, None
        end = text.index(_VALUE_END, at)
        arguments[key[0]] = _value(text[at:end])
        at = _after_space(text, end + len(_VALUE_END))
    if not text.startswith(_CLOSE, at):
        return at, None
    return at + len(_CLOSE), ToolCall(name[0], arguments)


def _call(source: str) -> ToolCall | None:
    """The call that a JSON text is."""
    try:
        call = loads(source, MAX_DEPTH)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None


def _value(text: str) -> Any:
    """Reads a value; GLM writes strings as they are, and everything else as JSON."""
    try:
        return loads(text, MAX_DEPTH)
    except ValueError:
        return text
