"""The least that could stand between an agent and an engine: FastAPI in front, httpx behind.

python http_relay.py ENGINE_URL PORT     # serves POST /v1/chat/completions until it is killed
"""

from __future__ import annotations

import sys

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response


def build(engine: str) -> FastAPI:
    """Returns the application of the relay."""
    app = FastAPI()
    client = httpx.AsyncClient(base_url=engine, timeout=120.0)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.body()
        headers = {"Content-Type": "application/json"}
        reply = await client.post("/v1/chat/completions", content=body, headers=headers)
        return Response(reply.content, reply.status_code, media_type="application/json")

    return app


if __name__ == "__main__":
    app = build(sys.argv[1])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
