"""Reads the arguments of a call, in each way in which families write them.

    {"a": 1, "b": "x"}                                   JSON
    <parameter=a>1</parameter><parameter=b>x</parameter> pairs, whose strings have no quotes
    {a:1,b:<|"|>x<|"|>}                                  Gemma's quotes
    a=1, b="x"                                           Python

Each reader gets the text and where the arguments begin. It returns them and where they end, or None
and where it stopped reading: what is before is not looked at again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from areal.tokenizer.json_text import loads
from areal.workflows.tool_values import MAX_DEPTH, value_of

Found = tuple[dict[str, Any] | None, int]
# What ends or nests a JSON object: brackets outside of strings. A string that no quote ends is one
# token as well, without its quote, and arguments never have a tag outside of their strings.
_JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+(?P<quote>"?)|[{}\[\]<]')
_PYTHON_TOKEN = re.compile(
    r"""(?P<q>["'])(?P<text>(?:(?!(?P=q))[^\\]|\\.)*+)(?P<quote>(?P=q)?)"""
    r"""|(?P<mark>[(){}\[\],:=])|(?P<word>[^\s(){}\[\],:="'<]++)|\s++""",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_MARKS = {"(": "[", ")": "]", "=": ":"}
_EQUALS = re.compile(r"\s*+=")
_ESCAPE = re.compile(r"\\(?:(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|(?P<one>.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_QUOTED_TOKEN = re.compile(
    r'<\|"\|>(?P<text>(?:(?!<\|"\|>).)*+)(?P<quote>(?:<\|"\|>)?)'
    r'|(?P<json>"(?:[^"\\\n]|\\.)*+")|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:<"]++)|\s++',
    re.DOTALL,
)


class Written:
    """A text that is read from left to right."""

    def __init__(self, text: str) -> None:
        """Begins at the start of the text."""
        self.text = text
        self._gone: set[re.Pattern[str]] = set()

    def find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """Returns the next match; one that is nowhere ahead is not looked for again."""
        found = None if pattern in self._gone else pattern.search(self.text, at)
        if found is None:
            self._gone.add(pattern)
        return found


class Reader(Protocol):
    """Reads arguments; see above."""

    def __call__(self, written: Written, at: int, schema: Mapping[str, Any], /) -> Found:
        """Returns the arguments, and where reading ended; `schema` is that of the arguments."""
        ...


def _json_arguments(written: Written, at: int, schema: Mapping[str, Any]) -> Found:
    """Reads a JSON object."""
    text, depth = written.text, 0
    if not text.startswith("{", at):
        return None, at
    for token in _JSON_TOKEN.finditer(text, at):
        mark = token[0]
        if mark[0] == '"':
            if token["quote"]:
                continue
            return None, token.end()
        if mark == "<":
            return None, token.start()
        depth += 1 if mark in "{[" else -1
        if depth == 0:
            return _object(text[at : token.end()]), token.end()
    return None, len(text)


JSON: Reader = _json_arguments


@dataclass(frozen=True)
class Pairs:
    """Reads keys and values between tags."""

    opens: re.Pattern[str]
    """What is before a value; has the group `key`."""
    closes: re.Pattern[str]
    """What is after a value."""
    trim: bool = False
    """Whether a line break at each end of a value is not part of it."""

    def __call__(self, written: Written, at: int, schema: Mapping[str, Any], /) -> Found:
        """See `Reader`."""
        arguments: dict[str, Any] = {}
        while (opened := self.opens.match(written.text, at)) is not None:
            at = opened.end()
            if (closed := written.find(self.closes, at)) is None:
                return None, at
            value = written.text[at : closed.start()]
            if self.trim:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[opened["key"]] = value_of(value, schema, opened["key"])
            at = closed.end()
        return arguments, at


def quoted_arguments(written: Written, at: int, schema: Mapping[str, Any]) -> Found:
    """Reads an object with Gemma's quotes and keys without quotes."""
    text, depth, parts = written.text, 0, list[str]()
    while (token := _QUOTED_TOKEN.match(text, at)) is not None:
        at = token.end()
        if token["text"] is not None:
            if not token["quote"]:
                return None, at
            parts.append(json.dumps(token["text"]))
        elif token["word"] is not None:
            parts.append(_word(token["word"], key=text.startswith(":", at)))
        elif mark := token["mark"]:
            parts.append(mark)
            depth += (mark in "{[") - (mark in "}]")
            if depth == 0:
                return _object("".join(parts)), at
        else:
            parts.append(token[0])
        if depth == 0:
            break  # it begins with no bracket
    return None, at


def _word(word: str, key: bool) -> str:
    """The JSON of a word without quotes."""
    if not key:
        try:
            loads(word)
            return word
        except ValueError:
            pass
    return json.dumps(word)


def python_arguments(written: Written, at: int, schema: Mapping[str, Any]) -> Found:
    """Reads the keyword arguments of a call in Python, up to its closing bracket."""
    text, depth, parts = written.text, 1, ["{"]
    while (token := _PYTHON_TOKEN.match(text, at)) is not None:
        at = token.end()
        if token["text"] is not None:
            if not token["quote"]:
                return None, at
            parts.append(json.dumps(_ESCAPE.sub(_unescaped, token["text"])))
        elif token["word"] is not None:
            word = token["word"]
            key = depth == 1 and _EQUALS.match(text, at) is not None
            parts.append(json.dumps(word) if key else _PYTHON_WORDS.get(word, word))
        elif mark := token["mark"]:
            depth += (mark in "([{") - (mark in ")]}")
            if mark in ")]}" and parts[-1] == ",":
                parts.pop()
            if depth == 0:
                return _object("".join([*parts, "}"])), token.start()
            parts.append(_PYTHON_MARKS.get(mark, mark))
    return None, at


def _unescaped(escape: re.Match[str]) -> str:
    """What a backslash and what is after it stand for."""
    if code := escape["code"]:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(escape["one"], escape[0])


def _object(source: str) -> dict[str, Any] | None:
    try:
        value = loads(source, MAX_DEPTH)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
