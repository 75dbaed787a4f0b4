"""Reads the fields that the agent APIs share; every error names the field and what was expected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal.agents.allowed import STREAM_OPTIONS
from areal.errors import InvalidInput
from areal.request_fields import get, number, shown, whole
from areal.tokenizer.json_text import json_object
from areal.types import SPLITS, TIMEOUTS, Score
from areal.workflows.rendering import Message

_PART = re.compile(r"[\w.-]{1,64}")
# The number must be spelled as we write it: no leading zeros, only ASCII digits.
_ANSWER = re.compile(r"(?:chatcmpl|cmpl|gen|msg|resp)-(.+)-(0|[1-9][0-9]{0,8})", re.DOTALL)
_MAX_ITEMS = 1 << 16
"""Messages or tools: more than any model's context has room for, and quickly read."""
# Each piece of an answer is compared with them while it is streamed.
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1000
_TAKEN = ("mean", "std", TIMEOUTS, SPLITS)
_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"}
"""Variables of chat templates that are set by other means."""


def count(body: Mapping[str, Any], name: str, most: int = 1 << 31) -> int | None:
    """Returns a number of 1 or more."""
    return whole(body, name, 1, most)


def score(body: Mapping[str, Any]) -> Score | None:
    """Returns `reward` with its `parts`, numbers by name."""
    value, parts = number(body, "reward"), get(body, "parts", dict)
    if value is not None:
        return Score(value, _parts(parts or {}))
    if parts:
        raise InvalidInput("reward: expected a number in addition to parts, got none")
    return None


def _parts(parts: Mapping[str, Any]) -> dict[str, float]:
    """Returns parts of a reward by name; each becomes a metric, `reward/NAME`, beside the total."""
    if len(parts) > 32:
        raise InvalidInput(f"parts: got {len(parts)}, expected at most 32")
    for name, value in parts.items():
        if name in _TAKEN or not _PART.fullmatch(name):
            raise InvalidInput(
                f"parts {name[:80]!r}: expected a name of up to 64 letters, digits, '_', '-' and "
                f"'.', other than {', '.join(_TAKEN)}"
            )
        if not isinstance(value, (int, float)) or not -1e9 < value < 1e9:
            raise InvalidInput(f"parts {name}: expected a number, got {shown(value)}")
    return {name: float(value) for name, value in parts.items()}


def arguments_of(value: Any) -> dict[str, Any]:
    """Returns the arguments of a call in a history: an object, or its JSON text.

    A history contains what some model once wrote. An agent sends it with every later request, so a
    refusal would end the conversation. What is no JSON object becomes {}, as in vLLM.
    """
    try:
        return json_object(value, "arguments")
    except InvalidInput:
        return {}


def template_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of the chat template that a request sets; raises InvalidInput."""
    variables = get(body, "chat_template_kwargs", dict) or {}
    for name in variables:
        if not name.isidentifier() or name in _OURS:
            raise InvalidInput(
                f"chat_template_kwargs {name[:80]!r}: expected a variable of the chat template "
                f"other than {', '.join(sorted(_OURS))}"
            )
    return variables


def objects(values: Sequence[Any], where: str) -> Sequence[Message]:
    """A list of objects."""
    if len(values) > _MAX_ITEMS:
        raise InvalidInput(f"{where}: {len(values)} items, expected at most {_MAX_ITEMS}")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidInput(f"{where}[{index}]: expected an object")
    return values


def distinct(names: Sequence[str], field: str) -> None:
    """Raises InvalidInput unless each tool has a name of its own; `field`: `tools[{}].name`."""
    seen = set[str]()
    for index, name in enumerate(names):
        where = field.format(index)
        if not name:
            raise InvalidInput(f"{where}: expected a name, got ''")
        if name in seen:
            raise InvalidInput(f"{where} {shown(name)}: expected one tool of that name")
        seen.add(name)


def usage_wanted(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage; raises InvalidInput."""
    options = get(body, "stream_options", dict) or {}
    STREAM_OPTIONS.check(options, "stream_options.")
    return get(options, "include_usage", bool, "stream_options.") is True


def number_of(answer_id: str, session_id: str) -> int | None:
    """Returns the number in the id of a session's answer, or None if it is no such id."""
    found = _ANSWER.fullmatch(answer_id)
    return int(found[2]) if found and found[1] == session_id else None


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings, none empty; an empty list if absent."""
    value = body.get(name)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise InvalidInput(f"{name}: expected a text, or a list of texts, got {shown(value)}")
    if len(values) > _MAX_STOPS or max(map(len, values), default=0) > _MAX_STOP_CHARS:
        raise InvalidInput(
            f"{name}: expected at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARS} characters"
        )
    return tuple(values)
