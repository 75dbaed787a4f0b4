"""A real inference server behind a proxy that misbehaves when told to: over real HTTP, at any time.

| mode    | every answer                                                       |
|---------|--------------------------------------------------------------------|
| good    | passed on                                                          |
| hang    | never comes, also of what runs; connections are accepted           |
| 500     | HTTP 500                                                           |
| garbage | 200 and bytes that mean nothing                                    |
| lie     | passed on, but for another weight_version                          |
| slow    | passed on at a fiftieth of the speed                               |
| mute    | passed on, but /generate says HTTP 500                             |
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
from aiohttp import web

SLOWER = 50


class BadServer:
    """`url` is where to reach it; `mode` what it does from now on."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self._mode = "good"
        self._changed = asyncio.Event()
        self.generated = 0
        """Requests for generation that arrived."""
        self.url = ""

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.mode = "good"
        await self._runner.cleanup()
        await self._session.close()

    async def _speak(self) -> None:
        while self._mode == "hang":
            await self._changed.wait()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        generates = request.path == "/generate"
        self.generated += generates
        await self._speak()
        if self._mode == "500" or (self._mode == "mute" and generates):
            return web.Response(status=500, text="Internal Server Error: CUDA error")
        if self._mode == "garbage":
            return web.Response(body=b"\x00\x01<html>not json</html>")
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._session.request(
            request.method,
            self._behind + request.path_qs,
            data=await request.read(),
            headers={"Content-Type": request.content_type},
        ) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            if request.path == "/model_info" and self._mode == "lie":
                body = json.loads(await answer.read())
                return web.json_response({**body, "weight_version": "41"})
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            if answer.content_length is not None:
                response.content_length = answer.content_length
            prepared = False
            async for chunk in answer.content.iter_any():
                if self._mode == "slow":
                    await asyncio.sleep((SLOWER - 1) * (loop.time() - began))
                await self._speak()
                if not prepared:
                    await response.prepare(request)
                    prepared = True
                await response.write(chunk)
                began = loop.time()
            if not prepared:
                await response.prepare(request)
            await response.write_eof()
            return response
