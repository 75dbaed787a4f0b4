"""Tool calls in an answer's text, in the forms in which the families of models write them.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    {"name": "add", "parameters": {"a": 1}}                                  the whole answer

`FORMS` has all of them, by family. What is not exactly a call stays text: JSON that is cut off,
NaN, half a character, a thousand brackets. The text is read once from left to right, so that the
repetition of an opening tag, which is how models collapse, costs no more than other text.
"""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.tokenizer.json_text import loads
from areal.workflows.tool_arguments import (
    JSON,
    Pairs,
    Reader,
    Written,
    python_arguments,
    quoted_arguments,
)
from areal.workflows.tool_values import MAX_DEPTH, Schemas, schemas_of


@dataclass(frozen=True)
class ToolCall:
    """A function that the model asks for."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The call's id, in families that write one."""


@dataclass(frozen=True)
class _Form:
    """How a family writes calls: `opens (head arguments tail between)* closes`."""

    family: str
    opens: re.Pattern[str]
    """What is before the first call."""
    head: re.Pattern[str]
    """What is before a call's arguments; has the groups `name` and `id`, as far as written."""
    arguments: Reader
    """Reads the arguments; without a `name` in the head, an object with name and arguments."""
    tail: re.Pattern[str]
    closes: re.Pattern[str] | None = None
    """What is after the last of several calls; None: there is one."""
    between: re.Pattern[str] = re.compile(r"[\s,]*+")


def _form(family: str, opens: str, head: str, arguments: Reader, tail: str, **more: str) -> _Form:
    compiled = {name: re.compile(pattern) for name, pattern in more.items()}
    return _Form(
        family, re.compile(opens), re.compile(head), arguments, re.compile(tail), **compiled
    )


_NAME = r"(?P<name>[\w.-]++)"
_TAG = r"(?P<name>[^<>\n\"]++)"
_XML = Pairs(
    re.compile(r"\s*+<parameter=(?P<key>[^<>\n]++)>"),
    re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))"),
    trim=True,
)
_GLM = Pairs(
    re.compile(r"\s*+<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>"),
    re.compile(r"</arg_value>"),
)
_MINIMAX = Pairs(
    re.compile(r'\s*+<parameter name="(?P<key>[^"\n]++)">'),
    re.compile(r"</parameter>(?=\s*+(?:<parameter name=|</invoke>))"),
    trim=True,
)
_MESSAGE = r"(?:<\|end\|>)?+(?:<\|start\|>assistant)?+"
_KIND = r"(?: ?(?:<\|constrain\|>)?+\w*+)<\|message\|>\s*+"
FORMS = (
    _form("Qwen, Hermes, Granite 4", r"<tool_call>\s*+", r"(?={)", JSON, r"\s*+</tool_call>"),
    _form("GLM", r"<tool_call>\s*+", _NAME, _GLM, r"\s*+</tool_call>"),
    _form(
        "Qwen3.5, Qwen3-Next, Qwen3-Coder, Nemotron 3",
        r"<tool_call>\s*+",
        rf"<function={_TAG}>",
        _XML,
        r"\s*+</function>\s*+</tool_call>",
    ),
    _form(
        "Qwen3-Coder without the outer tag",
        "",
        rf"<function={_TAG}>",
        _XML,
        r"\s*+</function>(?:\s*+</tool_call>)?+",
    ),
    _form(
        "MiniMax-M2",
        r"<minimax:tool_call>\s*+",
        rf'<invoke name="{_TAG}">',
        _MINIMAX,
        r"\s*+</invoke>",
        closes=r"\s*+</minimax:tool_call>",
    ),
    _form(
        "DeepSeek V3 and R1",
        r"(?:<｜tool▁calls▁begin｜>\s*+)?+(?=<｜tool▁call▁begin｜>function<)",
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*+```json\s*+",
        JSON,
        r"\s*+```\s*+<｜tool▁call▁end｜>",
        closes=r"\s*+<｜tool▁calls▁end｜>",
    ),
    _form(
        "DeepSeek V3.1",
        r"(?:<｜tool▁calls▁begin｜>\s*+)?+(?=<｜tool▁call▁begin｜>)",
        rf"<｜tool▁call▁begin｜>\s*+{_NAME}\s*+<｜tool▁sep｜>\s*+",
        JSON,
        r"\s*+<｜tool▁call▁end｜>",
        closes=r"\s*+<｜tool▁calls▁end｜>",
    ),
    _form(
        "Kimi K2",
        r"(?:<\|tool_calls_section_begin\|>\s*+)?+(?=<\|tool_call_begin\|>)",
        r"<\|tool_call_begin\|>\s*+(?P<id>(?:functions\.)?+(?P<name>[\w.-]++)(?::\d++)?+)\s*+"
        r"<\|tool_call_argument_begin\|>\s*+",
        JSON,
        r"\s*+<\|tool_call_end\|>",
        closes=r"\s*+<\|tool_calls_section_end\|>",
    ),
    _form(
        "Mistral",
        r"\[TOOL_CALLS\]\s*+",
        r"(?P<name>[\w.-]++)(?:\[CALL_ID\](?P<id>\w++))?+\s*+(?:\[ARGS\])?+\s*+",
        JSON,
        "",
    ),
    _form(
        "Mistral 7B and Nemo, Phi-4-mini, Granite 3, Llama-Nemotron",
        r"(?:\[TOOL_CALLS\]|<\|tool_call\|>|<TOOLCALL>)\s*+\[\s*+",
        r"(?={)",
        JSON,
        "",
        closes=r"\s*+\](?:\s*+(?:<\|/tool_call\|>|</TOOLCALL>))?+",
    ),
    _form(
        "Gemma 4",
        r"<\|tool_call>\s*+",
        rf"call:\s*+{_NAME}\s*+",
        quoted_arguments,
        r"\s*+<tool_call\|>",
    ),
    _form(
        "LFM2",
        r"<\|tool_call_start\|>\s*+\[\s*+",
        rf"{_NAME}\(",
        python_arguments,
        r"\)",
        closes=r"\s*+\]\s*+<\|tool_call_end\|>",
    ),
    _form(
        "OLMo 3",
        r"<function_calls>\s*+",
        rf"{_NAME}\(",
        python_arguments,
        r"\)",
        closes=r"\s*+</function_calls>",
    ),
    _form(
        "gpt-oss",
        rf"{_MESSAGE}(?=<\|channel\|>)",
        rf"<\|channel\|>\w++ to=functions\.{_NAME}{_KIND}",
        JSON,
        r"(?:<\|call\|>)?+",
    ),
    _form(
        "gpt-oss, as its template writes it",
        rf"{_MESSAGE} ?+(?=to=)",
        rf"to=functions\.{_NAME}<\|channel\|>\w++{_KIND}",
        JSON,
        r"(?:<\|call\|>)?+",
    ),
)
MARKS = (
    "<tool_call>", "<function=", "<minimax:tool_call>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "[TOOL_CALLS]",
    "<|tool_call|>", "<TOOLCALL>", "<|tool_call>", "<|tool_call_start|>", "<function_calls>",
    "<|end|>", "<|start|>assistant", "<|channel|>commentary to=", "<|channel|>analysis to=",
    "to=functions.",
)  # fmt: skip
"""With one of these a call begins, unless it is the whole answer."""
_MARK = re.compile("|".join(map(re.escape, MARKS)))


def read_calls(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, bare: bool = False
) -> tuple[ToolCall, ...]:
    """Returns the calls in an answer; never raises.

    Args:
        text: The answer, without its reasoning.
        tools: The tools on offer, whose schemas tell strings from other values; None: not known.
        bare: Whether the family writes a call as a JSON object that is the whole answer.
    """
    return split_calls(text, tools, bare)[0]


def split_calls(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, bare: bool = False
) -> tuple[tuple[ToolCall, ...], str]:
    """Returns the calls of `read_calls`, and what is left of the text without them."""
    calls: list[ToolCall] = []
    parts, start = [], 0
    for begin, end, found in _blocks(text, schemas_of(tools)):
        calls += found
        parts.append(text[start:begin])
        start = end
    rest = "".join([*parts, text[start:]])
    if bare and not calls and (call := _bare_call(rest, tools)) is not None:
        return (call,), ""
    return tuple(calls), rest


def _bare_call(text: str, tools: Sequence[Mapping[str, Any]] | None) -> ToolCall | None:
    """The call that a whole answer is, if its function is on offer."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        return None
    try:
        call = _named(loads(stripped, MAX_DEPTH))
    except ValueError:
        return None
    known = tools is None or (call is not None and call.name in schemas_of(tools))
    return call if known else None


def _blocks(text: str, schemas: Schemas) -> Iterator[tuple[int, int, list[ToolCall]]]:
    """Yields the begin and the end of each text of calls, and the calls."""
    written, at = Written(text), 0
    while (mark := _MARK.search(text, at)) is not None:
        begin, at = mark.start(), mark.end()
        for form in FORMS:
            calls, end = _read(form, written, begin, schemas)
            if calls:
                yield begin, end, calls
                at = end
                break
            at = max(at, end)


def _read(
    form: _Form, written: Written, begin: int, schemas: Schemas
) -> tuple[list[ToolCall], int]:
    """Returns the calls in a form that begin there, and where they end, or reading failed."""
    calls: list[ToolCall] = []
    text = written.text
    if (opened := form.opens.match(text, begin)) is None:
        return calls, begin
    end = at = opened.end()
    while (head := form.head.match(text, at)) is not None:
        names = head.groupdict()
        name = names.get("name")
        value, at = form.arguments(written, head.end(), schemas.get(name or "", {}))
        tail = None if value is None else form.tail.match(text, at)
        # Where calls are in a list, each has its id.
        call = (
            _named(value, with_id=form.closes is not None)
            if name is None
            else ToolCall(name, value or {}, names.get("id") or "")
        )
        if tail is None or call is None:
            return calls, end if calls else at
        calls.append(call)
        end = tail.end()
        if form.closes is None:
            break
        at = form.between.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing
    if calls and form.closes is not None and (closed := form.closes.match(text, end)) is not None:
        end = closed.end()
    return calls, end


def _named(value: Any, with_id: bool = False) -> ToolCall | None:
    """The call that an object with a name and arguments is."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    known = value.get("id") if with_id else None
    return ToolCall(value["name"], arguments, known if isinstance(known, str) else "")
