"""JSON that strangers wrote (models, agents, rows) to values and back.

orjson reads an integer beyond 64 bits as a float, refuses one beyond a double, reads values that
are nested deeper than it can write, and refuses to write integers beyond 64 bits. Python's json
takes NaN, half characters and any depth until the stack ends. Models and rows have all of these.
Here, what `loads` reads can be written by `dumps`, and anything else is a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import orjson

from areal.errors import InvalidInput

MAX_DEPTH = 200
"""Levels of nesting that `loads` reads: fewer than can be written, because the value is written
inside records and answers."""
WRITER_DEPTH = 254
"""Levels of nesting that `dumps` writes."""
# 19 digits are the shortest number that may not fit; a text of digits only costs the slower parser.
_LONG = b"0" * 19
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LEAST, _MOST = -(2**63), 2**64 - 1
_EXACT = 2**53


class TooDeep(ValueError):
    """JSON that is nested too deep."""

    def __init__(self, levels: int) -> None:
        super().__init__(f"nested too deep, expected {levels} levels at most")


def loads(content: str | bytes, levels: int = MAX_DEPTH) -> Any:
    """Returns the value of a JSON text in UTF-8; integers stay integers.

    Args:
        content: The text.
        levels: The most levels of nesting, up to `WRITER_DEPTH`.

    Raises:
        ValueError: The text is not JSON (NaN, lone surrogates and numbers beyond a double that are
            no integers are not), it is nested too deep (`TooDeep`), or an integer has more
            digits than Python reads (4300).
    """
    raw = content.encode() if isinstance(content, str) else content
    value: Any = None
    if _LONG in raw.translate(_DIGITS):
        value = _any_integers(raw, levels)
    else:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if "depth limit" in str(error):
                raise TooDeep(levels) from None
            raise
    if raw.count(b"{") + raw.count(b"[") > levels and _too_deep(value, levels):
        raise TooDeep(levels)
    return value


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


def canonical(value: Any) -> bytes:
    """Returns the one JSON text of a value, for digests and comparisons: that of RFC 8785.

    Two values that a client took for the same have the same text: JavaScript sends 3 where the
    model wrote 3.0, and sorts no keys. Never raises for values of `loads`. What the RFC has no text
    for is written as Python's json writes it: integers beyond a double in full, half characters as
    escapes; numbers that are not finite are null.
    """
    return _canonical(value).encode()


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


def _any_integers(raw: bytes, levels: int) -> Any:
    """Reads JSON like `orjson.loads`, but keeps integers of any size."""

    def refused(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refused(digits[:20])

    try:
        value = json.loads(raw.decode(), parse_constant=refused, parse_float=finite)
        dumps(value)
    except RecursionError:
        raise TooDeep(levels) from None
    except orjson.JSONEncodeError as error:
        if "ecursion" in str(error):
            raise TooDeep(levels) from None
        raise ValueError(str(error)) from None  # half a character
    return value


def _too_deep(value: Any, levels: int) -> bool:
    for _ in range(WRITER_DEPTH - levels):
        value = [value]
    try:
        dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def _written(value: Any) -> Any:
    """The value with the integers that orjson refuses already written."""
    if isinstance(value, dict):
        return {key: _written(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(each) for each in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    return value


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [(str(key), each) for key, each in value.items()]
        pairs.sort(key=lambda pair: pair[0].encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join([f"{_text(key)}:{_canonical(each)}" for key, each in pairs]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([_canonical(each) for each in value]) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _text(value) if isinstance(value, str) else _number(value)


def _text(value: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return json.dumps(value)


def _number(value: float) -> str:
    """Writes a number as ECMAScript does (Number::toString)."""
    if isinstance(value, int) and abs(value) <= _EXACT:
        return str(value)
    try:
        number = float(value)
    except OverflowError:
        return str(value)
    if not math.isfinite(number):
        return "null"
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    _, figures, exponent = Decimal(repr(abs(number))).normalize().as_tuple()
    digits = "".join(map(str, figures))
    assert isinstance(exponent, int)  # it is finite
    point = len(digits) + exponent  # digits before the decimal point
    if -6 < point <= 21:
        digits = digits.rjust(len(digits) + 1 - min(point, 1), "0").ljust(point, "0")
        whole, part = digits[: max(point, 1)], digits[max(point, 1) :]
        return f"{sign}{whole}.{part}" if part else f"{sign}{whole}"
    part = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{part}e{point - 1:+d}"
