"""Checks the limits in a section's annotations with pydantic; an error is one line.

pydantic is imported by the check alone: `areal --help` and recipes in workers never load it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from areal.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

# By pydantic's error types; anything else is said in its own words.
_EXPECTED = {
    "greater_than_equal": "{ge:.15g} or more",
    "greater_than": "more than {gt:.15g}",
    "less_than_equal": "{le:.15g} or less",
    "less_than": "less than {lt:.15g}",
}


def check(section: DataclassInstance) -> None:
    """Compares every field, those of inner sections too, with its annotation; no NaN, no infinity.

    Raises:
        ConfigError: One line naming the dotted field, the value and what was expected.
    """
    from pydantic import ValidationError

    values = asdict(section)
    for key, number in _numbers(values, ""):
        if not math.isfinite(number):
            raise ConfigError(f"{key} {number}: expected a finite number")
    try:
        _adapter(type(section)).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        return
    key, value = ".".join(str(part) for part in first["loc"]), first["input"]
    if template := _EXPECTED.get(first["type"]):
        expected = template.format(**first["ctx"])
    else:
        expected = first["msg"].removeprefix("Input should be ")
    raise ConfigError(f"{key} {value!r}: expected {expected}")


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _numbers(each, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _numbers(each, f"{key}[{number}]")
    elif isinstance(value, float):
        yield key, value


@cache
def _adapter(kind: type[DataclassInstance]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
