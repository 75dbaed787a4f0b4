"""Refuses bodies that are too long, in the error format of the route (not as plain text)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Stops a body that says it is too long before it is read, and any other while it comes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        """`limit` is in bytes."""
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI; reading too long a body raises HTTPException, with status 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        told = length.isdecimal() and len(length) < 19
        came, declared = 0, int(length) if told else 0
        started = False

        async def limited() -> Message:
            nonlocal came
            if started or declared <= self._limit:
                message = await receive()
                came += len(message.get("body", b""))
                if started or came <= self._limit:
                    return message
            raise HTTPException(413, f"body: expected at most {self._limit} bytes")

        async def sending(message: Message) -> None:
            nonlocal started
            started = True  # whoever still receives waits for the client to hang up
            await send(message)

        await self._app(scope, limited, sending)
