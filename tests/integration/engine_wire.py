"""A relay before an inference server that notes what was sampled, as the server itself says it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

START_TIMEOUT_S = 60.0
# Of one connection, and not of the message; nothing is compressed, or it could not be read here.
_HOPS = ("host", "connection", "transfer-encoding", "content-length", "accept-encoding")


@dataclass(frozen=True)
class Sampled:
    """One answer of the server: its prompt, the ids sampled for it, and their logprobs."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass
class Wire:
    """What has passed."""

    url: str = ""
    sampled: list[Sampled] = field(default_factory=list)
    streams: int = 0
    """How many of the answers came as events."""


@contextmanager
def recorded(engine: str) -> Iterator[Wire]:
    """A URL that behaves like the server's; every answer to /generate is in `sampled`."""
    wire, loop, ready = Wire(), asyncio.new_event_loop(), threading.Event()
    ended = asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(
            engine,
            timeout=aiohttp.ClientTimeout(),  # none: those who ask have theirs
            skip_auto_headers=("Accept-Encoding",),
        ) as http:

            async def relay(request: web.Request) -> web.StreamResponse:
                return await _relay(wire, http, request)

            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", relay)
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            wire.url = "http://{}:{}".format(*runner.addresses[0][:2])
            ready.set()
            await ended.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(START_TIMEOUT_S), "the relay does not listen"
        yield wire
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(START_TIMEOUT_S)
        assert not thread.is_alive(), "the relay does not end"
        loop.close()


async def _relay(
    wire: Wire, http: aiohttp.ClientSession, request: web.Request
) -> web.StreamResponse:
    body = await request.read()
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOPS}
    async with http.request(request.method, request.path_qs, data=body, headers=headers) as there:
        kept = {k: v for k, v in there.headers.items() if k.lower() not in _HOPS}
        answer = web.StreamResponse(status=there.status, headers=kept)
        await answer.prepare(request)
        raw, held = bytearray(), b""
        async for part in there.content.iter_any():
            raw += part
            if held:
                await answer.write(held)
            held = part
        # The end is held back: who has it may rely on its being noted.
        if request.path == "/generate" and there.status == 200:
            _note(wire, json.loads(body), bytes(raw))
        await answer.write_eof(held)
    return answer


def _note(wire: Wire, asked: dict[str, Any], raw: bytes) -> None:
    """Adds the answers in the body of a /generate call, in the order of their prompts."""
    if asked["stream"]:
        events = [event.strip().removeprefix(b"data:").strip() for event in raw.split(b"\n\n")]
        assert b"[DONE]" in events, "a stream without an end"
        parsed = [json.loads(event) for event in events if event not in (b"", b"[DONE]")]
        # Each event repeats all that came before it.
        newest = {event.get("index", 0): event for event in parsed}
        answers = [newest[index] for index in sorted(newest)]
        wire.streams += len(answers)
    else:
        found = json.loads(raw)
        answers = found if isinstance(found, list) else [found]
    prompts = asked["input_ids"]
    prompts = prompts if isinstance(prompts[0], list) else [prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] in ("stop", "length"), meta["finish_reason"]
        pairs = meta["output_token_logprobs"]
        assert [pair[1] for pair in pairs] == answer["output_ids"]
        wire.sampled.append(Sampled(prompt, answer["output_ids"], [pair[0] for pair in pairs]))
