"""JSON to values and back, with integers of any size.

orjson reads an integer beyond 64 bits as a float and refuses to write one. Rows have such integers:
the answers to number theory, and ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import orjson

from areal.errors import InvalidInput

# The shortest number that may not fit; a text of digits only costs the slower parser.
_MANY_DIGITS = re.compile(r"\d{19}")
_LEAST, _MOST = -(2**63), 2**64 - 1


def loads(content: str | bytes) -> Any:
    """Returns the value of a JSON text in UTF-8; integers stay integers.

    Raises:
        ValueError: The text is not JSON (NaN and lone surrogates are not), it nests too deep, or an
            integer has more digits than Python reads (4300).
    """
    value = orjson.loads(content)
    text = content if isinstance(content, str) else content.decode()
    if _MANY_DIGITS.search(text) is None:
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def dumps(
    value: Any, default: Callable[[Any], Any] | None = None, option: int | None = None
) -> bytes:
    """Returns the JSON text of a value, as `orjson.dumps` does, with integers of any size.

    Raises:
        orjson.JSONEncodeError: A value is not a JSON type.
    """
    try:
        return orjson.dumps(value, default, option)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise
    return orjson.dumps(_written(value), default, option)


def _written(value: Any) -> Any:
    """The value with the integers that orjson refuses already written."""
    if isinstance(value, dict):
        return {key: _written(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(each) for each in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    return value


def json_object(value: Any, where: str) -> dict[str, Any]:
    """Returns an object that may be written as JSON text, such as the arguments of a tool call.

    Args:
        value: The object or its text. None and an empty text mean an empty object.
        where: What the error calls it.

    Raises:
        InvalidInput: The text is not JSON, or the value is not an object.
    """
    if isinstance(value, str):
        try:
            value = loads(value.strip() or "{}")
        except ValueError:
            raise InvalidInput(f"{where}: not JSON: {value[:80]!r}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
