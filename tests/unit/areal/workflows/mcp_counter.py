"""An MCP server with state, on its standard streams or (with a port) over HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int) -> int:
    """Adds to the total, which it returns."""
    global total
    total += number
    return total


@server.tool()
def divide(a: int, b: int) -> float:
    """Divides."""
    from mcp.server.mcpserver.exceptions import ToolError

    if b == 0:
        raise ToolError("division by zero")
    return a / b


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return f"waited in {os.environ.get('PLACE', 'nowhere')}"


@server.tool()
def process() -> int:
    """The id of the process."""
    return os.getpid()


@server.tool()
def die() -> None:
    """Ends the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
