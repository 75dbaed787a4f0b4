"""Runs a model's calls: functions of the recipe and tools of MCP servers; it reads their errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from areal.errors import InvalidInput, Unavailable
from areal.tokenizer.chat_template import plain_tools
from areal.workflows.mcp_tools import Connection
from areal.workflows.rendering import Message
from areal.workflows.threads import BlockingCalls, TooManyHung
from areal.workflows.tool_schema import arguments_of, schema_of
from areal.workflows.tool_text import ToolCall


class ToolCalls:
    """The tools of a workflow, for all of its conversations."""

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout_s: float) -> None:
        """`timeout_s` is the limit of one call; raises the errors of `arguments_of`."""
        self._functions = {function.__name__: function for function in functions}
        self._arguments = {name: arguments_of(each) for name, each in self._functions.items()}
        self._timeout_s = timeout_s
        self._blocking = BlockingCalls()

    def schemas(self, connected: Sequence[Connection]) -> list[Message]:
        """Returns all tools in the form that chat templates read.

        Raises:
            InvalidInput: Two have the same name.
        """
        found = [schema_of(each, self._arguments[name]) for name, each in self._functions.items()]
        for connection in connected:
            found += connection.schemas.values()
        names = [schema["function"]["name"] for schema in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInput(f"tools: {', '.join(twice)}: expected one tool of that name")
        return found

    async def run(self, call: ToolCall, connected: Sequence[Connection]) -> Message:
        """Runs one call of a conversation; `connected` are its MCP servers.

        Raises:
            TooManyHung: So many calls hang that no other is started.
            Unavailable: The connection to an MCP server is lost.
        """
        remote = {name: each for each in connected for name in each.schemas}
        try:
            if call.name in remote:
                async with asyncio.timeout(self._timeout_s):
                    result = str(await remote[call.name].call(call.name, call.arguments))
            elif call.name in self._functions:
                result = str(await self._run(call))
            else:
                known = ", ".join([*self._functions, *remote])
                result = f"error: no tool {call.name!r}; expected one of {known}"
        except (TooManyHung, Unavailable):
            raise
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            result = f"error: {where}: {first['msg']}"
        except TimeoutError:
            result = f"error: no result within {self._timeout_s:g} s"
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name, "content": result}

    async def _run(self, call: ToolCall) -> Any:
        """Calls a function of the recipe."""
        function = self._functions[call.name]
        checked = self._arguments[call.name].model_validate(call.arguments)
        arguments = {name: getattr(checked, name) for name in checked.model_fields_set}
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(self._timeout_s):
                return await function(**arguments)
        bound = partial(function, **arguments)
        return await self._blocking.run(call.name, self._timeout_s, bound)


def refuse_other_tools(data: dict[str, Any], schemas: Sequence[Message]) -> None:
    """Raises InvalidInput if a row lists tools that the workflow does not have."""
    known = {schema["function"]["name"] for schema in schemas}
    for tool in plain_tools(data.get("tools")) or []:
        name = (tool.get("function") or tool).get("name")
        if name not in known:
            raise InvalidInput(
                f"row field 'tools': {name!r}, expected tools of the workflow "
                f"({', '.join(sorted(known))})"
            )
