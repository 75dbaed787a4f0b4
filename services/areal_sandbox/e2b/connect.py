"""The Connect protocol in JSON, as much of it as E2B's SDKs speak.

A unary call is a JSON body each way. A streaming call is a sequence of envelopes: one byte of
flags, four of length, JSON; the last envelope has flag 2 and holds the error, if there is one.
https://connectrpc.com/docs/protocol
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from areal.errors import ArealError, InvalidInput
from areal.request_fields import body_of, get, need, shown

_END = 2
_MAX_MESSAGE_BYTES = 64 << 20
Json = dict[str, Any]


class AlreadyExists(InvalidInput):
    """A folder to make is there already."""

    grpc_code = "ALREADY_EXISTS"
    http_status = 409


def refusal(error: ArealError, status: int | None = None) -> web.Response:
    """Returns the answer of a unary call that failed; `status`: None means the error's own."""
    return web.json_response(_described(error), status=status or error.http_status)


def _described(error: ArealError) -> Json:
    # Connect's codes are those of gRPC, in lower case.
    code = "internal" if error.http_status == 500 else error.grpc_code.lower()
    return {"code": code, "message": str(error)}


async def messages(request: web.Request) -> AsyncIterator[Json]:
    """Yields the messages of a request's stream; raises InvalidInput for what is none."""
    try:
        while head := await request.content.read(1):
            size = int.from_bytes(await request.content.readexactly(4), "big")
            if size > _MAX_MESSAGE_BYTES or head[0] & 1:
                raise InvalidInput(
                    f"message of {size} bytes, flags {head[0]}: expected at most "
                    f"{_MAX_MESSAGE_BYTES} bytes without compression"
                )
            body = await request.content.readexactly(size)
            if head[0] & _END:
                return
            yield parse(body)
    except EOFError:
        raise InvalidInput("the stream ended inside a message") from None


def parse(body: bytes) -> Json:
    """Returns a JSON object, {} for an empty body; raises InvalidInput for anything else."""
    return body_of(body or b"{}")


def field(message: Json, name: str, kind: type, default: Any = None) -> Any:
    """Returns a field; raises InvalidInput if it is of another kind, or has no default."""
    return need(message, name, kind) if default is None else get(message, name, kind) or default


def seconds(value: object, name: str) -> float:
    """Returns a time in seconds; raises InvalidInput if it is no number of zero or more."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = -1.0
    if not 0 <= found < float("inf"):
        raise InvalidInput(f"{name}: expected a number of seconds, got {shown(value)}")
    return found


async def stream(request: web.Request, events: AsyncIterator[Json]) -> web.StreamResponse:
    """Answers with a stream of messages, and at its end with the error that ended it, if any."""
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    end: Json = {}
    async with aclosing(events):  # type: ignore[type-var]
        try:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_envelope(0, event))
        except ArealError as error:
            end = {"error": _described(error)}
    if not response.prepared:
        await response.prepare(request)
    await response.write(_envelope(_END, end))
    await response.write_eof()
    return response


def _envelope(flags: int, message: Json) -> bytes:
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body
