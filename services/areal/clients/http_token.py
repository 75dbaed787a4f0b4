"""What an HTTP session presents while the token is rotated."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse


def or_else(previous: Mapping[str, str]) -> tuple[ClientMiddlewareType, ...]:
    """Returns the middlewares of a session: a request that gets 401 is sent again with `previous`.

    A server that was started before the token was rotated does not know the new one.

    Args:
        previous: `Security.previous_headers()`; if empty, there are no middlewares.
    """

    async def present(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        response = await handler(request)
        if response.status != 401:
            return response
        response.release()
        request.headers.update(previous)
        return await handler(request)

    return (present,) if previous else ()
