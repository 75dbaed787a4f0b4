"""Reading bodies and answering in SGLang's shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from areal.errors import Unavailable
from areal.request_fields import OutOfRange, WrongKind, wrong_kind
from areal_inference.api import SchemaError

MAX_BODY_BYTES = 64 << 20
COMMON: dict[str, type] = {"rid": object, "http_worker_ipc": object}
"""Fields that every control call of SGLang takes."""

Route = Callable[[HttpRequest], Awaitable[Response]]


class BodyTooLarge(Exception):
    """The request body exceeds MAX_BODY_BYTES."""


def json_response(value: Any, status: int = 200) -> Response:
    """Returns a JSON answer; NaN becomes null."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def schema_error(message: str) -> Response:
    """Returns SGLang's answer to a malformed body: 400, never 422."""
    return json_response(
        {
            "object": "error",
            "message": message,
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
        400,
    )


def engine_error(message: str, status: int = 400) -> Response:
    """Returns SGLang's answer when the engine refuses."""
    return json_response({"error": {"message": message}}, status)


def guarded(route: Route) -> Route:
    """Turns the package's errors into answers."""

    @wraps(route)
    async def answer(request: HttpRequest) -> Response:
        try:
            return await route(request)
        except WrongKind as error:
            return schema_error(str(error))
        except (OutOfRange, Unavailable) as error:
            return engine_error(str(error), error.http_status)
        except BodyTooLarge as error:
            return engine_error(str(error), 413)
        except TimeoutError as error:
            return engine_error(str(error), 504)

    return answer


async def read_body(request: HttpRequest) -> bytes:
    """Reads the whole body; raises BodyTooLarge above MAX_BODY_BYTES."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body: over {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


async def read_json(request: HttpRequest) -> Any:
    """Returns the decoded body; an empty body is {}.

    Raises:
        SchemaError: not JSON.
        BodyTooLarge: more than MAX_BODY_BYTES.
    """
    body = await read_body(request)
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise SchemaError(f"Content-Type {kind[:80]!r}: expected application/json")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SchemaError(f"body: not valid JSON: {error}") from None


async def read_object(request: HttpRequest, allowed: dict[str, type]) -> dict[str, Any]:
    """Returns the body as an object with known, correctly typed fields; nulls are dropped."""
    body = await read_json(request)
    if not isinstance(body, dict):
        raise SchemaError("body: expected a JSON object")
    for name, value in body.items():
        if name not in allowed:
            raise SchemaError(f"unknown field {name!r}, expected one of {sorted(allowed)}")
        expected = allowed[name]
        if value is not None and expected is not object and type(value) is not expected:
            raise wrong_kind(name, expected, value)
    return {name: value for name, value in body.items() if value is not None}
