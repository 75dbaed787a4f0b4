"""POST /generate: hand requests to the engine, wait, answer whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from areal.agents.asgi import unless_hung_up
from areal.chassis import tracing
from areal_inference.api import GenerateCall, parse_generate, render
from areal_inference.decode.grammar import KINDS
from areal_inference.decode.request import Request
from areal_inference.frontend import Frontend
from areal_inference.http_api.requests import Route, guarded, json_response, read_json


def generate_route(frontend: Frontend) -> Route:
    """The /generate endpoint of a frontend."""
    encode, decode = frontend.encode(), frontend.decode()

    @guarded
    async def generate(http: HttpRequest) -> Response:
        body = await read_json(http)
        parse = partial(
            parse_generate,
            body,
            frontend.limits,
            encode,
            frontend.see,
            frontend.constrain,
            frontend.adapters,
        )
        call = await asyncio.to_thread(parse) if is_slow(body) else parse()
        frontend.start(call)
        if call.stream:
            return _Stream(events(call), partial(end, call))
        try:
            await unless_hung_up(http.receive, _all(call))
        finally:
            end(call)
        answers = [render(request, call, decode) for request in call.requests]
        return json_response(answers if call.as_list else answers[0])

    async def events(call: GenerateCall) -> AsyncIterator[bytes]:
        """Cumulative events, one or more tokens apart; several sequences carry an index."""
        async for index, request in updates(call.requests):
            event = render(request, call, decode)
            if call.as_list:
                event["index"] = index
            yield b"data: " + orjson.dumps(event) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def end(call: GenerateCall) -> None:
        abort_unfinished(frontend, call)
        frontend.finished(call)
        _note(frontend, call)

    return generate


class _Stream(StreamingResponse):
    """A stream that ends its call, even one whose client left before the first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _all(call: GenerateCall) -> None:
    for request in call.requests:
        await request.woken.wait()


def is_slow(body: Any) -> bool:
    """Whether a request has what takes longer to read: images, or a grammar."""
    if not isinstance(body, dict):
        return False
    params = body.get("sampling_params")
    every = params if isinstance(params, list) else [params]
    constrained = any(
        isinstance(each, dict) and not each.keys().isdisjoint(KINDS) for each in every
    )
    return constrained or bool(body.get("image_data"))


async def updates(requests: list[Request]) -> AsyncIterator[tuple[int, Request]]:
    """Yield each request whenever it has news, and a last time when it has finished."""
    queue: asyncio.Queue[tuple[int, Request, bool]] = asyncio.Queue()

    async def follow(index: int, request: Request) -> None:
        finished = False
        while not finished:
            await request.woken.wait()
            request.woken.clear()
            finished = request.finish is not None
            await queue.put((index, request, finished))

    followers = [asyncio.create_task(follow(i, r)) for i, r in enumerate(requests)]
    try:
        open_count = len(requests)
        while open_count:
            index, request, finished = await queue.get()
            # An event read late shows the newest state: do not repeat a finished one.
            if request.finish is not None and not finished:
                continue
            open_count -= finished
            yield index, request
    finally:
        for follower in followers:
            follower.cancel()


def _note(frontend: Frontend, call: GenerateCall) -> None:
    """Adds the request's first sequence, usually the only one, to its span."""
    if not tracing.recording():
        return
    request = call.requests[0]
    count = len(request.logprobs)
    starts = [start for _, start in request.spans]
    tracing.note(
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": frontend.config.served_model_name or frontend.config.model_path,
            "gen_ai.usage.input_tokens": len(request.input_ids),
            "gen_ai.usage.output_tokens": count,
            "gen_ai.response.finish_reasons": [(request.finish or {}).get("type", "abort")],
            "areal.sequences": len(call.requests),
            "areal.cached_tokens": request.cached_tokens,
            "areal.queue_seconds": max(0.0, request.started_at - request.received_at),
            "areal.token_versions": [version for version, _ in request.spans],
            "areal.token_version_counts": [
                end - start for start, end in zip(starts, [*starts[1:], count], strict=False)
            ],
        }
    )


def abort_unfinished(frontend: Frontend, call: GenerateCall) -> None:
    """Ends what no one waits for any more."""
    rids = {r.rid for r in call.requests if r.finish is None}
    if rids:
        frontend.engine.tell(lambda s: s.abort(rids, "client disconnected"))
