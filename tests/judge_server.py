"""An endpoint for judges in tests: OpenAI's wire, spoken by FastAPI over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from openai.types.chat import ChatCompletion
from tests.ports import free_port
from tests.waiting import until

Answer = Callable[[str], Awaitable[str | Response]]


class JudgeServer:
    """Says what `answer` makes of the last message; records requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._chat)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers["authorization"])
        said = await self.answer(body["messages"][-1]["content"])
        if isinstance(said, Response):
            return said
        message = {"role": "assistant", "content": said}
        whole = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40},
        }
        return JSONResponse(ChatCompletion.model_validate(whole).model_dump())


@asynccontextmanager
async def judge_server(answer: Answer) -> AsyncIterator[JudgeServer]:
    """One that listens."""
    server = JudgeServer(answer)
    config = uvicorn.Config(server.app, port=server.port, log_level="error", lifespan="off")
    uvicorn_server = uvicorn.Server(config)
    serving = asyncio.create_task(uvicorn_server.serve())
    try:
        await until(lambda: uvicorn_server.started, "the judge's endpoint", 30)
        yield server
    finally:
        uvicorn_server.should_exit = uvicorn_server.force_exit = True
        await serving
