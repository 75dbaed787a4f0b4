"""Arguments that a model writes without quotes, as values of the types that the tool declares.

    zip: string     12345  ──> "12345"
    count: integer  12345  ──> 12345

Without a schema, what reads as JSON is JSON, and anything else is a string. Schemas come from
strangers: what is malformed in one counts as not declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.tokenizer.json_text import loads

MAX_DEPTH = 150
"""Levels of nesting in a call: fewer than in a request, in which clients send the call back."""
Schemas = Mapping[str, Mapping[str, Any]]
"""By name of a tool: the JSON schema of its arguments."""
_MOST_STEPS = 100
_WORDS = {"True": True, "False": False, "None": None}
"""How models that learn from Python write what JSON has other words for."""


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """Returns the schemas of tools, which are in OpenAI's form, or its inner part only."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def value_of(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Returns the value of an argument; never raises.

    Args:
        text: What the model wrote.
        schema: The schema of all arguments.
        key: The argument's name.
    """
    properties = schema.get("properties")
    types = _types(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value = loads(text, MAX_DEPTH)
    except ValueError:
        known = word in _WORDS and _kind(_WORDS[word]) & types
        return _WORDS[word] if known else text
    if "string" in types and (isinstance(value, str) or not _kind(value) & types):
        return text
    return value


def _types(declared: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty: any."""
    found: set[str] = set()
    pending, steps = [declared], 0
    while pending:
        steps += 1
        each = pending.pop()
        if not isinstance(each, Mapping) or steps > _MOST_STEPS:
            return set()
        kinds = each.get("type")
        values = each["enum"] if isinstance(each.get("enum"), list) else [each.get("const")]
        if isinstance(each.get("$ref"), str):
            pending.append(_referred(each["$ref"], root))
        elif isinstance(kinds, str):
            found.add(kinds)
        elif isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            found.update(kinds)
        elif "enum" in each or "const" in each:
            found.update(*map(_kind, values))
        else:
            options = each.get("anyOf") or each.get("oneOf") or each.get("allOf")
            if not isinstance(options, list):
                return set()
            pending += options
    return found


def _referred(path: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that `#/$defs/Name` names."""
    at: Any = root
    for name in path.removeprefix("#/").split("/"):
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def _kind(value: Any) -> set[str]:
    """The JSON types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"} if value is not None else {"null"}
