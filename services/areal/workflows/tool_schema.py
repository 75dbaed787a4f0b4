"""A Python function as a tool: its JSON schema for the model, and the check of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from areal.errors import InvalidInput
from areal.workflows.rendering import Message


def arguments_of(tool: Callable[..., Any]) -> type[BaseModel]:
    """Returns what checks the arguments of a call.

    Raises:
        InvalidInput: A parameter has no type, or takes any number of arguments.
    """
    name, hints = tool.__name__, get_type_hints(tool, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.name not in hints or parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
        ):
            raise InvalidInput(f"tool {name}: parameter {parameter}: expected a name with a type")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def schema_of(tool: Callable[..., Any], arguments: type[BaseModel]) -> Message:
    """Returns the tool as chat templates show it: OpenAI's JSON schema of a function."""
    parameters = arguments.model_json_schema()
    parameters.pop("title", None)
    for each in parameters.get("properties", {}).values():
        each.pop("title", None)
    parameters.pop("additionalProperties", None)
    function = {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
