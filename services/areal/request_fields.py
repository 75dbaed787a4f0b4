"""Reads the fields of a request's JSON, for every server that takes one.

A field gives its value, or one line of error: its name, what was expected, and the value. The agent
APIs, the CPU engine and the E2B API read with these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from areal.errors import InvalidInput
from areal.tokenizer.json_text import loads

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
_SHOWN_CHARS = 80
# Far inside what a double holds, and above any reward or setting.
_LARGEST = 1e9


class WrongKind(InvalidInput):
    """A field is missing, or its value is of another kind."""


class OutOfRange(InvalidInput):
    """A field's value is of the right kind, but not one of those that are allowed."""


def shown(value: Any) -> str:
    """Returns how an error shows a value: its first characters, or its type if it has no text."""
    try:
        text = str(value)[:_SHOWN_CHARS]
        return text if type(value) in (int, float) else repr(text)
    except (ValueError, RecursionError):  # a number of too many digits, or lists nested too deep
        return type(value).__name__


def wrong_kind(name: str, kind: Any, value: Any) -> WrongKind:
    """Returns the error for a value of another kind than the field's."""
    return WrongKind(f"{name}: expected {_NAMES[kind]}, got {shown(value)}")


def body_of(content: bytes) -> dict[str, Any]:
    """Returns a request's body, an object; raises WrongKind."""
    try:
        body = loads(content)
    except ValueError as error:
        raise WrongKind(f"body: not JSON ({error})") from None
    if not isinstance(body, dict):
        raise WrongKind("body: expected a JSON object")
    return body


def get(body: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T | None:
    """Returns a field that may be absent or null; raises WrongKind.

    Args:
        body: The object that has the field.
        name: The field.
        kind: `str`, `int`, `bool`, `list` or `dict`. true and false are no whole numbers.
        where: What precedes the name in an error, such as `messages[2].`.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong_kind(where + name, kind, value)
    return value


def need(body: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T:
    """Returns a required field; raises WrongKind."""
    value = get(body, name, kind, where)
    if value is None:
        raise WrongKind(f"{where}{name}: expected {_NAMES[kind]}, got none")
    return value


def whole(
    body: Mapping[str, Any], name: str, low: int, high: int | None = None, where: str = ""
) -> int | None:
    """Returns a whole number from low to high, or None; raises WrongKind or OutOfRange."""
    value = get(body, name, int, where)
    if value is not None and (value < low or (high is not None and value > high)):
        bound = f"{low} or more" if high is None else f"{low} to {high}"
        raise OutOfRange(f"{where}{name}: expected {bound}, got {shown(value)}")
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    low: float = -_LARGEST,
    high: float = _LARGEST,
    where: str = "",
) -> float | None:
    """Returns a finite number from low to high, or None; raises WrongKind or OutOfRange."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_kind(where + name, float, value)
    if not low <= value <= high:  # neither is NaN
        raise OutOfRange(f"{where}{name}: expected {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def texts_by_name(body: Mapping[str, Any], name: str) -> dict[str, str]:
    """Returns an object of strings, {} if the field is absent; raises WrongKind."""
    found: dict[str, Any] = get(body, name, dict) or {}
    for key, value in found.items():
        if not isinstance(value, str):
            raise wrong_kind(f"{name}[{shown(key)}]", str, value)
    return found
