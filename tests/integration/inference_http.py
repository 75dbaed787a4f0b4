"""SGLang's protocol over HTTP, as tests speak it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp


@dataclass
class Served:
    url: str
    folder: Path
    other: Path
    """A second model of the same shape."""
    wrong: Path
    """A model of another shape."""
    model: Any


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def generate(http: aiohttp.ClientSession, ids: Any, new: int = 8, **values: Any) -> Any:
    params = {"max_new_tokens": new, **values.pop("params", {})}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": params, **values}
    status, answer = await post(http, "/generate", body)
    assert status == 200, answer
    return answer


async def events(http: aiohttp.ClientSession, body: Any):
    """Server-sent events of a streaming /generate, decoded."""
    request = http.post("/generate", json={**body, "stream": True}, read_bufsize=1 << 22)
    async with request as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield None if data == b"[DONE]" else json.loads(data)


def logprobs_of(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def first_token(http: aiohttp.ClientSession, body: Any) -> tuple[Any, list[Any]]:
    """Start a streaming request; returns the stream after its first event, and that event."""
    stream = events(http, body)
    return stream, [await anext(stream)]


# Outlasts any test by far: these requests are aborted.
LONG = {"max_new_tokens": 8000, "ignore_eos": True}


async def metrics(http: aiohttp.ClientSession) -> dict[str, float]:
    _, text = await get(http, "/metrics")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name.split("{")[0]: float(value) for name, value in pairs}
