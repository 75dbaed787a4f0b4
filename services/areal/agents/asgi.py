"""Sends replies to agents from an ASGI server: Starlette and FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal.agents.replies import Reply, send
from areal.errors import Unavailable

T = TypeVar("T")


class HungUp(Unavailable):
    """The client closed its connection before it had the whole answer."""


async def unless_hung_up(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits some work for a client; cancels it and raises HungUp if the client hangs up first.

    Args:
        receive: The request's, of which the body was read.
        work: What the client waits for.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    task = asyncio.ensure_future(work)
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({task})
        if task.cancelled():
            raise HungUp("the client hung up")
        return task.result()
    finally:
        for each in (task, watching):
            each.cancel()
        await asyncio.gather(task, watching, return_exceptions=True)


class AgentResponse(Response):
    """Sends a reply; if the client hangs up, the generation stops and nothing is delivered."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.status_code, self.background = reply.status, None
        if reply.parts is None:
            self.body = reply.body  # for the header Content-Length
        self.init_headers(reply.http_headers())

    async def __call__(self, scope: Scope, receive: Receive, send_message: Send) -> None:
        """Serves one ASGI request."""
        reply = self._reply

        async def begin() -> None:
            await send_message(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )

        async def write(part: bytes, *, more: bool = True) -> None:
            await send_message({"type": "http.response.body", "body": part, "more_body": more})

        sending = send(reply, begin, write, lambda: write(b"", more=False))
        if reply.parts is None and reply.delivered is None:
            await sending  # there is nothing to stop
            return
        try:
            await unless_hung_up(receive, sending)
        except HungUp:
            return
        await reply.arrived()
