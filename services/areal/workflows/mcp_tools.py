"""Tools of MCP servers: a connection, and so a session, for each conversation.

conversation ──> Connection.call ──> session of the `mcp` package ──> a process of ours, or a URL
                 its own task holds the session open, because one task must open and close it
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from areal.errors import InvalidInput, Unavailable, WorkflowError
from areal.types import McpServer
from areal.workflows.rendering import Message

if TYPE_CHECKING:
    from mcp import Client

START_TIMEOUT_S = 60.0


def check_server(server: McpServer) -> None:
    """Raises InvalidInput for a description that names no server, or if `mcp` is missing."""
    if bool(server.command) == bool(server.url):
        raise InvalidInput(f"{server}: expected either a command or a url")
    if server.url and not server.url.startswith(("http://", "https://")):
        raise InvalidInput(f"url {server.url!r}: expected http://HOST:PORT/PATH")
    if find_spec("mcp") is None:
        raise InvalidInput("tools of MCP servers: no module 'mcp': pip install mcp")


@asynccontextmanager
async def connections(
    servers: Sequence[McpServer], count: int
) -> AsyncIterator[list[list[Connection]]]:
    """Connects `count` conversations with all servers at once.

    Raises:
        WorkflowError: A program cannot be started, or speaks no MCP within START_TIMEOUT_S.
        Unavailable: A URL does not answer.
    """
    opened = [[Connection(server) for server in servers] for _ in range(count)]
    every = [each for one in opened for each in one]
    try:
        await asyncio.gather(*(each.open() for each in every))
        yield opened
    finally:
        await asyncio.gather(*(each.close() for each in every))


class Connection:
    """One session with a server; any number of calls at once."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._name = server.url or " ".join(server.command)
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self.schemas: dict[str, Message] = {}
        """Schemas by the tools' names, in the form that chat templates read."""

    async def open(self) -> None:
        """See `connections`."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(ready))
        done, _ = await asyncio.wait(
            {ready, self._holding}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if ready in done:
            return
        why = f"no answer within {START_TIMEOUT_S:g} s"
        if done and (error := self._holding.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            why = f"{type(error).__name__}: {error}"
        failure = Unavailable if self._server.url else WorkflowError
        raise failure(f"MCP server {self._name}: {why}")

    async def close(self) -> None:
        """Ends the session; a process is asked to end, then killed, within seconds."""
        self._closing.set()
        if self._holding is not None:
            if not self.schemas:  # it is still opening, or failed to
                self._holding.cancel()
            await asyncio.wait({self._holding})

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns what the model reads, errors of the tool included.

        Raises:
            Unavailable: The connection is lost.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, TextContent

        assert self._client is not None
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise Unavailable(f"MCP server {self._name}: the connection is lost") from None
            return f"error: {error.message}"
        texts = [
            part.text if isinstance(part, TextContent) else f"[{part.type}]"
            for part in result.content
        ]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        said = "\n".join(texts)
        return f"error: {said}" if result.is_error else said

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client, StdioServerParameters

        target: Any = self._server.url
        if self._server.command:
            program, *more = self._server.command
            environment = dict(self._server.environment)
            target = StdioServerParameters(command=program, args=more, env=environment)
        async with Client(target) as client:
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    self.schemas[tool.name] = {
                        "type": "function",
                        "function": {
                            "name": tool.name,
                            "description": tool.description or "",
                            "parameters": tool.input_schema,
                        },
                    }
                if (cursor := page.next_cursor) is None:
                    break
            if not self.schemas:
                raise WorkflowError("it has no tools")
            self._client = client
            if not ready.done():
                ready.set_result(None)
            await self._closing.wait()
