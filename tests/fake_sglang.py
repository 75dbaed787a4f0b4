"""A small server that speaks SGLang's /generate and can be told to misbehave. No model in it.

The token at position p of a sequence is `(p * 7 + 3) % 100 + 10`, its logprob `-p / 100`, so that a
continued request must give exactly what an uninterrupted one would.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from areal.weights.servers import InferenceServer, ServerState


def token_at(position: int) -> int:
    return (position * 7 + 3) % 100 + 10


def route_at(position: int, routes: tuple[int, int, int]) -> list[list[int]]:
    """The experts of the token at that position, [layers, k]."""
    layers, chosen, experts = routes
    return [
        [(position + 5 * layer + i) % experts for i in range(chosen)] for layer in range(layers)
    ]


def routed(body: dict[str, Any], tokens: int, routes: tuple[int, int, int]) -> str:
    """What SGLang says of the experts of a sequence of so many tokens."""
    start = body.get("routed_experts_start_len", 0)
    rows = [route_at(position, routes) for position in range(start, tokens - 1)]
    return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()


def answer(
    prompt: int,
    count: int,
    version: str,
    finish: str = "length",
    old: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """What SGLang answers for `count` tokens; `old` = (tokens, version) before an update."""
    ids = [token_at(prompt + i) for i in range(count)]
    spans = [{"version": version, "start": 0, "end": count}]
    if old is not None and count > old[0]:
        spans = [
            {"version": old[1], "start": 0, "end": old[0]},
            {"version": version, "start": old[0], "end": count},
        ]
    return {
        "output_ids": ids,
        "text": "",
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-(prompt + i) / 100, t, None] for i, t in enumerate(ids)],
            "weight_versions": spans,
            "weight_version": version,
        },
    }


@dataclass
class FakeSGLang:
    """One server; `behave` may replace the answer to a request (None: answer properly)."""

    version: str = "0"
    adapters: tuple[str, ...] = ()
    """Names of those that are loaded; with any, requests that name another are refused."""
    adapter: str = ""
    """That which is listed as `version`."""
    listed_version: str = ""
    """The version that is listed, where answers name another; empty: the same."""
    hold: bool = False
    """Requests wait until aborted; then they answer with `partial` tokens."""
    partial: int = 2
    behave: Callable[[dict[str, Any]], Any] | None = None
    breaks_after: list[tuple[int, str]] | None = None
    """Of a stream: (tokens so far, weight_version) of each event; then the connection breaks."""
    ends_before: tuple[int, ...] = ()
    """Sequences of a batch that have ended when the stream breaks."""
    freezes: bool = False
    """It stays open instead."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    routes: tuple[int, int, int] | None = None
    """Layers, experts of a token, experts of a layer; None: it does not say what it chose."""
    url: str = ""
    _held: dict[str, asyncio.Event] = field(default_factory=dict)

    def listed(self, state: ServerState = ServerState.SERVING, cause: str = "") -> InferenceServer:
        version = int(self.listed_version or self.version)
        return InferenceServer(self.url, self.url, state, version, cause, adapter=self.adapter)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        if self.behave is not None and (special := self.behave(body)) is not None:
            special = await special if isinstance(special, Awaitable) else special
            return (
                special if isinstance(special, web.StreamResponse) else web.json_response(special)
            )
        named = body.get("lora_path", "")
        if self.adapters and named and named not in self.adapters:
            message = f"Got LoRA adapter that has never been loaded: {named}"
            return web.json_response({"error": {"message": message}}, status=400)
        batch = isinstance(body["input_ids"][0], list)
        if not batch:
            body = {**body, "rid": [body["rid"]], "input_ids": [body["input_ids"]]}
        params = body["sampling_params"]
        if isinstance(params, dict):
            params = [params] * len(body["input_ids"])
        if body["stream"]:
            wholes = [
                self._with_routes(body, ids, answer(len(ids), each["max_new_tokens"], self.version))
                for ids, each in zip(body["input_ids"], params, strict=True)
            ]
            prompts = [len(ids) for ids in body["input_ids"]]
            return await self._stream(request, prompts, wholes, batch)
        answers = await asyncio.gather(
            *(
                self._one(rid, ids, each)
                for rid, ids, each in zip(body["rid"], body["input_ids"], params, strict=True)
            )
        )
        answers = [
            self._with_routes(body, ids, each)
            for ids, each in zip(body["input_ids"], answers, strict=True)
        ]
        return web.json_response(answers if batch else answers[0])

    def _with_routes(
        self, body: dict[str, Any], ids: list[int], whole: dict[str, Any]
    ) -> dict[str, Any]:
        if self.routes is not None and body.get("return_routed_experts"):
            tokens = len(ids) + len(whole["output_ids"])
            whole["meta_info"]["routed_experts"] = routed(body, tokens, self.routes)
        return whole

    async def _one(self, rid: str, prompt_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        prompt, most = len(prompt_ids), params["max_new_tokens"]
        if self.hold:
            event = self._held.setdefault(rid, asyncio.Event())
            await event.wait()
            return answer(prompt, min(self.partial, most), self.version, "abort")
        return answer(prompt, most, self.version)

    async def _stream(
        self, request: web.Request, prompts: list[int], wholes: list[dict[str, Any]], batch: bool
    ) -> web.StreamResponse:
        """As SGLang: cumulative, versions of tokens in the last event only, an index in a batch.

        Sequences of a batch come in any order, as there: here the last one is the first.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(index: int, event: dict[str, Any]) -> None:
            event = {**event, "index": index} if batch else event
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        events = [(1, self.version)] if self.breaks_after is None else self.breaks_after
        for count, version in events:
            for index, prompt in reversed(list(enumerate(prompts))):
                if index in self.ends_before:
                    continue
                event = answer(prompt, count, version)
                event["meta_info"]["finish_reason"] = None
                del event["meta_info"]["weight_versions"]
                await send(index, event)
        for index, whole in enumerate(wholes):
            if self.breaks_after is None or index in self.ends_before:
                await send(index, whole)
        if self.breaks_after is not None:
            await response.write(b'data: {"output_ids": [1, 2')
            await asyncio.sleep(30.0 if self.freezes else 0.05)
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        rid = json.loads(await request.read())["rid"]
        self.aborted.append(rid)
        if rid in self._held:
            self._held[rid].set()
        return web.Response()

    def abort_all(self) -> None:
        self.hold = False
        for event in self._held.values():
            event.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeSGLang]:
        app = web.Application()
        app.add_routes(
            [web.post("/generate", self.generate), web.post("/abort_request", self.abort)]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
